"""Hooks functions that save and load. `seams.resume` keeps what they find.

A call of a saving function on the training thread is a checkpoint. A call of a loading function before the first step
is a restore.
"""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.model.records import CHECKPOINT
from telemetry.seams.patching import FAILED, around
from telemetry.seams.resume import holds_optimizer
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from telemetry.seams.patching import Patches
    from telemetry.seams.tracker import Interrupted, StepTracker

    _Save = tuple[int, Interrupted | None, tuple[int, int] | None]
    """Its start; what `exit_phase` needs; on another thread, the steps of optimizers and of the loop"""

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

    def after_load(counts: bool | None, *_: Any, **__: Any) -> None:  # noqa: FBT001
        if counts:
            tracker.resume.end_restore()

    for name in SAVING.get(module.__name__, ()):
        if callable(vars(module).get(name)):
            saving = _Saving(tracker, everything=vars(module)[name].__module__.startswith(_DISTRIBUTED))
            patches.around(module, name, before=saving.before, after=saving.after, on_error=tracker.fault)
    for name in LOADING.get(module.__name__, ()):
        if callable(vars(module).get(name)):
            begin = functools.partial(_begin_load, tracker)
            patches.around(module, name, before=begin, after=after_load, on_error=tracker.note_error)


def _begin_load(tracker: StepTracker, *_: Any, **__: Any) -> bool:
    return tracker.resume.begin_restore(tracker)


class _Saving:
    """What happens before and after each call of a saving function.

    Args:
        tracker: gets the checkpoints.
        everything: whether the function is taken to save everything, as that of torch.distributed.checkpoint.
    """

    def __init__(self, tracker: StepTracker, *, everything: bool) -> None:
        self._tracker = tracker
        self._everything = everything

    def before(self, obj: object = None, /, *_: Any, **named: Any) -> _Save | None:
        """Begin a checkpoint on the training thread. On any other thread it only notes the steps so far."""
        if sys._getframe(2).f_globals.get("__name__") == "torch.storage":
            return None  # a tensor that is pickled saves its storage in this way
        tracker, start, outer, elsewhere = self._tracker, now_ns(), None, None
        if get_ident() == tracker.thread:
            tracker.resume.saving(holds_optimizer=self._is_whole(named.get("obj", obj)))
        elif tracker.active and not (tracker.checkpointing or tracker.resume.writing_elsewhere):
            elsewhere = tracker.optimizer_steps, tracker.ring.closed
        if not tracker.checkpointing:  # saving functions call each other: only the outermost counts
            outer = tracker.enter_phase(CHECKPOINT)
        return start, outer, elsewhere

    def after(self, noted: _Save | None, result: object, obj: object = None, /, *_: Any, **named: Any) -> None:
        """End it."""
        if noted is None:
            return
        tracker, (start, outer, elsewhere) = self._tracker, noted
        try:
            if result is FAILED:
                if get_ident() == tracker.thread:
                    tracker.resume.failed()
            elif elsewhere is not None:
                whole = self._is_whole(named.get("obj", obj))
                tracker.resume.saved_elsewhere(start, elsewhere, holds_optimizer=whole)
            elif tracker.checkpointing:
                tracker.resume.returned(result)
        finally:
            if outer is not None:
                tracker.exit_phase(CHECKPOINT, outer, start)

    def _is_whole(self, saved: object) -> bool:
        return self._everything or holds_optimizer(saved)


def patch_optimizer(optimizer_class: type, tracker: StepTracker, patches: Patches) -> None:
    """Time the loading of an optimizer's state, and read its position from that state."""

    def after(counts: bool | None, result: object, optimizer: Any, given: Any = None, /, **named: Any) -> None:  # noqa: FBT001
        if counts:
            tracker.resume.end_restore()
        if result is not FAILED and tracker.active:
            tracker.resume.loaded(tracker, optimizer, named.get("state_dict", given))

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        begin = functools.partial(_begin_load, tracker)
        load_state_dict = around(original, before=begin, after=after, on_error=tracker.note_error)
        # Torch marks the original in the same way, so that Dynamo does not trace it.
        load_state_dict._torchdynamo_disable = True  # type: ignore[attr-defined]
        return load_state_dict

    patches.replace(optimizer_class, "load_state_dict", wrap)


def patch_state_creation(module: ModuleType, tracker: StepTracker, patches: Patches) -> None:
    """Do not count the step with which torch.distributed.checkpoint creates an optimizer's state: it trains nothing."""

    def before(*_: Any, **__: Any) -> tuple[int, bool]:
        noted = tracker.optimizer_steps, tracker.resume.initializing
        tracker.resume.initializing = True
        return noted

    def after(noted: tuple[int, bool] | None, *_: Any, **__: Any) -> None:
        if noted is not None:
            tracker.optimizer_steps, tracker.resume.initializing = noted

    if callable(vars(module).get("_init_optim_state")):
        patches.around(module, "_init_optim_state", before=before, after=after, on_error=tracker.fault)
