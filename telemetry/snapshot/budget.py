"""The budget of a recording, and the means that end it in the middle of a step.

torch's profiler keeps each operator until it stops, and then expands all of them on the training thread. It has no
limit. With a million operators that takes gigabytes and many seconds. So:

* The operators of one step are counted first, by torch's old profiler. It numbers them and keeps 0.6 kB of each. It is
  dropped without being expanded. If one step has too many, nothing is recorded.
* A step that is recorded may have more operators than the one that was counted. Nothing shows their number, but they
  take memory and time. Inside a step, a thread looks at the memory. At a step boundary, a recording after which both
  have grown by too much is dropped without being expanded, too.
* Both are cut off inside a step by a pending call. That is a function that Python calls on the main thread, between two
  bytecodes, as it calls the handlers of signals. It cannot come while C++ runs, as in a backward pass. But a backward
  pass is a few times as long as its forward pass, and what is not expanded takes 0.3 kB an operator.

All this is possible because the training thread is the main thread: `Capture` records no other.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry.sources.cgroup import MemoryLimits
from telemetry.util.clock import NS, process_time_ns, thread_time
from telemetry.util.files import read_small
from telemetry.util.threads import Wake

if TYPE_CHECKING:
    from telemetry.config import Config

_OPERATOR_BYTES: Final = 2048
"""Memory of an operator that is recorded, expanded and saved. Measured (`benchmarks.snapshot_budget`): 1.8 kB."""

_OPERATOR_SECONDS: Final = 15e-6
"""Time of an operator from the training until it is saved. Measured: 10 to 16 µs."""

_RECORDED_BYTES: Final = 200
"""Least memory of an operator that is recorded and not expanded. Measured: 210 to 290."""

_TIMES_ON_GPU: Final = 2.0
"""Factor for a GPU: traces of two trainings had as many launches and kernels together as operators."""

_SHARE: Final = 4
"""All ranks of a node together take at most one part in four of the free memory."""

_NOISE_BYTES: Final = 8 << 20
"""A training may take this much memory between two steps without being taken for a recording."""

_MIN_OPERATOR_SECONDS: Final = 1e-6
"""Least time of the processor that an operator takes while it is recorded."""

_MIN_ALLOCATED_BYTES: Final = 32 << 20
"""A process with torch has allocated more than this."""

_MALLOC_FIELDS: Final = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip

_LOOK_SECONDS: Final = 0.02
_LONG_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of one recording.

    Attributes:
        memory_bytes: the most memory.
        operators: the most operators.
        trace_bytes: the most memory for so many operators. Their trace is several times smaller: in the file, an
            operator has 250 bytes, and a kernel with its launch 1,100.
        limit: the setting or limit that more operators would exceed, in words.
        recorded_bytes: memory of one operator as long as it is not expanded.
    """

    memory_bytes: int
    operators: int
    trace_bytes: int
    limit: str
    recorded_bytes: float

    @classmethod
    def now(cls, config: Config, ranks: int) -> Budget:
        """The budget by the settings and the present free memory, for so many ranks of this node at once."""
        memory_bytes, pause_seconds = config.snapshot_memory_bytes, config.snapshot_pause_seconds
        times = _TIMES_ON_GPU if on_gpu() else 1.0
        limit = "(snapshot_memory_bytes)"
        free = free_memory()
        if free is not None and free // (_SHARE * ranks) < memory_bytes:
            memory_bytes, limit = max(0, free // (_SHARE * ranks)), "of memory, this rank's share of what is free"
        by_memory, by_time = memory_bytes / (times * _OPERATOR_BYTES), pause_seconds / (times * _OPERATOR_SECONDS)
        limit = f"{memory_bytes >> 20} MiB {limit}"
        if by_time < by_memory:
            limit = f"{pause_seconds:g} s (snapshot_pause_seconds)"
        operators = min(by_memory, by_time)
        trace_bytes = int(operators * times * _OPERATOR_BYTES)
        return cls(memory_bytes, int(operators), trace_bytes, limit, _RECORDED_BYTES * times)

    @property
    def too_many(self) -> str:
        """Why no more operators are recorded, in words."""
        return f"a trace of more than {self.operators} operators may take over {self.limit}"


class BudgetWatch:
    """Keeps one recording within its budget: on the training thread at step boundaries, on another one inside steps."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._torch: Any = None
        self._begun, self._over = Wake(), Wake()
        self._counting = self._recording = self._cut = False
        self._first = self._looks = 0  # number of the first operator that was counted, and how many are of our own
        # When the recording began: bytes that were allocated, the most that were resident, seconds of the processor.
        self._allocated = self._peak = 0
        self._busy = 0.0

    # -- the training thread -----------------------------------------------------------------------------------

    def count(self) -> None:
        """Begin to count the operators of a step."""
        self._torch = sys.modules["torch._C"]
        self._looks, self._first = 0, _operator_number(self._torch)
        self._torch._autograd._enable_profiler_legacy(_legacy(self._torch))
        self._counting = True
        _COLLECTING.append(False)
        self._begun.set()

    def end_count(self) -> tuple[int, bool]:
        """Stop the count. Returns the number of operators, and whether there may have been more."""
        cut = self._cut
        self._end_count()
        self._end_cut()
        return max(0, _operator_number(self._torch) - self._first - 1 - self._looks), cut

    def record(self) -> None:
        """Note that the recording has begun."""
        self._allocated, self._peak, self._busy = _allocated_bytes(), _peak_bytes(), _busy_seconds()
        _COLLECTING.append(False)
        self._recording = True

    def exceeded(self) -> str | None:
        """Why the recording must be dropped, at a step boundary; None if it may be expanded."""
        if self._cut:
            took = f"the process took {self.budget.memory_bytes >> 21} MiB more memory than ever before"
            return f"dropped inside a step: {took}, and {self.budget.too_many}"
        try:
            grown = _allocated_bytes() - self._allocated
        except OSError as error:
            return f"dropped: its memory could not be read: {error}"
        busy = _busy_seconds() - self._busy > self.budget.operators * _MIN_OPERATOR_SECONDS
        if busy and grown > self.budget.operators * self.budget.recorded_bytes + _NOISE_BYTES:
            took = f"the process took {grown >> 20} MiB more memory in these steps"
            return f"dropped: {took}, maybe for operators, and {self.budget.too_many}"
        return None

    def end(self) -> None:
        """Stop the count and the watch. The training thread again collects for any profiler of the script."""
        self._recording = False
        self._end_count()
        self._end_cut()
        self._over.set()
        self._begun.set()

    def after_fork_in_child(self) -> None:
        """Clean up in the child, which has a copy of the count, and maybe a thread that was cut off. Takes no lock."""
        self._recording = False
        try:
            self._end_count()
        except RuntimeError:
            pass  # the fork is on another thread, which counts nothing
        self._end_cut()

    def _end_count(self) -> None:
        if self._counting:
            self._counting = False
            drop_unexpanded()

    def _end_cut(self) -> None:
        _COLLECTING.clear()  # a call that is still pending does nothing
        if self._cut:
            self._cut = False
            self._torch._autograd._enable_record_function(True)

    # -- the other thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Look every few milliseconds, from the count to the end of the recording."""
        while not self._begun.wait(_LONG_SECONDS):
            pass
        while not self._over.wait(_LOOK_SECONDS):
            try:
                self._look()
            except OSError:  # no descriptor is left: nothing can be seen
                self._cut_off()

    def close(self) -> None:
        """End the watch. A recording that still goes on is cut off."""
        if self._counting or self._recording:
            self._cut_off()
        self._over.set()
        self._begun.set()

    def _look(self) -> None:
        if self._counting:
            self._looks += 1
            if _operator_number(self._torch) - self._first > self.budget.operators:
                self._cut_off()
        elif self._recording and _anonymous_bytes() - self._peak > self.budget.memory_bytes // 2:
            self._cut_off()

    def _cut_off(self) -> None:
        """Make the training thread collect nothing from its next bytecode on.

        This is repeated at every look: a function that Python calls in a backward pass gets its own copy of the switch.
        """
        self._cut = True
        _add_pending_call(_collect_nothing(), _COLLECTING)


_COLLECTING: Final[list[bool]] = []
"""The value that a pending call sets the switch to; empty if the call is too late. The training thread writes it."""

_add_pending_call: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.py_object)(
    ("Py_AddPendingCall", ctypes.pythonapi)
)


@functools.cache
def _callback() -> Any:
    """The pending call: torch's switch, called with each value in a list, and 0 as the result.

    ``max`` calls it, so that no Python frame runs: torch would compile it, or a Ctrl-C would be lost in it. It is kept
    for ever, because a call may be pending at any time.
    """
    switch = sys.modules["torch._C"]._autograd._enable_record_function
    return ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(functools.partial(max, key=switch, default=0))


def _collect_nothing() -> int | None:
    return ctypes.cast(_callback(), ctypes.c_void_p).value


def drop_unexpanded() -> None:
    """End the profiler of this thread, the old or the new one, and drop its data."""
    autograd = sys.modules["torch._C"]._autograd
    autograd._disable_profiler_legacy(autograd._ProfilerDisableOptions(True, False))


def _operator_number(torch: Any) -> int:
    """The number of a new operator. The old profiler numbers the operators of all threads of a process in turn."""
    autograd = torch._autograd
    autograd._enable_profiler_legacy(_legacy(torch))
    try:
        autograd._record_function_with_args_exit(autograd._record_function_with_args_enter("telemetry"))
    finally:
        threads = autograd._disable_profiler_legacy()
    return max(int(event.handle()) for events in threads for event in events)


def _legacy(torch: Any) -> Any:
    profiler = torch._profiler
    return profiler.ProfilerConfig(
        profiler.ProfilerState.CPU, *[False] * 5, profiler._ExperimentalConfig()
    )  # without shapes, memory, stacks, floating-point operations and modules


def free_memory() -> int | None:
    """Bytes of memory that are available on the machine and in the control groups of this process; None if unknown."""
    found = MemoryLimits(Path("/proc"), Path("/sys/fs/cgroup")).tightest()
    return None if found is None else found.available


def on_gpu() -> bool:
    """Whether this process uses a GPU whose work torch's profiler records."""
    modules = (sys.modules.get(name) for name in ("torch.cuda", "torch.xpu"))
    asked = [getattr(module, "is_initialized", None) for module in modules]  # absent while torch is imported
    return any(initialized is not None and initialized() for initialized in asked)


def _busy_seconds() -> float:
    """CPU seconds of this thread. With a GPU, backward passes run on other threads: then all threads count."""
    return process_time_ns() / NS if on_gpu() else thread_time()


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLOC_FIELDS)


_malloc_info: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _malloc_info is not None:
    _malloc_info.restype = _MallocInfo


def _allocated_bytes() -> int:
    """Bytes that are allocated and not freed; resident bytes if another malloc is in use. It takes 20 to 60 µs.

    Between two steps of a training on the CPU, resident memory changes by many MiB, and this hardly.
    """
    found = _malloc_info() if _malloc_info is not None else None
    allocated = 0 if found is None else int(found.uordblks + found.hblkhd)
    return allocated if allocated > _MIN_ALLOCATED_BYTES else _anonymous_bytes()


def _anonymous_bytes() -> int:
    """Resident memory of this process, without files and shared memory, such as that of DataLoader workers."""
    fields = read_small("/proc/self/statm").split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE")


def _peak_bytes() -> int:
    """The maximum of `_anonymous_bytes` so far, if the shared memory was as large as now."""
    shared = int(read_small("/proc/self/statm").split()[2]) * os.sysconf("SC_PAGESIZE")
    found = re.search(rb"VmHWM:\s+(\d+) kB", read_small("/proc/self/status"))
    return max(_anonymous_bytes(), (int(found[1]) << 10) - shared if found else 0)
