"""``telemetry compare RUN_A RUN_B``: whether B is faster than A, and where they differ.

Steps are not independent. They are slow together: another process takes a core, a file system is busy, a clock is
reduced. So the scatter of single steps underestimates the error of their mean. The interval of the ratio is that of a
block bootstrap over the windows of the log, plus the variation that no window shows. benchmarks/compare.py measures how
often it is right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from telemetry.log.lines import Scalar
from telemetry.log.process import Point, lost_by_cause
from telemetry.log.reader import NoRunError
from telemetry.model.records import CATEGORIES, COMPUTE, COMPUTE_PARTS, DATA_WAIT
from telemetry.report.summary import read_report
from telemetry.util.words import complain, duration, listed, percent, show, show_json, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.log.process import ProcessLog

# -- the ratio and its interval ----------------------------------------------------------------------------------------

_BLOCKS: Final = 10
"""A run is divided into this many blocks, or up to twice as many if it has few windows."""

_MAX_CORRELATION: Final = 0.7
"""Correlation of neighbouring blocks: more cannot be told from so few. One standard error is added to the estimate."""

_FEW: Final = 6
"""The correction of the correlation's bias is not defined for so few values, which do not tell how large it is."""

_ROUNDING: Final = 1e-9

_BETWEEN_RUNS: Final = 0.005
_UNSEEN: Final = 0.012
_UNSEEN_SECONDS: Final = 1800.0
"""Variation that no window shows, as standard deviations of a run's pace. The place of its memory and the core it runs
on make 0.5 %. Programs of other virtual machines on the same processor come and go for many minutes: calm runs of 35 s
to three minutes scattered by 1.0 to 1.7 %. Only a run of hours has less of it."""

_Z: Final = 1.959964  # the 97.5 % quantile of the normal distribution


class Window(NamedTuple):
    """A stretch of a run: the steps that ended in it, and its seconds of the training loop."""

    steps: float
    seconds: float


class Ratio(NamedTuple):
    """Steps per second of one run over another's, and half of the 95 % interval of its logarithm."""

    ratio: float
    half: float

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the ratio."""
        return round(self.ratio * math.exp(-self.half), 5), round(self.ratio * math.exp(self.half), 5)


def ratio_interval(a: Sequence[Window], b: Sequence[Window]) -> Ratio:
    """The pace of B over the pace of A. Each has at least two windows with steps.

    Random draws of blocks converge to the variance of their mean, so none are drawn. That neighbours are alike makes
    it larger by the factor of an autoregressive series, and halves its degrees of freedom.
    """
    blocks = _blocks(a), _blocks(b)
    alike = _correlation(blocks)
    longer = (1 + alike) / (1 - alike)
    variances = [longer * sum(each * each for each in side) / (len(side) - 1) / len(side) for side in blocks]
    seen, unseen = sum(variances), 2 * _BETWEEN_RUNS**2
    for windows in (a, b):
        unseen += _UNSEEN**2 / (1 + sum(window.seconds for window in windows) / _UNSEEN_SECONDS)
    half = _Z * math.sqrt(unseen)
    if seen > 0:
        # Welch and Satterthwaite: degrees of freedom of a sum of two variances.
        free = [max(1.0, (len(side) - 1) / 2) for side in blocks]
        freedom = seen**2 / sum(variance**2 / each for variance, each in zip(variances, free, strict=True))
        half = math.hypot(half, _t_quantile(freedom) * math.sqrt(seen))
    return Ratio(_pace(b) / _pace(a), half)


def _pace(windows: Sequence[Window]) -> float:
    return sum(window.steps for window in windows) / sum(window.seconds for window in windows)


def _blocks(windows: Sequence[Window]) -> list[float]:
    """How many steps more than at the run's pace each block has, relative to the steps of the mean block.

    The mean of such deviations has the error of the run's pace, for windows of different lengths as well.
    """
    pace, size = _pace(windows), max(1, len(windows) // _BLOCKS)
    mean = size * sum(window.steps for window in windows) / len(windows)
    starts = range(0, len(windows) - size + 1, size)
    return [sum(each.steps - pace * each.seconds for each in windows[at : at + size]) / mean for at in starts]


def _correlation(sides: Sequence[Sequence[float]]) -> float:
    """The correlation of neighbours in two series, corrected for its bias in short series (Kendall 1954)."""
    count = sum(map(len, sides))
    squares = sum(value * value for side in sides for value in side)
    products = sum(one * next_ for side in sides for one, next_ in pairwise(side))
    if squares <= 0:
        return 0.0
    found = products / squares + 2 / count
    if count <= _FEW:
        return _MAX_CORRELATION if found > _ROUNDING else 0.0
    return min(_MAX_CORRELATION, max(0.0, found / (1 - _FEW / count) + 1 / math.sqrt(count)))


def _t_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's distribution, by an expansion: 3 % too short for 2 degrees of freedom."""
    first, second = (_Z**3 + _Z) / 4, (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    third = (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384
    return _Z + first / freedom + second / freedom**2 + third / freedom**3


# -- one run -----------------------------------------------------------------------------------------------------------

_FIRST_STEPS: Final = 10
_FIRST_RATIO: Final = 0.1
_FIRST_SECONDS: Final = 300.0
"""The first steps are left out, because they fill caches, start workers and choose kernels: at least this number of
steps, and this share of the training loop, but at most this time."""

_HEAD: Final = ("world_size", "launcher", "telemetry_version", "python_version", "cpu_count", "node")
_NOT_COMPARED: Final = "loader_used_again"  # it is an event of the run, not a setting
_MAX_NAMED: Final = 8


@dataclass(frozen=True)
class Run:
    """The mean rank of one run, of the processes that no later one has replaced.

    Attributes:
        windows: windows after its first steps in which the training loop ran. ``steps``: steps in all of them.
        per_step_seconds: seconds for each of these steps, by category of the ledger.
        without_core_ratio: share of the time in which the training thread, or while that waits for data the mean
            worker, was ready to run and had no core; NaN if that is not known.
        causes: seconds lost in stalls for each step of the whole run, by cause. ``compute_seconds``: seconds of the
            compute for each step of the whole run, by part; empty if it was not split.
        facts: known size, settings and environment by name; different values of the ranks are in one text.
        notes: what a reader must know about its logs.
    """

    name: str
    windows: tuple[Window, ...]
    steps: float
    per_step_seconds: dict[str, float]
    without_core_ratio: float
    causes: dict[str, float]
    compute_seconds: dict[str, float]
    facts: dict[str, Scalar]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, folder: str) -> Run:
        """Read the logs in a run folder.

        Raises:
            NoRunError: the folder has no run.
        """
        found = read_report(Path(folder), all_windows=True, traces=False)
        logs, processes = found.processes, found.now
        points = _points([process for process in processes if process.totals.steps_total])
        begin, end = (points[0], points[-1]) if points else (Point(), Point())
        windows = [Window(p.steps - last.steps, p.loop_seconds - last.loop_seconds) for last, p in pairwise(points)]
        steps = end.steps - begin.steps
        all_steps = max(1, sum(process.totals.steps_total or 0 for process in processes))
        damaged, notes = sum(process.damaged_lines for process in logs), []
        if damaged:
            notes.append(f"has {damaged} damaged line(s) in its logs; they were skipped")
        if not all(process.ended for process in logs):
            notes.append("has not ended, or was killed: its newest window counts as its end")
        return cls(
            name=processes[-1].run,
            windows=tuple(window for window in windows if window.seconds > 0),
            steps=steps,
            per_step_seconds={c: (getattr(end, c) - getattr(begin, c)) / steps for c in CATEGORIES if steps},
            without_core_ratio=_without_core(begin, end),
            causes={cause: seconds / all_steps for cause, seconds in lost_by_cause(processes).items()},
            compute_seconds={part: seconds / all_steps for part, seconds in _by_part(processes).items()},
            facts=_facts(processes),
            notes=tuple(notes),
        )


def _points(processes: Sequence[ProcessLog]) -> list[Point]:
    """The totals of the mean rank at the ends of its windows after its first steps."""
    ranks = [process.progress.points for process in processes]
    mean = [Point(*map(fmean, zip(*row, strict=True))) for row in zip(*ranks, strict=False)]
    left_out = min(_FIRST_RATIO * mean[-1].loop_seconds, _FIRST_SECONDS) if mean else 0.0
    points = [point for point in mean if point.steps >= _FIRST_STEPS and point.loop_seconds >= left_out]
    if len(points) > 2:
        # The last window may be short. With hardly any weight it shows no scatter, so it joins the one before.
        *_, usual, last = (end.loop_seconds - begin.loop_seconds for begin, end in pairwise(points))
        if last < usual / 2:
            del points[-2]
    return points


def _without_core(begin: Point, end: Point) -> float:
    wall, loop = end.wall_seconds - begin.wall_seconds, end.loop_seconds - begin.loop_seconds
    if not loop:
        return math.nan
    waited = (end.data_wait - begin.data_wait) / loop
    thread, worker = end.thread_delay - begin.thread_delay, end.worker_delay - begin.worker_delay
    return ((1 - waited) * thread + waited * worker) / wall


def _by_part(processes: Sequence[ProcessLog]) -> dict[str, float]:
    split = [process.totals.compute_total_seconds or {} for process in processes]
    return {part: sum(each.get(part, 0.0) for each in split) for part in COMPUTE_PARTS if any(part in e for e in split)}


def _facts(processes: Sequence[ProcessLog]) -> dict[str, Scalar]:
    named: dict[str, list[Scalar]] = {}
    for process in processes:
        facts = {name: getattr(process.head, name) for name in _HEAD} | process.environment | process.loader
        for name, value in facts.items():
            if value is not None and name != _NOT_COMPARED and value not in named.setdefault(name, []):
                named[name].append(value)
    return {n: v[0] if len(v) == 1 else listed(sorted(map(str, v)), _MAX_NAMED) for n, v in named.items()}


# -- B against A -------------------------------------------------------------------------------------------------------

_MIN_STEPS: Final = 20
_SAME_STEP: Final = ("world_size", "batch_size")
"""If these differ, a step is another amount of work."""

_MAX_APART: Final = 0.01


class Sides(msgspec.Struct, frozen=True):
    """A figure of A and of B; None if it is not known."""

    a: float | None
    b: float | None

    @property
    def apart(self) -> float | None:
        """The value of B minus that of A."""
        return None if self.a is None or self.b is None else round(self.b - self.a, 9)


class Difference(Sides, frozen=True):
    """Seconds for each step of A and of B, and B's minus A's."""

    difference: float | None


class Fact(msgspec.Struct, frozen=True):
    """A setting, or a part of the environment, in which the runs differ."""

    what: str
    a: Scalar
    b: Scalar


class Comparison(msgspec.Struct, frozen=True):
    """B against A: the output of ``compare --json``, which docs/compare.md explains. Unknown values are None."""

    a: str
    b: str
    verdict: str
    why: str | None
    ratio: float | None
    interval: tuple[float, float] | None
    warning: str | None
    steps: Sides
    differences: list[Fact]
    per_step_seconds: dict[str, Difference]
    causes: dict[str, Sides]
    compute_seconds: dict[str, Sides]
    notes: list[str]


def compare_runs(a: Run, b: Run) -> Comparison:
    """B against A."""
    # A fact of only one side is left out: an older version may not have recorded it.
    both = sorted(a.facts.keys() & b.facts.keys())
    differences = [Fact(name, a.facts[name], b.facts[name]) for name in both if a.facts[name] != b.facts[name]]
    why = _too_short("A", a) or _too_short("B", b)
    for fact in differences:
        if fact.what in _SAME_STEP:
            why = why or f"a step is not the same work: {fact.what} is {fact.a} in A and {fact.b} in B"
    found = None if why else ratio_interval(a.windows, b.windows)
    low, high = found.interval if found else (1.0, 1.0)
    split = a.compute_seconds and b.compute_seconds
    per_step = {name: _sides(name, a.per_step_seconds, b.per_step_seconds) for name in CATEGORIES}
    return Comparison(
        a.name,
        b.name,
        "not comparable" if not found else "faster" if low > 1 else "slower" if high < 1 else "no difference",
        why=why,
        ratio=found and round(found.ratio, 5),
        interval=found and found.interval,
        warning=_warning(a.without_core_ratio, b.without_core_ratio) if found else None,
        steps=Sides(round(a.steps), round(b.steps)),
        differences=differences,
        per_step_seconds={name: Difference(each.a, each.b, each.apart) for name, each in per_step.items()},
        causes=_by_name(a.causes, b.causes),
        compute_seconds=_by_name(a.compute_seconds, b.compute_seconds) if split else {},
        notes=[f"{which} {note}" for which, run in (("A", a), ("B", b)) for note in run.notes],
    )


def _too_short(which: str, run: Run) -> str | None:
    if len(run.windows) < 2:
        count = "one window" if run.windows else "no window"
        return (
            f"{which} has {count} after its first steps, and two are needed to see how its pace scatters; run it for "
            "longer (with the default settings a minute is enough), or with a smaller log_interval_seconds"
        )
    if run.steps < _MIN_STEPS:
        return f"{which} has {run.steps:.0f} steps after its first ones, and {_MIN_STEPS} are needed; run it for longer"
    return None


def _warning(a: float, b: float) -> str | None:
    if not abs(b - a) > _MAX_APART:  # also if one is NaN
        return None
    return (
        f"the training loop waited for a CPU core for {percent(a)} of its time in A and {percent(b)} in B. If other "
        "programs used the cores, a part of the difference is theirs: run both on a machine that nobody else uses"
    )


def _sides(name: str, a: Mapping[str, float], b: Mapping[str, float], absent: float | None = None) -> Sides:
    return Sides(*(absent if name not in side else round(side[name], 9) for side in (a, b)))


def _by_name(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, Sides]:
    """The figures of both sides, the largest first."""
    order = sorted(a.keys() | b.keys(), key=lambda name: (-max(a.get(name, 0.0), b.get(name, 0.0)), name))
    return {name: _sides(name, a, b, absent=0.0) for name in order}


# -- the command -------------------------------------------------------------------------------------------------------

_MIN_SHOWN_SECONDS: Final = 5e-7
"""Half a microsecond per step: smaller times are not shown."""


def compare(run_a: str, run_b: str, *, as_json: bool, fail_over: float | None) -> int:
    """Print the comparison of two run folders, as text or as JSON.

    Returns the exit status: 0; 1 if B is slower by more than ``fail_over`` percent; 2 if they cannot be compared.
    """
    try:
        found = compare_runs(Run.of(run_a), Run.of(run_b))
    except NoRunError as error:
        complain(str(error))
        return 2
    if as_json:
        written = show_json(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        written = show(_text(found))
    if written or found.interval is None:
        return 2
    # The whole interval must be below, so that it is not chance.
    return int(fail_over is not None and found.interval[1] < 1 - fail_over / 100)


def _text(found: Comparison) -> str:
    """Differences of the settings, the verdict, and tables by category of the ledger, part of the compute and cause."""
    lines = [f"A: {found.a}, {found.steps.a} steps", f"B: {found.b}, {found.steps.b} steps", *found.notes, ""]
    if found.differences:
        rows = [[fact.what, str(fact.a), str(fact.b)] for fact in found.differences]
        lines += [*table(["settings and environment", "A", "B"], rows, names_first=True), ""]
    else:
        lines += ["No recorded setting differs, and no recorded part of the environment.", ""]
    lines.append(_sentence(found))
    if found.warning:
        lines.append(f"Warning: {found.warning}.")
    tables: tuple[tuple[str, Mapping[str, Sides]], ...] = (
        ("seconds for each step", {name.replace("_", " "): sides for name, sides in found.per_step_seconds.items()}),
        ("compute, for each step", found.compute_seconds),
        ("lost in stalls, for each step", found.causes),
    )
    for heading, figures in tables:
        rows = [
            [name, duration(sides.a), duration(sides.b), _signed(sides.apart)]
            for name, sides in figures.items()
            if max(sides.a or 0.0, sides.b or 0.0) >= _MIN_SHOWN_SECONDS
        ]
        lines += ["", *table([heading, "A", "B", "difference"], rows, names_first=True)] if rows else []
    return "\n".join(lines) + "\n"


def _sentence(found: Comparison) -> str:
    """The verdict, its figures, and how the two parts of the loop differ, first the one that differs most."""
    if found.interval is None:
        return f"Not comparable: {found.why}."
    low, high = found.interval
    shown = f"{low:.3f} to {high:.{3 if high < 100 else 0}f}"
    figures = f"{found.ratio:.3f} times the steps per second of A (95 % interval: {shown})"
    if found.verdict == "no difference":
        return f"No difference that can be told from chance: B does {figures}. Longer runs show smaller differences."
    apart = [(found.per_step_seconds[name].difference or 0.0, name.replace("_", " ")) for name in (DATA_WAIT, COMPUTE)]
    (most, first), (less, other) = sorted(apart, key=lambda part: -abs(part[0]))
    told = f"The largest difference is {first}: {_signed(most)} a step; {other}: {_signed(less)}"
    return f"B is {found.verdict}: it does {figures}. {told}."


def _signed(seconds: float | None) -> str:
    return "-" if seconds is None else f"{'+' if seconds > 0 else ''}{duration(seconds)}"
