"""From a profile to lines: which line of the user's code a fetch, or a step, spends its time in.

A line is named together with the library function that it called, if the time was spent in one. The innermost line of
the user's code counts, so a helper is named and not its caller. If a library makes the batch without the user's code,
the library's line is named: the outermost one outside of the DataLoader.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.fetch_stacks import LOADER_CODE, is_fetcher
from telemetry.core.stack_profile import StackTime
from telemetry.core.stacks import is_library

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.core.stack_profile import StackProfile
    from telemetry.core.stacks import Spot, Stack

FETCH: Final = "fetch"
SAMPLER: Final = "sampler"
WAIT: Final = "wait"
STEP: Final = "step"
CHECKPOINT: Final = "checkpoint"

MAX_LINES: Final = 10
MIN_SAMPLES: Final = 40
"""Lines are named from this many samples on. Then a share of one half is off by up to 16 points, in 95 of 100 cases."""

_MIN_SAMPLES_OF_WORK: Final = 10
"""Fewest samples inside the sampler, of a wait. From so few, the predicted speed-up is a range."""

_NEVER_SEEN: Final = 1.5**2
"""If all of n samples are of one line, its share is at least 1 - 3 / n in 95 of 100 cases: twice this error."""

_NOTHING: Final = StackTime(0, 0)
_MIN_SHARE: Final = 0.01
_LOADER_FILE: Final = f"{LOADER_CODE}dataloader.py"
_OURS: Final = f"{os.sep}telemetry{os.sep}attach{os.sep}"
_PASSED_ON: Final = frozenset({"forward", "wrapper", "wrapped", "inner", "decorate_context", "decorated"})
"""Functions that only call another one. ``_call_impl`` and ``__call__`` begin with an underscore."""

WORK: Final[dict[str, tuple[str, ...]]] = {
    "loader_on_training_thread": (WAIT, FETCH),
    "workers_cpu_bound": (FETCH,),
    "workers_io_bound": (FETCH,),
    "workers_throttled": (FETCH,),
    "uneven_batches": (FETCH,),
    "source_slow": (WAIT, FETCH),
    "checkpoint": (CHECKPOINT,),
    "gc_pause": (STEP, WAIT),
    "host_bound": (STEP,),
    "unknown": (FETCH,),
}
"""What is sampled during a stall of each cause. Other causes have no line: their time is not spent in code."""

SLOW_RANK: Final[tuple[str, ...]] = (STEP,)
"""What is sampled on a rank that the others wait for."""


@dataclass(frozen=True, slots=True)
class LineShare:
    """A line of the user's code.

    Attributes:
        file, line, function: where it is.
        calls: the library function that the line called, such as ``Image.resize``; None if the time was spent in the
            line itself, or in a function that is not written in Python.
        share: its share of the wall clock of the fetch or the step, 0 to 1.
        cpu_share: its share of the CPU time, 0 to 1.
        error: standard error of ``share``, from the number of samples of the work, which is estimated by its time.
        gil_ratio: share of its own time in which it held the GIL, 0 to 1; 0 where that is not known.
        rest_gil_ratio: that of the rest of the work.
    """

    file: str
    line: int
    function: str
    calls: str | None
    share: float
    cpu_share: float
    error: float = 0.0
    gil_ratio: float = 0.0
    rest_gil_ratio: float = 0.0

    @property
    def place(self) -> str:
        """``train.py:42``."""
        return f"{self.file.rpartition(os.sep)[2]}:{self.line}"

    @property
    def named(self) -> str:
        """``Image.resize at train.py:42``, or ``load at train.py:42`` if it called no function of a library."""
        return f"{self.function if self.calls is None else self.calls} at {self.place}"

    def as_field(self) -> dict[str, Any]:
        """The line as it is in the log and in the report."""
        return {
            "file": self.file,
            "line": self.line,
            "function": self.function,
            "calls": self.calls,
            "share_ratio": round(self.share, 4),
        }


def line_shares(profile: StackProfile, work: str) -> tuple[LineShare, ...]:
    """The lines with the largest shares, largest first; empty if there are too few samples.

    Args:
        profile: the samples.
        work: what was sampled. Of the sampler's time only stacks inside the sampler count.
    """
    total = StackTime(0, 0) if work == SAMPLER else StackTime(profile.other_ns, profile.other_cpu_ns)
    times: dict[tuple[str, int, str | None], StackTime] = {}
    functions: dict[tuple[str, int], str] = {}
    for stack, time in profile.times.items():
        inside = _inside(stack, work)
        if not inside:
            continue
        total = total.plus(time)
        blamed = _blamed(inside, stack)
        if blamed is not None:
            spot, calls = blamed
            named = spot.file, spot.line, calls
            if not spot.function.startswith("<"):  # a comprehension on the same line is part of its function
                functions[spot.file, spot.line] = spot.function
            else:
                functions.setdefault((spot.file, spot.line), spot.function)
            times[named] = time.plus(times.get(named, _NOTHING))
    wall, cpu, gil = total
    samples = profile.samples * wall / max(1, profile.wall_ns)  # of a wait, few samples are in the sampler
    if profile.samples < MIN_SAMPLES or samples < _MIN_SAMPLES_OF_WORK:
        return ()
    longest = sorted(times.items(), key=lambda item: -item[1][0])[:MAX_LINES]
    found = []
    for (file, line, calls), (wall_ns, cpu_ns, gil_ns) in longest:
        share = wall_ns / wall
        if share >= _MIN_SHARE:
            error = math.sqrt(max(share * (1 - share), _NEVER_SEEN / samples) / samples)
            held = gil_ns / max(wall_ns, 1), (gil - gil_ns) / max(wall - wall_ns, 1)
            found.append(LineShare(file, line, functions[file, line], calls, share, cpu_ns / max(cpu, 1), error, *held))
    return tuple(found)


def _inside(stack: Stack, work: str) -> Stack:
    """The frames of the work for a batch, in a fetch or a sampler; without either, the whole stack."""
    end = _first(stack, _is_sampling if work == SAMPLER else _begins_a_batch)
    if end is None:
        return () if work == SAMPLER else stack
    return stack[: end + 1]


def _blamed(inside: Stack, stack: Stack) -> tuple[Spot, str | None] | None:
    """The line and the library function that a stack counts for; None if there is no such line."""
    at = _first(inside, _is_users)
    if at is None and inside is not stack:
        at = _outermost_of_a_library(inside)
    if at is None:
        inside, at = stack, _first(stack, _is_users)
    if at is None:
        return None
    return inside[at], _called(inside[:at])


def _first(stack: Stack, true_of: Callable[[Spot], bool]) -> int | None:
    return next((number for number, spot in enumerate(stack) if true_of(spot)), None)


def _is_users(spot: Spot) -> bool:
    return not is_library(spot.file)


def _begins_a_batch(spot: Spot) -> bool:
    """Whether everything inside this frame is work for a batch."""
    return is_fetcher(spot) or _is_sampling(spot) or (_OURS in spot.file and spot.function == "_pull")


def _is_sampling(spot: Spot) -> bool:
    return spot.function in {"_next_index", "_reset"} and spot.file.endswith(_LOADER_FILE)


def _outermost_of_a_library(inside: Stack) -> int | None:
    """The library's line that makes the batch: outside of the DataLoader's code if there is one, else the fetcher's."""
    for number in range(len(inside) - 1, -1, -1):
        file = inside[number].file
        if LOADER_CODE not in file and _OURS not in file:
            return number
    return _first(inside, is_fetcher)


def _called(callees: Stack) -> str | None:
    """The function that a line called, as ``Image.resize``. Functions that only pass a call on are left out."""
    outermost_first = [spot for spot in reversed(callees) if _OURS not in spot.file]
    for spot in outermost_first:
        if not spot.function.startswith(("_", "<")) and spot.function not in _PASSED_ON:
            return _name(spot)
    return _name(outermost_first[-1]) if outermost_first else None


def _name(spot: Spot) -> str:
    module = spot.module.rpartition(".")[2].strip("_")
    return f"{module}.{spot.function}" if module and module != "main" else spot.function
