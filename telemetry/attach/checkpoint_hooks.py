"""Times checkpoints: a call of a saving function on the training thread is a checkpoint."""

from __future__ import annotations

import functools
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.resume_state import holds_optimizer
from telemetry.attach.traceback_frames import forget_frame, unseen
from telemetry.core.clock import now_ns
from telemetry.core.labels import CHECKPOINT

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from telemetry.attach.patches import Patches
    from telemetry.attach.step_tracker import StepTracker

SAVING_FUNCTIONS: Final = {
    "torch": ("save",),
    "torch.serialization": ("save",),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "safetensors.torch": ("save_file", "save_model"),
}
"""The saving functions by module. Functions that the installed version does not have are skipped."""


def patch_saving(module: ModuleType, tracker: StepTracker, patches: Patches) -> None:
    """Patch the saving functions of one module of `SAVING_FUNCTIONS`."""
    for name in SAVING_FUNCTIONS[module.__name__]:
        if callable(vars(module).get(name)):
            patches.replace(module, name, lambda original: _timed(original, tracker))


def _timed(original: Callable[..., Any], tracker: StepTracker) -> Callable[..., Any]:
    @functools.wraps(original)
    @unseen
    def save(*args: Any, **kwargs: Any) -> Any:
        start, before, elsewhere = now_ns(), None, None
        try:
            if get_ident() == tracker.thread:
                tracker.resume.saving(holds_optimizer=_holds_optimizer(original, args, kwargs))
            elif tracker.active and not (tracker.checkpointing or tracker.resume.writing_elsewhere):
                elsewhere = tracker.optimizer_steps, tracker.ring.closed
            if not tracker.checkpointing:  # saving functions call one another: only the outermost counts
                before = tracker.scopes.enter_phase(CHECKPOINT)
        except Exception as error:
            tracker.fault(error)
        try:
            result = original(*args, **kwargs)
            _returned(tracker, result, start, elsewhere, (original, args, kwargs))
        except BaseException as error:
            if get_ident() == tracker.thread:
                tracker.resume.failed()
            forget_frame(error)
            raise
        finally:
            if before is not None:
                try:
                    tracker.scopes.exit_phase(CHECKPOINT, before, start)
                except Exception as error:
                    tracker.fault(error)
        return result

    return save


def _returned(
    tracker: StepTracker,
    result: Any,
    start: int,
    elsewhere: tuple[int, int] | None,
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
) -> None:
    """A saving function has returned. ``elsewhere``: the steps at its start, where that was on another thread."""
    try:
        if elsewhere is not None:
            tracker.resume.saved_elsewhere(start, elsewhere, holds_optimizer=_holds_optimizer(*call))
            return
        future = getattr(result, "upload_completion", result)
        if tracker.checkpointing and callable(getattr(future, "add_done_callback", None)):
            tracker.resume.writing(future)
    except Exception as error:
        tracker.note_error(error)


def _holds_optimizer(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """What torch.distributed.checkpoint writes is taken for whole: its parts may be objects that save themselves."""
    if original.__module__.startswith("torch.distributed.checkpoint"):
        return True
    return holds_optimizer(args[0] if args else kwargs.get("obj"))
