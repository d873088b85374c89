"""Named ranges in the traces of profilers: ``record_function`` and NVTX.

While a snapshot records, phases and waits for watched iterables are ranges of its trace. Torch itself marks the waits
for a DataLoader. With the setting ``nvtx``, steps, waits, phases and the workers' fetches are always NVTX ranges, which
Nsight Systems shows. Then no step takes the fast path of the hooks.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from telemetry.attach.traceback_frames import forget_frame, unseen
from telemetry.attach.worker_probe import in_worker_process, note_wrapper, without_ours
from telemetry.core.errors import let_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    End = Callable[[], object]
    Maker = Callable[[str], End]


class ProfilerRanges:
    """The ranges of the training thread.

    Attributes:
        makers: each begins a range and returns the function that ends it. Empty while no profiler records.
        nvtx: whether steps are always NVTX ranges.
    """

    __slots__ = ("_step", "makers", "nvtx")

    def __init__(self) -> None:
        self.makers: tuple[Maker, ...] = ()
        self.nvtx = False
        self._step: Sequence[End] = ()

    def use_nvtx(self, nvtx: Any) -> None:
        """Make NVTX ranges from now on.

        Args:
            nvtx: ``torch.cuda.nvtx``.

        Raises:
            RuntimeError: this torch has no NVTX.
        """
        nvtx.range_end(nvtx.range_start("telemetry"))
        self.makers += (lambda name: functools.partial(nvtx.range_end, nvtx.range_start(name)),)
        self.nvtx = True

    def begin(self, name: str) -> Sequence[End]:
        """Begin a range. Returns what `end` needs."""
        return [make(name) for make in self.makers]

    def end(self, ends: Sequence[End]) -> None:
        """End a range, even if no profiler records any more."""
        for end in reversed(ends):
            end()

    def step(self, ended: int, *, opens: bool) -> None:
        """``ended`` steps have ended. With ``opens`` the next step begins."""
        self.end(self._step)
        self._step = self.begin(f"step {ended + 1}") if opens else ()


class MarkedWorker:
    """A ``worker_init_fn`` that makes each fetch an NVTX range, and then runs the user's own function.

    Args:
        user: the loader's ``worker_init_fn``; None if it has none.
    """

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self.user = user
        self._maker = os.getpid()

    def __call__(self, worker_id: int) -> None:
        """Called by the DataLoader in the worker. Patches nothing if the worker is a thread of the training process."""
        try:
            if in_worker_process(self._maker):
                _mark_fetches(worker_id)
        except Exception as error:
            let_pass(error)  # it cannot be reported from here
        if self.user is None:
            return
        try:
            self.user(worker_id)
        except BaseException as error:
            forget_frame(error)
            raise


def _mark_fetches(worker: int) -> None:
    """Patch the fetchers of this worker process."""
    nvtx: Any = sys.modules["torch.cuda.nvtx"]
    nvtx.range_push("telemetry")  # if NVTX is missing, this raises now and not during a fetch
    nvtx.range_pop()
    fetch: Any = sys.modules["torch.utils.data._utils.fetch"]
    for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        kind.fetch = _marked(without_ours(kind.fetch, "marked"), nvtx, f"fetch, worker {worker}")


def _marked(original: Callable[[Any, Any], Any], nvtx: Any, name: str) -> Callable[[Any, Any], Any]:
    @functools.wraps(original)
    @unseen
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        nvtx.range_push(name)
        try:
            return original(self, possibly_batched_index)
        except BaseException as error:
            forget_frame(error)
            raise
        finally:
            nvtx.range_pop()

    return note_wrapper(fetch, "marked")
