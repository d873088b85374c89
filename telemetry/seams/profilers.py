"""Torch's profilers: whether one of the user's records, a recording of ours, and named ranges in traces."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from telemetry.seams.patching import FAILED, WeakMap
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

    from telemetry.seams.patching import Patches
    from telemetry.snapshot.plan import Plan
    from telemetry.util.identity import Identity

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


# -- a recording of ours -----------------------------------------------------------------------------------------------
# No other file imports `torch.profiler`. What was measured about it (torch 2.4 to 2.13, and pytorch#64795):
#
# * Stopping a session on another thread than the one that started it crashes the process. So does an exit while a
#   session is on.
# * So do a start without a preparation, and two sessions that stop after each other. Before torch 2.13, after a
#   preparation without a start every later profiler of the process fails. So a session that is not wanted any more ends
#   with an empty recording.
# * If the first session of a process is not on the main thread, Kineto says so on stderr, whatever its log level.
# * `torch.profiler.profile` starts an execution trace if an environment variable asks for one, and `_KinetoProfile`
#   imports all of Inductor, which takes 1.2 s. `torch.autograd.profiler.profile` does neither.
# * Kineto writes two lines to stderr for each session. Its level is a variable in the library, see `_quiet`.

_PLAIN: Final = dict.fromkeys(range(32), " ") | {ord('"'): "'", ord("\\"): "/"}
"""Torch writes the names of ranges into its JSON unescaped (2.13): a quotation mark made the file unreadable."""


class Session:
    """One recording of the profiler. It is prepared, started and stopped once each, on one thread.

    Args:
        plan: the steps to record, and the reason.
        identity: identity of this rank, which is written into the trace.

    Attributes:
        profile: torch's profiler; None once its memory is freed.
    """

    def __init__(self, plan: Plan, identity: Identity) -> None:
        import torch
        from torch.profiler.profiler import _KinetoProfile

        self._torch: Any = torch._C._autograd
        device = "cuda" if torch.cuda.is_initialized() else "xpu" if torch.xpu.is_initialized() else None
        self.profile: Any = torch.autograd.profiler.profile(use_device=device, use_kineto=True)
        # Older versions of torch make a Python object of each event when a recording stops. Nothing reads these
        # objects, and with them a stop took 8 times as long (torch 2.4).
        self.profile._parse_kineto_results = lambda *_, **__: []
        # Without a process group torch does not name the rank.
        ranks = _KinetoProfile(activities=[torch.profiler.ProfilerActivity.CPU])._get_distributed_info()
        ranks = ranks or {"backend": "none", "rank": identity.rank, "world_size": identity.world_size}
        about = {"run": identity.run, "rank": identity.rank, "world_size": identity.world_size}
        about |= {"first_step": plan.first_step, "request": msgspec.to_builtins(plan.request)}
        self._metadata = {"distributedInfo": ranks, "telemetry": about}

    def prepare(self) -> None:
        """Do the slow part of a start. It is slowest on a GPU, where tracing has to warm up."""
        self.profile._prepare_trace()

    def start(self) -> None:
        """Start the recording. The session must be prepared."""
        with _quiet():
            self.profile._start_trace()
        _keep_cupti_for_graphs()
        for name, value in self._metadata.items():
            self._torch._add_metadata_json(name, json.dumps(value, default=str))

    def stop(self) -> None:
        """Stop the recording. Must be called on the thread that started it, like `drop` and `cancel`."""
        with _quiet():
            self.profile.__exit__(None, None, None)

    def drop(self) -> None:
        """End the recording without expanding it, which would take time and memory. Kineto's session stays on."""
        self._torch._disable_profiler_legacy(self._torch._ProfilerDisableOptions(True, False))

    def cancel(self) -> None:
        """End a session that is prepared, or whose recording was dropped, with an empty recording."""
        with _quiet():
            self.profile._start_trace()
            self.profile.__exit__(None, None, None)

    def abort(self) -> None:
        """End what an exception has left of the session. Raises nothing."""
        try:
            if self._torch._profiler_enabled():
                self.drop()
            else:
                self._prepare_again()
            self.cancel()
        except Exception:
            pass  # nothing more can be done, and the snapshot has failed already

    def _prepare_again(self) -> None:
        try:
            self.profile._prepare_trace()
        except RuntimeError as error:
            if "when it's not running" not in str(error):  # before torch 2.13 it is the sign of one that is prepared
                raise

    def begin_range(self, name: str) -> Callable[[], None]:
        """Begin a named range of the trace. Returns the function that ends it."""
        range_ = sys.modules["torch.autograd.profiler"].record_function(name.translate(_PLAIN))
        range_.__enter__()
        return lambda: range_.__exit__(None, None, None)

    def save(self, path: Path) -> float:
        """Write a recording that has ended as a Chrome trace. Returns the seconds for which this held the GIL."""
        start = now_ns()
        with _quiet():
            self.profile.kineto_results.save(str(path))
        return (now_ns() - start) / NS

    def free(self) -> float:
        """Free the memory of a recording that has ended. Returns the seconds for which this held the GIL."""
        start = now_ns()
        self.profile = None
        return (now_ns() - start) / NS


_KINETO_LEVEL: Final = "_ZN9libkineto6Logger14severityLevel_E"
_LEVELS: Final = range(10)
_SILENT: Final = 99


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Kineto from writing to stderr.

    It reads ``KINETO_LOG_LEVEL`` only once in a process, and the script's own profilers, and child processes, would see
    it too. So its level, a variable that the library exports, is changed for a moment. In a torch without that variable
    the lines are written. A session must have been prepared, which sets the level.
    """
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(sys.modules["torch._C"].__file__), _KINETO_LEVEL)
    except (OSError, ValueError):
        yield
        return
    before = level.value
    if before in _LEVELS:  # else it is silent already, or another version of Kineto has something else there
        level.value = _SILENT
    try:
        yield
    finally:
        level.value = before


def _keep_cupti_for_graphs() -> None:
    """Set what `torch.profiler` sets if torch.compile makes CUDA graphs: CUPTI's end crashes them before CUDA 12.6."""
    compiled: Any = sys.modules.get("torch._inductor.config")
    graphs, cuda = getattr(getattr(compiled, "triton", None), "cudagraphs", False), sys.modules["torch"].version.cuda
    if graphs and cuda is not None and tuple(map(int, cuda.split(".")[:2])) < (12, 6):
        os.environ.update(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")


def collection_switch() -> Any:
    """The function that switches the collection of operators on the calling thread on and off."""
    return sys.modules["torch._C"]._autograd._enable_record_function


def on_gpu() -> bool:
    """Whether this process uses a GPU whose work torch's profiler records."""
    modules = (sys.modules.get(name) for name in ("torch.cuda", "torch.xpu"))
    asked = [getattr(module, "is_initialized", None) for module in modules]  # absent while torch is imported
    return any(initialized is not None and initialized() for initialized in asked)


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
