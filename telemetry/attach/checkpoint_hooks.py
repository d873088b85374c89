"""Times checkpoints: a call of a saving function on the training thread is a checkpoint."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.traceback_frames import forget_frame
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
    def save(*args: Any, **kwargs: Any) -> Any:
        start, before = now_ns(), None
        try:
            if not tracker.checkpointing:  # saving functions call one another: only the outermost counts
                before = tracker.scopes.enter_phase(CHECKPOINT)
        except Exception as error:
            tracker.fault(error)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            forget_frame(error)
            raise
        finally:
            if before is not None:
                try:
                    tracker.scopes.exit_phase(CHECKPOINT, before, start)
                except Exception as error:
                    tracker.fault(error)

    return save
