"""Hooks functions that save and load. `hooks.resume` keeps what they find.

A call of a saving function on the training thread is a checkpoint. A call of a loading function before the first step
is a restore.
"""

from __future__ import annotations

import functools
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.hooks.patching import forget_frame, unseen
from telemetry.hooks.resume import holds_optimizer
from telemetry.records import CHECKPOINT
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from telemetry.hooks.patching import Patches
    from telemetry.hooks.tracker import StepTracker

_DISTRIBUTED: Final = "torch.distributed.checkpoint"

SAVING: Final = {
    "torch": ("save",),
    "torch.serialization": ("save",),
    _DISTRIBUTED: ("save", "async_save"),
    f"{_DISTRIBUTED}.state_dict_saver": ("save", "async_save"),
    "safetensors.torch": ("save_file", "save_model"),
}
LOADING: Final = {
    "torch": ("load",),
    "torch.serialization": ("load",),
    _DISTRIBUTED: ("load",),
    f"{_DISTRIBUTED}.state_dict_loader": ("load", "load_state_dict"),
    "safetensors.torch": ("load_file", "load_model"),
}
"""The functions by module. A function that the installed version does not have is skipped."""


def patch_module(module: ModuleType, tracker: StepTracker, patches: Patches) -> None:
    """Patch the functions of one module that save and load."""
    for functions, wrap in ((SAVING, _timed_save), (LOADING, _timed_load)):
        for name in functions.get(module.__name__, ()):
            if callable(vars(module).get(name)):
                patches.replace(module, name, functools.partial(wrap, tracker=tracker))


def _timed_save(original: Callable[..., Any], tracker: StepTracker) -> Callable[..., Any]:
    @functools.wraps(original)
    @unseen
    def save(*args: Any, **kwargs: Any) -> Any:
        start, before, elsewhere = now_ns(), None, None
        try:
            if get_ident() == tracker.thread:
                tracker.resume.saving(holds_optimizer=_holds_optimizer(original, args, kwargs))
            elif tracker.active and not (tracker.checkpointing or tracker.resume.writing_elsewhere):
                elsewhere = tracker.optimizer_steps, tracker.ring.closed
            if not tracker.checkpointing:  # saving functions call each other: only the outermost counts
                before = tracker.enter_phase(CHECKPOINT)
        except Exception as error:
            tracker.fault(error)
        try:
            result = original(*args, **kwargs)
            if elsewhere is not None:
                whole = _holds_optimizer(original, args, kwargs)
                tracker.resume.saved_elsewhere(start, elsewhere, holds_optimizer=whole)
            elif tracker.checkpointing:
                _returned(tracker, result)
        except BaseException as error:
            if get_ident() == tracker.thread:
                tracker.resume.failed()
            forget_frame(error)
            raise
        finally:
            if before is not None:
                try:
                    tracker.exit_phase(CHECKPOINT, before, start)
                except Exception as error:
                    tracker.fault(error)
        return result

    return save


def _returned(tracker: StepTracker, result: object) -> None:
    try:
        tracker.resume.returned(result)
    except Exception as error:  # the result only looks like a future
        tracker.note_error(error)


def _holds_optimizer(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a saved object has an optimizer's state. torch.distributed.checkpoint is taken to save everything."""
    return original.__module__.startswith(_DISTRIBUTED) or holds_optimizer(args[0] if args else kwargs.get("obj"))


def _timed_load(original: Callable[..., Any], tracker: StepTracker) -> Callable[..., Any]:
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


def patch_optimizer(optimizer_class: type, tracker: StepTracker, patches: Patches) -> None:
    """Read an optimizer's position from the state that it loads."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        timed = _timed_load(original, tracker)

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

        # Torch marks the original in the same way, so that Dynamo does not trace it.
        load_state_dict._torchdynamo_disable = True  # type: ignore[attr-defined]
        return load_state_dict

    patches.replace(optimizer_class, "load_state_dict", wrap)


def patch_state_creation(module: ModuleType, tracker: StepTracker, patches: Patches) -> None:
    """Do not count the step with which torch.distributed.checkpoint creates an optimizer's state: it trains nothing."""

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
