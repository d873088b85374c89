"""Keeps a recording small: one step is recorded first, and more of them only if they fit.

torch's profiler keeps each operator until it stops, and then expands all of them on the training thread. It has no
limit: a million operators take gigabytes and many seconds. Nothing shows their number, but they take memory. So:

* At each step boundary, the growth of the allocated memory is taken for recorded operators. If the next step would not
  fit, the recording ends. If this one did not fit, it is dropped without being expanded.
* Inside a step, a thread looks at the peak of the process's memory. If it grows too much, a pending call ends the
  collection. That is a function that Python calls on the main thread, between two bytecodes, as it calls the handlers
  of signals. It cannot come while C++ runs, as in a backward pass. But a backward pass is a few times as long as its
  forward pass, and an operator that is not expanded takes 0.2 kB.

The training thread must be the main thread: `Capture` records no other.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry.safety.files import read_small
from telemetry.safety.threads import Wake
from telemetry.seams.profilers import collection_switch
from telemetry.sources.cgroup import MemoryLimits
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from telemetry.config import Config

# Measured with torch 2.13: an operator takes 210 bytes while it is recorded, and 1,850 once it is expanded. To stop,
# save and free it takes 5 to 20 us of the training's time. `benchmarks.snapshot_budget` shows what comes of it: at most
# 140 MiB and 0.5 s, for steps of 300 to 1,000,000 operators.

_EXPANDS: Final = 10
"""How many times as large a recording gets when it is expanded."""

_BYTES_PER_SECOND: Final = 10_000_000
"""A recording of this size takes at most a second to stop, save and free."""

_MOST_BYTES_PER_SECOND: Final = 300_000_000
"""A recording grows at most so fast: 300 bytes in a microsecond, in which no operator ends."""

_NOISE_BYTES: Final = 8 << 20
"""A training may take this much memory between two steps without being taken for a recording."""

_SHARE: Final = 4
"""All ranks of a node together take at most one part in four of the free memory."""

_MIN_ALLOCATED_BYTES: Final = 32 << 20
"""A process with torch has allocated more than this."""

_MALLOC_FIELDS: Final = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip

_LOOK_SECONDS: Final = 0.02


class Budget:
    """Keeps one recording within its limits: on the training thread at step boundaries, on another one inside steps.

    Args:
        config: has the most memory and the longest pause.
        ranks: the ranks of this node, which may record at the same time and share the free memory.

    Attributes:
        recorded_bytes: the most bytes of a recording that may be expanded.
        limit: the setting or limit that a larger one would exceed, in words.
    """

    def __init__(self, config: Config, ranks: int) -> None:
        self._memory_bytes, pause, free = config.snapshot_memory_bytes, config.snapshot_pause_seconds, free_memory()
        self.limit = f"{self._memory_bytes >> 20} MiB (snapshot_memory_bytes)"
        if free is not None and free // (_SHARE * ranks) < self._memory_bytes:
            self._memory_bytes = max(0, free // (_SHARE * ranks))
            self.limit = f"{self._memory_bytes >> 20} MiB of memory, this rank's share of what is free"
        by_memory, by_time = self._memory_bytes // _EXPANDS, int(pause * _BYTES_PER_SECOND)
        self.recorded_bytes = min(by_memory, by_time)
        if by_time < by_memory:
            self.limit = f"{pause:g} s (snapshot_pause_seconds)"
        self._begun, self._over = Wake(), Wake()
        self._recording = self._cut = False
        # When the recording began: monotonic ns, bytes that were allocated, the most that were ever resident.
        self._began_ns = self._allocated = self._peak = 0

    # -- the training thread -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that the recording has begun."""
        self._began_ns, self._allocated, self._peak = now_ns(), _allocated_bytes(), _peak_bytes()
        _COLLECTING.append(False)
        self._recording = True
        self._begun.set()

    def too_large(self, steps: int) -> str | None:
        """Why the steps recorded so far must be dropped, in words; None if they may be expanded."""
        if self._cut:
            grown = self._memory_bytes // 2
            return f"dropped inside a step, which took {grown >> 20} MiB more memory than ever: {self._too_large()}"
        recorded = self._recorded_bytes()
        if recorded - _NOISE_BYTES <= self.recorded_bytes:
            return None
        took = f"{steps} step{'s' * (steps != 1)} took {recorded >> 20} MiB of memory, maybe for operators"
        return f"dropped: {took}, and {self._too_large()}"

    def full(self, steps: int) -> str | None:
        """Why no further step fits after so many (1 or more), in words; None if one fits."""
        more = self._recorded_bytes() * (steps + 1) // steps
        if not self._cut and more - _NOISE_BYTES <= self.recorded_bytes:
            return None
        return f"cut short: {self._too_large()}"

    def end(self) -> None:
        """Stop the watch. The training thread again collects for any profiler of the script."""
        self._recording = False
        _COLLECTING.clear()  # a call that is still pending does nothing
        if self._cut:
            self._cut = False
            collection_switch()(True)
        self._over.set()
        self._begun.set()

    def _too_large(self) -> str:
        return f"a larger trace may take over {self.limit}"

    def _recorded_bytes(self) -> int:
        """The most bytes that the recording may have. A short one is small, whatever the training has allocated."""
        seconds = (now_ns() - self._began_ns) / NS
        return min(_allocated_bytes() - self._allocated, int(seconds * _MOST_BYTES_PER_SECOND))

    # -- the other thread --------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Look every few milliseconds, from the begin of the recording to its end."""
        self._begun.wait()
        while not self._over.wait(_LOOK_SECONDS):
            try:
                grown = _peak_bytes() - self._peak
            except OSError:  # no descriptor is left: nothing can be seen
                grown = self._memory_bytes
            if self._recording and grown > self._memory_bytes // 2:
                self._cut_off()

    def close(self) -> None:
        """End the watch. A recording that still goes on is cut off, because nobody looks any more."""
        if self._recording:
            self._cut_off()
        self._over.set()
        self._begun.set()

    def _cut_off(self) -> None:
        """Make the training thread collect nothing from its next bytecode on.

        This is repeated at every look: a function that Python calls in a backward pass gets its own copy of the switch.
        """
        self._cut = True
        _add_pending_call(ctypes.cast(_callback(), ctypes.c_void_p).value, _COLLECTING)


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
    return ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(functools.partial(max, key=collection_switch(), default=0))


def free_memory() -> int | None:
    """Bytes of memory that are available on the machine and in the control groups of this process; None if unknown."""
    found = MemoryLimits(Path("/proc"), Path("/sys/fs/cgroup")).tightest()
    return None if found is None else found.available


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
    if allocated > _MIN_ALLOCATED_BYTES:
        return allocated
    return int(read_small("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGESIZE")


def _peak_bytes() -> int:
    """The most resident memory of this process so far; where the kernel does not tell, what it has now."""
    found = re.findall(rb"Vm(?:HWM|RSS):\s+(\d+) kB", read_small("/proc/self/status"))
    return max((int(kilobytes) << 10 for kilobytes in found), default=0)
