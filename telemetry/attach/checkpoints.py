"""Checkpoints: a call of a saving function on the training thread is a checkpoint."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.frames import forget_frame
from telemetry.clock import now_ns
from telemetry.records import CHECKPOINT

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from telemetry.attach.patches import Patches
    from telemetry.attach.steps import StepTracker

SAVING_FUNCTIONS: Final = {
    "torch": ("save",),
    "torch.serialization": ("save",),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "safetensors.torch": ("save_file", "save_model"),
}
"""By module; one that a version of it does not have is passed over."""


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
            if not tracker.checkpointing:  # one saving function calls another: the outermost counts
                before = tracker.enter_phase(CHECKPOINT)
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
                    tracker.exit_phase(CHECKPOINT, before, start)
                except Exception as error:
                    tracker.fault(error)

    return save
