"""Planting the probe: the workers of every DataLoader iterator that is made are timed from their first fetch on.

The seam is the constructor of the iterators with workers, because that is where workers are started: a library that
brings a loader of its own (fastai) makes torch's iterators itself and never calls ``DataLoader._get_iterator``.
"""

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


def patch_workers(iterators: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch the constructor of a class of iterators with workers, which starts the workers."""
    patches.replace(iterators, "__init__", lambda original: _probed(original, tracker))


def _probed(original: Callable[..., None], tracker: StepTracker) -> Callable[..., None]:
    begun: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # loaders, by id

    @functools.wraps(original)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        probe = _probe_for(loader, tracker) if tracker.active else None
        try:
            original(self, loader if probe is None else _Probed(loader, probe), *args, **kwargs)
        except BaseException as error:
            forget_frame(error)
            raise
        try:
            if isinstance(getattr(self, "_worker_init_fn", None), WorkerProbe):
                self._worker_init_fn = loader.worker_init_fn
            if tracker.active:
                again = begun.get(id(loader)) is loader
                begun[id(loader)] = loader
                tracker.sources.register(self, probe.block if probe is not None else None, again=again)
        except Exception as error:
            tracker.fault(error)

    return __init__


def _probe_for(loader: Any, tracker: StepTracker) -> WorkerProbe | None:
    """The probe that is to run in the loader's workers; None where it cannot be planted."""
    try:
        if not 0 < loader.num_workers <= MAX_WORKERS:
            return None
        user = loader.worker_init_fn
        inner = MarkedWorker(user) if tracker.marks.nvtx else user
        return WorkerProbe(inner, WorkerBlock(loader.num_workers))
    except Exception as error:
        tracker.fault(error)
        return None


class _Probed:
    """A loader as the constructor of its iterator is to see it: with the probe as its ``worker_init_fn``.

    The loader itself is left as it is, so that another thread may iterate it, pickle it or change it meanwhile. Torch
    reads from it what it needs and keeps no reference.
    """

    def __init__(self, loader: Any, probe: WorkerProbe) -> None:
        vars(self).update(_telemetry_loader=loader, worker_init_fn=probe)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return vars(self)["_telemetry_loader"].__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_telemetry_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_telemetry_loader"], name, value)

    def __iter__(self) -> Any:
        return iter(vars(self)["_telemetry_loader"])

    def __len__(self) -> int:
        return len(vars(self)["_telemetry_loader"])
