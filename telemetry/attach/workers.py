"""Planting the probe: the workers of every DataLoader iterator that is made are timed from their first fetch on."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from telemetry.attach.frames import forget_frame
from telemetry.attach.marks import MarkedWorker
from telemetry.attach.worker_probe import MAX_WORKERS, WorkerBlock, WorkerProbe

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.attach.patches import Patches
    from telemetry.attach.steps import StepTracker


def patch_workers(loader: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch a class of loaders' ``_get_iterator``, which makes the iterator, and so starts the workers."""
    patches.replace(loader, "_get_iterator", lambda original: _probed(original, tracker))


def _probed(original: Callable[[Any], Any], tracker: StepTracker) -> Callable[[Any], Any]:
    begun: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # loaders, by id

    @functools.wraps(original)
    def _get_iterator(self: Any) -> Any:
        user = vars(self).get("worker_init_fn")
        probe: WorkerProbe | None = _plant(self, tracker) if tracker.active else None
        try:
            iterator = original(self)
        except BaseException as error:
            forget_frame(error)
            raise
        finally:
            if probe is not None:
                self.worker_init_fn = user
        try:
            if tracker.active:
                again = begun.get(id(self)) is self
                begun[id(self)] = self
                tracker.sources.register(iterator, probe.block if probe is not None else None, again=again)
            if isinstance(getattr(iterator, "_worker_init_fn", None), WorkerProbe):
                iterator._worker_init_fn = self.worker_init_fn
        except Exception as error:
            tracker.fault(error)
        return iterator

    return _get_iterator


def _plant(loader: Any, tracker: StepTracker) -> WorkerProbe | None:
    """Put a probe in the place of the loader's ``worker_init_fn`` while its workers are started."""
    try:
        if not 0 < loader.num_workers <= MAX_WORKERS or "worker_init_fn" not in vars(loader):
            return None
        user = loader.worker_init_fn
        inner = MarkedWorker(user) if tracker.marks.nvtx else user
        probe = WorkerProbe(inner, WorkerBlock(loader.num_workers))
        loader.worker_init_fn = probe
    except Exception as error:
        tracker.fault(error)
        return None
    return probe
