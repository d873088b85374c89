"""Restoring: a call of a loading function before the first step, and the state that an optimizer has loaded."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.traceback_frames import forget_frame, unseen

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from telemetry.attach.patches import Patches
    from telemetry.attach.step_tracker import StepTracker

LOADING_FUNCTIONS: Final = {
    "torch": ("load",),
    "torch.serialization": ("load",),
    "torch.distributed.checkpoint": ("load",),
    "torch.distributed.checkpoint.state_dict_loader": ("load", "load_state_dict"),
    "safetensors.torch": ("load_file", "load_model"),
}
"""By module. Functions that the installed version does not have are skipped."""


def patch_loading(module: ModuleType, tracker: StepTracker, patches: Patches) -> None:
    """Patch the loading functions of one module of `LOADING_FUNCTIONS`."""
    for name in LOADING_FUNCTIONS[module.__name__]:
        if callable(vars(module).get(name)):
            patches.replace(module, name, lambda original: _timed(original, tracker))


def patch_optimizer(optimizer_class: type, tracker: StepTracker, patches: Patches) -> None:
    """Read an optimizer's position from the state that it loads."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        timed = _timed(original, tracker)

        @functools.wraps(original)
        @unseen
        def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = timed(self, *args, **kwargs)
            except BaseException as error:
                forget_frame(error)
                raise
            try:
                if tracker.active:
                    tracker.resume.loaded(tracker, self, args[0] if args else kwargs.get("state_dict"))
            except Exception as error:
                tracker.note_error(error)
            return result

        # As torch marks the original: Dynamo is not to trace it.
        load_state_dict._torchdynamo_disable = True  # type: ignore[attr-defined]
        return load_state_dict

    patches.replace(optimizer_class, "load_state_dict", wrap)


def patch_state_creation(module: ModuleType, tracker: StepTracker, patches: Patches) -> None:
    """Do not count the step by which torch.distributed.checkpoint creates an optimizer's state: it trains nothing."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        @unseen
        def create(*args: Any, **kwargs: Any) -> Any:
            resume, before, outer = tracker.resume, tracker.optimizer_steps, tracker.resume.initializing
            resume.initializing = True
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                forget_frame(error)
                raise
            finally:
                resume.initializing = outer
                tracker.optimizer_steps = before

        return create

    if callable(vars(module).get("_init_optim_state")):
        patches.replace(module, "_init_optim_state", wrap)


def _timed(original: Callable[..., Any], tracker: StepTracker) -> Callable[..., Any]:
    @functools.wraps(original)
    @unseen
    def load(*args: Any, **kwargs: Any) -> Any:
        counts = False
        try:
            counts = tracker.resume.begin_restore(tracker)
        except Exception as error:
            tracker.note_error(error)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            forget_frame(error)
            raise
        finally:
            if counts:
                tracker.resume.end_restore()

    return load
