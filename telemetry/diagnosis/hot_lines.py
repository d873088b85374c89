"""Finds the lines of the user's code that a profile blames, and predicts the gain of faster lines."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.diagnosis.costs import own_time
from telemetry.diagnosis.habits import habit_in
from telemetry.diagnosis.model import WORTH_IT, Fetch, alone_in_worker, gain_of, gain_over_window, predicted_step
from telemetry.model.records import BACKWARD, OTHER, Advice, HotLine, factor_text
from telemetry.util.profiles import CHECKPOINT, FETCH, SAMPLER, STEP, WAIT, StackProfile, StackTime
from telemetry.util.stacks import LOADER_CODE, STANDARD_LIBRARY, Spot, class_of, is_fetcher, is_library
from telemetry.util.words import milliseconds as ms
from telemetry.util.words import rounded_percent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.diagnosis.evidence import Evidence
    from telemetry.diagnosis.habits import Habit
    from telemetry.util.stacks import Stack


# -- from a profile to lines: which line of the user's code a fetch, or a step, spends its time in ---------------------
# The innermost line of the user's code counts, so a helper is named and not its caller. It is named together with the
# library function that it called, if nearly all of its time was spent in one. If a library makes the batch without the
# user's code, the library's line is named: the outermost one outside of the DataLoader.

MAX_LINES: Final = 10
MIN_SAMPLES: Final = 40
"""Least samples to name lines. With so many, a share of one half is off by up to 16 points, in 95 of 100 cases."""

_SURE_SAMPLES: Final = 20
"""So many are enough if one line has most of the time for sure. A call of half a second gives few samples."""

_FEW_SAMPLES: Final = 5
_GREATER_PART: Final = 0.5
"""If it is known what kind of code costs the time, few samples tell which line that is."""

_NEARLY_ALL: Final = 0.8
"""A line is named by the function that it calls if that takes so much of its time."""

_MIN_SAMPLES_OF_WORK: Final = 10
"""Least samples of a wait that are inside the sampler. With so few, the predicted speed-up is a range."""

_NEVER_SEEN: Final = 1.5**2
"""If all of n samples are of one line, its share is at least 1 - 3 / n in 95 of 100 cases: twice this error."""

_MIN_SHARE: Final = 0.01
_LOADER_FILE: Final = f"{LOADER_CODE}dataloader.py"
_OURS: Final = f"{os.sep}telemetry{os.sep}seams{os.sep}"
_FORWARD: Final = "forward"
_PASSED_ON: Final = frozenset({_FORWARD, "wrapper", "wrapped", "inner", "decorate_context", "decorated"})
"""Functions that only call another one. ``_call_impl`` and ``__call__`` begin with an underscore."""


@dataclass(frozen=True, slots=True)
class LineShare:
    """A line of the user's code.

    Attributes:
        file, line, function: place of the line.
        calls: the library function that the line called, such as ``Image.resize``; None if the time was spent in the
            line itself, or in a function that is not written in Python.
        share: its share of the wall clock of the fetch or the step, 0 to 1.
        cpu_share: its share of the CPU time, 0 to 1.
        error: standard error of ``share``. The number of samples of the work is estimated from its time.
        gil_ratio: share of its own time in which it held the GIL, 0 to 1; 0 if that is not known.
        rest_gil_ratio: the same share for the rest of the work.
        samples: number of samples of the work.
        habit: what is known of the function that it called.
        also: places of further lines that are counted with it.
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
    samples: float = 0.0
    habit: Habit | None = None
    also: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """File and line, such as ``train.py:42``."""
        return f"{self.file.rpartition(os.sep)[2]}:{self.line}"

    @property
    def named(self) -> str:
        """Such as ``Image.resize at train.py:42``, or ``load at train.py:42`` if it called no library function."""
        return " and ".join((self.told().named, *self.also))

    def told(self) -> HotLine:
        """The line as the log and the report have it."""
        return HotLine(
            file=self.file,
            line=self.line,
            function=self.function,
            calls=self.calls,
            share_ratio=round(self.share, 4),
        )


def line_shares(
    profile: StackProfile,
    work: str,
    *,
    only: Callable[[Stack, StackTime], bool] | None = None,
    least: int = MIN_SAMPLES,
    sample_code: tuple[str, int, str] | None = None,
) -> tuple[LineShare, ...]:
    """The lines with the largest shares of ``work``, the largest first; empty if there are too few samples.

    Args:
        profile: the samples.
        work: their kind of work.
        only: says which stacks count, such as `is_host_work`. The shares are still those of all the time.
        least: least number of samples.
        sample_code: the user's code that a fetch calls for each sample, see `LoaderTraits`. Samples in the fetcher's
            own code count for it: Python gives the GIL up between two calls, so of 100 samples of a loop of short
            calls, 96 show the loop.
    """
    total = StackTime()
    times: dict[tuple[str, int, str | None], StackTime] = defaultdict(StackTime)
    counted: dict[tuple[str, int, str | None], StackTime] = defaultdict(StackTime)
    functions: dict[tuple[str, int], str] = {}
    habits: dict[str | None, Habit] = {}
    loops = _calls_of_loops(profile) if work == STEP and only is None else frozenset()
    for stack, time in profile.times.items():
        inside = _inside(stack, work)
        if work == SAMPLER and not inside:
            continue
        total = total.plus(time)
        blamed = _blamed(inside, stack, loops)
        if sample_code is not None and inside and all(spot.file == inside[-1].file for spot in inside):
            blamed = (Spot(*sample_code, ""), ()) if is_fetcher(inside[-1]) else blamed
        if blamed is not None:
            spot, callees = blamed
            if not spot.function.startswith("<"):  # a comprehension on the same line is part of its function
                functions[spot.file, spot.line] = spot.function
            else:
                functions.setdefault((spot.file, spot.line), spot.function)
            calls, habit = _called(callees), habit_in(callees)
            if habit is not None:
                calls = habit.named or calls
                habits[calls] = habit
            named = spot.file, spot.line, calls
            times[named] = time.plus(times[named])
            if only is not None and only(stack, time):
                counted[named] = time.plus(counted[named])
    wall, cpu, gil = total
    samples = profile.samples * wall / max(1, profile.wall_ns)  # few samples of a wait are in the sampler
    fewest = least if only is not None else min(least, _SURE_SAMPLES)
    if profile.samples < fewest or samples < min(least, _MIN_SAMPLES_OF_WORK):
        return ()
    if only is not None:  # a line that also calls operators, as that of a trainer does, is no work on the host
        times = {each: time for each, time in counted.items() if time.wall_ns >= _GREATER_PART * times[each].wall_ns}
    found = []
    for (file, line, calls), (wall_ns, cpu_ns, gil_ns) in times.items():
        share = wall_ns / wall
        if share >= _MIN_SHARE:
            error = _standard_error(share, samples)
            held = gil_ns / max(wall_ns, 1), (gil - gil_ns) / max(wall - wall_ns, 1)
            shares = share, cpu_ns / max(cpu, 1), error, *held
            found.append(LineShare(file, line, functions[file, line], calls, *shares, samples, habits.get(calls)))
    found = _in_order(found)
    sure = bool(found) and found[0].share - ERRORS * found[0].error >= _GREATER_PART
    return tuple(found) if sure or profile.samples >= least else ()


def _in_order(found: list[LineShare]) -> list[LineShare]:
    """By the share of the line with all that it calls. A line that calls several functions is there several times."""
    whole: dict[tuple[str, int], float] = defaultdict(float)
    for each in found:
        whole[each.file, each.line] += each.share

    def key(each: LineShare) -> tuple[float, str, float]:
        # Nobody can change a library's line. So it comes first only if it takes twice as much.
        return -whole[each.file, each.line] / (2 if is_library(each.file) else 1), each.place, -each.share

    return sorted(found, key=key)[:MAX_LINES]


def whole_line(lines: Sequence[LineShare]) -> LineShare:
    """The first line with all that it calls as one share.

    If most of it is in a function of which something is known, it is the share of that, in all lines.
    """
    first = lines[0]
    same = [line for line in lines if (line.file, line.line) == (first.file, first.line)]
    whole = sum(line.share for line in same)
    known = next((line for line in same if line.habit is not None), None)
    if known is not None and sum(e.share for e in same if e.calls == known.calls) >= _GREATER_PART * whole:
        first, same = known, [line for line in lines if line.habit is not None and line.calls == known.calls]
    elif first.share < _NEARLY_ALL * whole:
        first = replace(first, calls=None, habit=None)
    share, held = min(1.0, sum(line.share for line in same)), sum(line.gil_ratio * line.share for line in same)
    held_in_all = first.gil_ratio * first.share + first.rest_gil_ratio * (1 - first.share)
    return replace(
        first,
        share=share,
        cpu_share=min(1.0, sum(line.cpu_share for line in same)),
        error=_standard_error(share, first.samples),
        gil_ratio=held / max(share, 1e-9),
        rest_gil_ratio=max(0.0, held_in_all - held) / max(1 - share, 1e-9),
        also=tuple(dict.fromkeys(line.place for line in same if line.place != first.place)),
    )


def _standard_error(share: float, samples: float) -> float:
    return math.sqrt(max(share * (1 - share), _NEVER_SEEN / samples) / samples)


_ALL: Final = 0.9
"""A line in which so much of the time and of the backward passes is spent only calls the loop."""


def loop_lines(profile: StackProfile, part_of: Callable[[Stack], str]) -> list[HotLine]:
    """The lines of the loop itself, with what they call: the largest share first; empty if there are too few samples.

    The loop is the innermost function in which nearly all the time and the backward passes are spent, but in several of
    its lines. It may be a library's. ``part_of`` tells the part of the compute that a stack is in.
    """
    stacks = [(stack, time.wall_ns, part_of(stack)) for stack, time in profile.times.items() if stack]
    total = sum(ns for _, ns, _ in stacks)
    if profile.samples < _SURE_SAMPLES or not total:
        return []
    backward = sum(ns for _, ns, part in stacks if part == BACKWARD)
    depth, inside = 1, stacks
    while True:  # from the outermost frame inwards
        times: Counter[Spot] = Counter()
        for stack, ns, _ in inside:
            times[stack[-depth]] += ns
        spot, most = times.most_common(1)[0]
        at_spot = [each for each in inside if each[0][-depth] == spot]
        deeper = [each for each in at_spot if len(each[0]) > depth]
        functions = {each[0][-depth - 1][:1] + each[0][-depth - 1][2:] for each in deeper}
        loops = most >= _ALL * total and sum(ns for _, ns, part in deeper if part == BACKWARD) >= _ALL * backward
        if not loops or len(functions) != 1:
            return _lines_at([each for each in inside if each[0][-depth][2] == spot.function], depth, total)
        depth, inside = depth + 1, deeper


def _lines_at(stacks: Sequence[tuple[Stack, int, str]], depth: int, total: int) -> list[HotLine]:
    """The lines of the function at this depth, counted from the outermost frame."""
    times: Counter[Spot] = Counter()
    calls: dict[Spot, Counter[str | None]] = defaultdict(Counter)
    parts: dict[Spot, Counter[str]] = defaultdict(Counter)
    for stack, ns, part in stacks:
        spot, called = stack[-depth], stack[: len(stack) - depth]
        times[spot] += ns
        calls[spot][_called(called, keep=_FORWARD)] += ns
        own = part == OTHER and called and _OPERATORS.match(called[-1].module)
        parts[spot]["torch" if own else part] += ns  # such as the clipping of gradients
    return [
        HotLine(
            file=spot.file,
            line=spot.line,
            function=spot.function,
            calls=calls[spot].most_common(1)[0][0],
            share_ratio=round(ns / total, 4),
            part=parts[spot].most_common(1)[0][0],
        )
        for spot, ns in times.most_common(MAX_LINES)
        if ns >= _MIN_SHARE * total
    ]


def reading_place(profile: StackProfile) -> str:
    """The line of the user's code that reads a loader, such as ``train.py:42``, from waits for it; empty if unknown."""
    times: dict[tuple[str, int], int] = {}
    for stack, time in profile.times.items():
        inside = _inside(stack, WAIT)
        outside = stack if inside is stack else stack[len(inside) :]
        at = _first(outside, _is_users)
        if at is not None:
            place = outside[at].file.rpartition(os.sep)[2], outside[at].line
            times[place] = times.get(place, 0) + time.wall_ns
    return "{}:{}".format(*max(times, key=lambda place: times[place])) if times else ""


def top_line(profile: StackProfile) -> LineShare | None:
    """The line in which most of the time was spent, if that is the greater part of it; else None."""
    lines = line_shares(profile, STEP, least=_FEW_SAMPLES)
    line = whole_line(lines) if lines else None
    return line if line is not None and line.share >= _GREATER_PART else None


def _inside(stack: Stack, work: str) -> Stack:
    """The frames of the work for a batch, in a fetch or a sampler; the whole stack if it is in neither."""
    end = _first(stack, _is_sampling if work == SAMPLER else _begins_a_batch)
    if end is None:
        return () if work == SAMPLER else stack
    return stack[: end + 1]


_OF_A_LOOP: Final = 0.05
"""Least part of the time below the call of a framework's loop that is in backward passes, and that is not."""


def _calls_of_loops(profile: StackProfile) -> frozenset[tuple[str, int]]:
    """The user's lines that only call the loop of a framework: nearly all of each step is below them, in a library."""
    below: Counter[tuple[Spot, str, str]] = Counter()  # by line, and file and name of the function that it calls
    backward: Counter[tuple[Spot, str, str]] = Counter()
    for stack, time in profile.times.items():
        passes = any(spot.module.startswith("torch.autograd") and "backward" in spot.function for spot in stack)
        for spot, called in zip(stack[1:], stack, strict=False):
            if is_library(called.file) and not is_library(spot.file):
                below[spot, called.file, called.function] += time.wall_ns
                backward[spot, called.file, called.function] += time.wall_ns * passes
    found = [call for call, ns in below.items() if ns >= _ALL * profile.wall_ns]
    loops = [call for call in found if _OF_A_LOOP <= backward[call] / below[call] <= 1 - _OF_A_LOOP]
    return frozenset((spot.file, spot.line) for spot, _, _ in loops)


def _blamed(inside: Stack, stack: Stack, loops: frozenset[tuple[str, int]] = frozenset()) -> tuple[Spot, Stack] | None:
    """The line that a stack counts for, and what it has called; None if there is no such line.

    Below the call of a framework's loop it is the innermost line of a library other than torch.
    """
    at = _first(inside, _is_users)
    if at is not None and (inside[at].file, inside[at].line) in loops:
        of_library = _first(inside[:at], _is_of_a_package)
        at = at if of_library is None else of_library
    if at is None and inside and _begins_a_batch(inside[-1]):
        # The library's line that makes the batch: outside of the DataLoader's code if there is one, else the fetcher's.
        libraries = [
            number for number, spot in enumerate(inside) if LOADER_CODE not in spot.file and _OURS not in spot.file
        ]
        at = libraries[-1] if libraries else _first(inside, is_fetcher)
    if at is None:
        inside, at = stack, _first(stack, _is_users)
    return None if at is None else (inside[at], inside[:at])


# Between its operators a step works on the host: it logs, loops in Python, computes with NumPy. If the user's line
# called a function of a library, that shows which it is. If not, the line computes in Python or called a function in C:
# then it counts as Python if most samples of it had to wait for the GIL, which the operators of torch release.

_OPERATORS: Final = re.compile(r"torch\b")
_TORCH_ON_HOST: Final = re.compile(r"torch\.(utils\.tensorboard|_tensor_str|serialization)\b")
_TENSOR_ON_HOST: Final = frozenset({"__iter__", "__contains__", "__array__", "__format__", "__repr__"})
_WAITS: Final = re.compile(rf"{re.escape(STANDARD_LIBRARY)}(threading|queue|multiprocessing|concurrent)\b")
"""Code that waits for a thread or a process of the script's own, which may make the batches."""

_WAITS_FOR_THREAD: Final = re.compile(rf"{re.escape(STANDARD_LIBRARY)}(threading|queue|concurrent)\b")

_HOLDS_IT: Final = 0.5
_ON_CORE: Final = 0.5


def is_host_work(stack: Stack, time: StackTime) -> bool:
    """Whether the samples of a stack are of work on the host, and not of an operator."""
    at = _first(stack, _is_users)
    called = [spot for spot in stack[:at] if _OURS not in spot.file]
    if at == 0 and _OPERATORS.match(stack[0].module):  # code that torch.compile has written
        return False
    if not called:
        return time.gil_ns >= _HOLDS_IT * time.wall_ns and time.cpu_ns >= _ON_CORE * time.wall_ns
    if any(_TORCH_ON_HOST.match(spot.module) for spot in called) or (
        called[-1].module == "torch._tensor" and called[-1].function in _TENSOR_ON_HOST
    ):
        return True
    operators = any(_OPERATORS.match(spot.module) for spot in called)
    return not operators and _WAITS.match(called[-1].file) is None


def waits_for_thread(stack: Stack, _time: StackTime) -> bool:
    """Whether the samples of a stack are of a wait for another thread of the process, such as ``Queue.get``."""
    return _WAITS_FOR_THREAD.match(stack[0].file) is not None


def _first(stack: Stack, true_of: Callable[[Spot], bool]) -> int | None:
    return next((number for number, spot in enumerate(stack) if true_of(spot)), None)


def _is_users(spot: Spot) -> bool:
    return not is_library(spot.file)


def _is_of_a_package(spot: Spot) -> bool:
    inside = spot.file.startswith(STANDARD_LIBRARY) and "-packages" not in spot.file
    return not (inside or _OPERATORS.match(spot.module) or _OURS in spot.file or spot.file.startswith("<"))


def _begins_a_batch(spot: Spot) -> bool:
    """Whether everything inside this frame is work for a batch."""
    return is_fetcher(spot) or _is_sampling(spot) or (_OURS in spot.file and spot.function == "_pull")


def _is_sampling(spot: Spot) -> bool:
    return spot.function in {"_next_index", "_reset"} and spot.file.endswith(_LOADER_FILE)


def _called(callees: Stack, *, keep: str = "") -> str | None:
    """The function that a line called, such as ``Image.resize``, without functions that only pass a call on.

    ``keep``: the name of such a function that is named nevertheless.
    """
    outermost_first = [spot for spot in reversed(callees) if _OURS not in spot.file]
    if not outermost_first:
        return None
    if outermost_first[0].function == "__init__" and (made := class_of(outermost_first[0])) is not None:
        return made
    passed_on = _PASSED_ON - {keep}
    plain = (s for s in outermost_first if not s.function.startswith(("_", "<")) and s.function not in passed_on)
    spot = next(plain, outermost_first[-1])
    package, _, module = spot.module.rpartition(".")
    # A private module is none that the user has named: `numpy.percentile` is in `numpy.lib._function_base_impl`.
    owner = class_of(spot) or (package.partition(".")[0] if package and module.startswith("_") else module.strip("_"))
    return f"{owner}.{spot.function}" if owner and owner != "main" else spot.function


# -- line advice -------------------------------------------------------------------------------------------------------
# The predicted speed-up by a faster line, or by a batch without it, and the sentence of the verdict.

_MIN_ADVISED_SHARE: Final = 0.1
"""Least share of a line with advice."""

ERRORS: Final = 2
SURE: Final = 1.2
"""A prediction is a range if twice the standard error of the share changes the speed-up by this factor.

If a line has 96 % of a step, 150 samples cannot show whether the step would be 14 or 60 times as fast without it.
"""

_TURNS_SECONDS: Final = 0.005
"""Additional seconds of a fetch that takes turns with the sending of batches: Python's default switch interval."""

_HOLDS_THE_GIL: Final = 0.5
"""Code that holds the GIL for less than this part of its time leaves it to other threads."""

_PART: Final = {
    FETCH: "each fetch",
    WAIT: "each wait for a batch",
    SAMPLER: "the sampler",
    STEP: "each step",
    CHECKPOINT: "each checkpoint",
}


def verdict_part(line: LineShare, kind: str) -> str:
    """The share of the line in its work, such as ``61 % of each fetch``."""
    return f"{rounded_percent(line.share)} of {_PART[kind]}"


def line_verdict(evidence: Evidence, kind: str, line: LineShare, *, cause: str) -> str:
    """One sentence about the line that takes most time."""
    seconds = _seconds_of(evidence, kind)
    gain, low = _gain_or_range(evidence, kind, line, 1.0, cause=cause)
    text = f"{verdict_part(line, kind)} is {line.named}"
    short = {FETCH: "a fetch", WAIT: "a wait"}.get(kind)
    if seconds is not None and short is not None:
        text += f"; without it {short} takes {ms(seconds * (1 - line.share))}"
    elif gain is not None:
        text += "; without it"
    return text if gain is None else f"{text}, predicted {factor_text(gain, low)} times the steps per second"


def line_advice(evidence: Evidence, kind: str, line: LineShare, *, cause: str) -> tuple[Advice, ...]:
    """The two what-ifs for the line that takes most: twice as fast, and removed. Empty if neither is worth it."""
    expected = _gain(evidence, kind, line, 1.0, cause=cause)
    if line.share < _MIN_ADVISED_SHARE or expected is None or expected < WORTH_IT:
        return ()
    removed, removed_low = _gain_or_range(evidence, kind, line, 1.0, cause=cause)
    halved, halved_low = _gain_or_range(evidence, kind, line, 0.5, cause=cause)
    seconds = _seconds_of(evidence, kind)
    because = f"{verdict_part(line, kind)} is this line"
    if seconds is not None:
        because += f": {ms(seconds * line.share)} of {ms(seconds)}"
    if line.habit is not None:
        first = Advice(f"{line.named}: {line.habit.do}", because=because)
    else:
        outside = {STEP: "the step", CHECKPOINT: "the checkpoint"}
        once = "" if kind in outside else ": do it once, before the training, if it gives the same each time"
        first = Advice(f"take {line.named} out of {outside.get(kind, 'the loader')}{once}", because=because)
    if line.habit is None or line.habit.removes:
        first = structs.replace(first, predicted_speedup=removed, predicted_low=removed_low)
    return first, Advice(f"make {line.named} twice as fast", None, None, halved, because, halved_low)


def _seconds_of(evidence: Evidence, kind: str) -> float | None:
    if kind == FETCH:
        return evidence.fetch_seconds
    if kind == WAIT and evidence.steps:
        return evidence.wait_seconds / evidence.steps / evidence.batches_per_step
    if kind == STEP and evidence.steps:
        return evidence.step_compute_seconds
    if kind == CHECKPOINT and evidence.checkpoints:
        return evidence.checkpoint_seconds / evidence.checkpoints
    return None


def _gain_or_range(
    evidence: Evidence, kind: str, line: LineShare, part: float, *, cause: str
) -> tuple[float | None, float | None]:
    """The factor of `_gain`, and None; or the most and the least if the samples and the model are not exact enough."""
    least = _with_share(line, line.share - ERRORS * line.error)
    most = _with_share(line, line.share + ERRORS * line.error)
    gain, low, high = (
        _gain(evidence, kind, each, part, cause=cause) for each in (_with_share(line, line.share), least, most)
    )
    if gain is None or low is None or high is None:
        return gain, None
    sampled = gain <= SURE * low and high <= SURE * gain
    if kind == FETCH and part == 1.0 and line.gil_ratio < _HOLDS_THE_GIL <= line.rest_gil_ratio:
        # Sending batches may make the fetches longer once the line is gone. A thread of the worker sends each batch
        # while the next one is fetched. A line that releases the GIL leaves it to that thread. If the rest of the
        # fetch holds the GIL, the two take turns. Each batch of one worker then took 2.6 to 4.9 ms longer
        # (`c_releases_gil` and `read` of `tests.lines`).
        slowed = _gain(evidence, kind, line if sampled else least, part, cause=cause, longer=_TURNS_SECONDS)
        if slowed is not None and (not sampled or gain > SURE * slowed):
            return (gain if sampled else high), slowed
    return (gain, None) if sampled else (high, low)


def _with_share(line: LineShare, share: float) -> LineShare:
    """The line with another share of wall clock and CPU time. A quarter of the rest of the work always stays."""
    share = min(max(share, 0.0), 1 - (1 - line.share) / 4)
    return replace(line, share=share, cpu_share=min(line.cpu_share * share / line.share, 1.0))


def _gain(
    evidence: Evidence, kind: str, line: LineShare, part: float, *, cause: str, longer: float = 0.0
) -> float | None:
    """Predicted factor on the steps per second if ``part`` of the line's time is saved, with ``longer`` fetches (s)."""
    saved = part * min(line.share, 1 - line.error)  # other work takes time as well
    if kind == CHECKPOINT:
        whole = evidence.loop_and_checkpoint_seconds
        return gain_over_window(evidence, whole - saved * min(whole, evidence.checkpoint_seconds), now=whole)
    if not evidence.steps:
        return None
    now, supply = evidence.step_seconds, evidence.supply_seconds if evidence.source == "workers" else 0.0
    if supply is None:
        return None
    if kind == FETCH:
        then = _with_shorter_fetch(evidence, saved, part * line.cpu_share, cause=cause, longer=longer)
        return None if then is None else gain_of(evidence, min(then, now))
    if kind == WAIT:
        then = now - saved * evidence.wait_seconds / evidence.steps
    elif kind == SAMPLER:
        own = own_time(evidence)
        then = max(now - saved * own.exposed_ratio * own.all_sampler / evidence.steps, supply)
    elif cause == "host_bound":
        then = now - min((evidence.gpu_idle_seconds or 0.0) / evidence.steps, saved * evidence.step_compute_seconds)
    else:
        then = max(now * (1 - saved), supply)
    return gain_of(evidence, then)


def _with_shorter_fetch(
    evidence: Evidence, saved: float, saved_cpu: float, *, cause: str, longer: float
) -> float | None:
    """Seconds of a step if the workers' fetches become shorter by these shares of wall clock and of CPU time."""
    fetch, batches = alone_in_worker(evidence), evidence.batches_per_step
    if fetch is None or not evidence.workers:
        return None
    if cause == "uneven_batches":  # the workers are fast enough on average: only the waits become shorter
        return evidence.step_seconds - saved * max(0.0, evidence.mid_epoch_wait_seconds) / evidence.steps
    shorter = Fetch(fetch.seconds * (1 - saved) + longer * batches, fetch.cpu_seconds * (1 - saved_cpu))
    then = predicted_step(evidence, shorter, evidence.workers)
    received = (evidence.receiving_cpu_seconds or 0.0) * batches  # on the training thread
    return max(then, evidence.step_compute_seconds + received)
