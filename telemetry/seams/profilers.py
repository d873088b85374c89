"""The user's own profilers: whether one records, and named ranges in their traces."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Final

from telemetry.seams.patching import FAILED, WeakMap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from telemetry.seams.patching import Patches

    End = Callable[[], object]
    Maker = Callable[[str], End]


# -- tracks which of the user's own profilers record, and calls a function before one begins ---------------------------
# Kineto has one session per process. A second session empties the first. Then the session that stops last ends the
# process with a segmentation fault (torch 2.13, sessions on two threads). So our profiler never begins while one of the
# user's ("theirs") records, and ours ends before one of theirs begins.
#
# Every profiler passes through `torch.autograd.profiler`: `torch.profiler.profile` with its schedules (including its
# warm-up, which no public state shows), Lightning's profilers, the autograd profiler and ``emit_nvtx``.

_BEGIN: Final = {
    "profile": ("_prepare_trace", "_start_trace"),
    "emit_nvtx": ("__enter__",),
    "emit_itt": ("__enter__",),
}

_DAEMON_VARIABLE: Final = "KINETO_USE_DAEMON"


class ProfilerWatch:
    """Tracks the profilers of the process.

    Attributes:
        ours: our own profiler (an autograd ``profile``) while there is one.
        before_theirs: called before one of theirs begins, on its thread. It returns when ours has ended.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self.ours: object = None
        self.before_theirs: Callable[[], None] | None = None
        self._on_error = on_error
        self._theirs: WeakMap[None] = WeakMap()
        self._enabled: Callable[[], bool] = lambda: False

    def patch(self, module: ModuleType, enabled: Callable[[], bool], patches: Patches) -> None:
        """Patch ``torch.autograd.profiler``. ``enabled`` returns whether a profiler records on the calling thread."""
        self._enabled = enabled
        for name, beginnings in _BEGIN.items():
            owner = vars(module).get(name)
            if owner is None:
                continue
            for beginning in beginnings:
                patches.around(owner, beginning, before=self._begin, after=self._begun, on_error=self._on_error)
            patches.around(owner, "__exit__", after=self._ended, on_error=self._on_error)

    def theirs(self) -> str | None:
        """Why our profiler must not begin on the calling thread; None if it may."""
        if os.environ.get(_DAEMON_VARIABLE):
            return f"{_DAEMON_VARIABLE} is set, so profiling is left to the daemon: unset it for snapshots"
        if len(self._theirs) or self._enabled():
            return "a profiler of the script's own is at work"
        return None

    def _begin(self, profiler: Any, *_: Any, **__: Any) -> None:
        if profiler is not self.ours:
            self._theirs[profiler] = None  # first: from here on ours does not begin
            if self.before_theirs is not None:
                self.before_theirs()

    def _begun(self, _noted: None, result: object, profiler: Any, *_: Any, **__: Any) -> None:
        if result is FAILED:
            self._theirs.discard(profiler)

    def _ended(self, _noted: None, _result: object, profiler: Any, *_: Any, **__: Any) -> None:
        self._theirs.discard(profiler)


# -- named ranges in the traces of profilers: ``record_function`` and NVTX ---------------------------------------------
# While a snapshot records, phases and waits for watched iterables are ranges of its trace. Torch itself marks the waits
# for a DataLoader. With the setting ``nvtx``, steps, waits, phases and the workers' fetches are always NVTX ranges, for
# Nsight Systems (`seams.worker` marks the fetches). Then no step takes the fast path of the hooks.


class ProfilerRanges:
    """The ranges of the training thread.

    Attributes:
        makers: each begins a range and returns the function that ends it. Empty while no profiler records.
        nvtx: whether steps are always NVTX ranges.
    """

    def __init__(self) -> None:
        self.makers: tuple[Maker, ...] = ()
        self.nvtx = False
        self._step: Sequence[End] = ()

    def use_nvtx(self, nvtx: Any) -> None:
        """Make NVTX ranges from now on, with ``torch.cuda.nvtx``. It raises RuntimeError if this torch has no NVTX."""
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
        """Mark that ``ended`` steps have ended. With ``opens`` the next step begins."""
        self.end(self._step)
        self._step = self.begin(f"step {ended + 1}") if opens else ()
