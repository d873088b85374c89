"""``telemetry compare RUN_A RUN_B [--again RUN_A RUN_B] …``: whether B is faster than A, and where they differ.

Steps are not independent. They are slow together: another process takes a core, a file system is busy, a clock is
reduced. So the scatter of single steps underestimates the error of their mean. The interval of the ratio is that of a
block bootstrap over the windows of the log, plus the variation that no window shows. benchmarks/compare.py measures how
often it is right.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from telemetry.diagnosis.changes import correlation
from telemetry.log_lines import Scalar
from telemetry.records import CATEGORIES, COMPUTE, COMPUTE_PARTS, DATA_WAIT
from telemetry.report.logs import NoRunError, load
from telemetry.report.process_log import Point, lost_by_cause, not_replaced, point_at, unix
from telemetry.util.text import complain, duration, listed, percent, show, show_json, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from telemetry.report.process_log import ProcessLog

FEWEST_WINDOWS: Final = 2
"""A run with fewer windows has no scatter."""

MANY_WINDOWS: Final = 8
"""With fewer windows, the correlation of neighbours cannot be estimated. Then the usual one is assumed."""

_USUAL_CORRELATION: Final = 0.5
"""Correlation of neighbouring windows. In recorded runs it is 0.4 to 0.5 for windows of 1 s, and 0.3 for 10 s."""

_MAX_CORRELATION: Final = 0.95
_CAUTION: Final = 0.5
"""The correlation is estimated with a standard error of about 1 / sqrt(number of windows). This much of it is added."""

_MIN_BLOCKS: Final = 3
_TENTHS: Final = 10

_BETWEEN_RUNS: Final = 0.005
_UNSEEN: Final = 0.012
_UNSEEN_SECONDS: Final = 1800.0
"""Variation that no window shows, as standard deviations of a run's pace. The place of its memory and the core it runs
on make 0.5 %. Programs of other virtual machines on the same processor come and go for many minutes: calm runs of 35 s
to three minutes scattered by 1.0 to 1.7 %. Only a run of hours has less of it."""

_Z: Final = 1.959964
_T: Final = ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (6, 2.447), (10, 2.228), (20, 2.086), (math.inf, _Z))
"""97.5 % quantiles of Student's distribution, by degrees of freedom; the last is the normal distribution's."""

_BEFORE: Final = 10.0
"""Degrees of freedom that the intervals of single pairs add: the scatter of three or four pairs alone is uncertain."""


class Window(NamedTuple):
    """A stretch of a run: the steps that ended in it, and its seconds of the training loop, of the mean rank."""

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


def pace(windows: Sequence[Window]) -> float:
    """Steps per second of the training loop."""
    return sum(window.steps for window in windows) / sum(window.seconds for window in windows)


def ratio_interval(a: Sequence[Window], b: Sequence[Window]) -> Ratio:
    """The pace of B over the pace of A. Each has at least `FEWEST_WINDOWS` windows with steps."""
    sides = [_deviations(a), _deviations(b)]
    few = min(len(a), len(b)) < MANY_WINDOWS
    alike = _USUAL_CORRELATION if few else correlation(sides, at_most=_MAX_CORRELATION, caution=_CAUTION)
    (in_a, free_a), (in_b, free_b) = (_bootstrap(each, alike) for each in sides)
    # Welch and Satterthwaite: degrees of freedom of a sum of two variances.
    freedom = (in_a + in_b) ** 2 / (in_a**2 / free_a + in_b**2 / free_b) if in_a + in_b > 0 else math.inf
    unseen = 2 * _BETWEEN_RUNS**2 + _slow_variance(*sides)
    for windows in (a, b):
        seconds = sum(window.seconds for window in windows)
        unseen += _UNSEEN**2 * _UNSEEN_SECONDS / (_UNSEEN_SECONDS + seconds)
    half = math.hypot(t_quantile(freedom) * math.sqrt(in_a + in_b), _Z * math.sqrt(unseen))
    return Ratio(pace(b) / pace(a), half)


def _deviations(windows: Sequence[Window]) -> list[float]:
    """How many steps more than at the run's pace each window has, relative to the steps of the mean window.

    The mean of such deviations has the error of the run's pace, for windows of different lengths as well.
    """
    whole = pace(windows)
    mean = sum(window.steps for window in windows) / len(windows)
    return [(window.steps - whole * window.seconds) / mean for window in windows]


def _bootstrap(deviations: Sequence[float], alike: float) -> tuple[float, float]:
    """The variance of the mean by a circular block bootstrap, and its degrees of freedom.

    Random draws of blocks converge to this variance, so none are drawn. The length of the blocks is best for an
    autoregressive series (Carlstein 1986). The correlation that such blocks do not show is added.
    ``alike``: the correlation of neighbours.
    """
    count = len(deviations)
    best = (2 * alike / (1 - alike**2)) ** (2 / 3) * count ** (1 / 3)
    size = max(1, min(math.ceil(best), count // _MIN_BLOCKS))
    ahead = [0.0]
    for value in [*deviations, *deviations[: size - 1]]:
        ahead.append(ahead[-1] + value)
    blocks = [ahead[start + size] - ahead[start] for start in range(count)]
    variance = sum(block * block for block in blocks) / (size * count * (count - size))
    whole = (1 + alike) / (1 - alike)
    shown = whole - 2 * alike * (1 - alike**size) / (size * (1 - alike) ** 2)
    return variance * whole / shown, max(1.0, count / size - 1)


def _slow_variance(a: Sequence[float], b: Sequence[float]) -> float:
    """The variance between two runs by disturbances that are slower than a run.

    If tenths of a run still resemble their neighbours, the disturbances last as long as a run. Then whole runs differ
    by about as much as these tenths.
    """
    size = min(len(a), len(b)) // _TENTHS
    if size < 2:  # then these are the windows, and the blocks show how alike they are
        return 0.0
    sides = [[sum(each[at : at + size]) / size for at in range(0, len(each) - size + 1, size)] for each in (a, b)]
    variance = sum(value * value / (len(side) - 1) for side in sides for value in side)
    return correlation(sides, at_most=_MAX_CORRELATION) * variance


def mean_ratio(pairs: Sequence[Ratio], turns: int) -> Ratio:
    """The mean of the ratios of at least one pair, and its interval.

    A pair with a shorter interval weighs more. If the pairs scatter by more than their intervals allow, the interval
    becomes longer; by less, a little shorter. ``turns``: how often runs of A and of B took turns. If that is less than
    the number of pairs, a disturbance of many minutes may be in several runs of one side. Then the interval is no
    shorter than that of so many pairs.
    """
    if len(pairs) == 1:
        return pairs[0]
    logs = [math.log(pair.ratio) for pair in pairs]
    weights = [(_Z / pair.half) ** 2 for pair in pairs]
    total = sum(weights)
    mean = sum(weight * each for weight, each in zip(weights, logs, strict=True)) / total
    squares = sum(weight * (each - mean) ** 2 for weight, each in zip(weights, logs, strict=True))
    freedom = _BEFORE + len(pairs) - 1
    half = t_quantile(freedom) * math.sqrt((_BEFORE + squares) / freedom / total)
    if turns < len(pairs):
        half = max(half, min(pair.half for pair in pairs) / math.sqrt(turns))
    return Ratio(math.exp(mean), half)


def t_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's distribution: up to 3 % too long below 2 degrees of freedom, else exact."""
    for (few, wide), (many, narrow) in pairwise(_T):
        if freedom <= many:
            share = (1 / few - 1 / max(1.0, freedom)) / (1 / few - 1 / many)
            return float(wide ** (1 - share) * narrow**share)
    return _Z


_FIRST_STEPS: Final = 10
_FIRST_RATIO: Final = 0.1
_FIRST_SECONDS: Final = 300.0
"""The first steps are left out, because they fill caches, start workers and choose kernels: at least this number of
steps, and this share of the training loop, but at most this time."""

_MOSTLY_KNOWN: Final = 0.5
"""How long threads waited for a core is known if it was measured over this share of the time."""

_HEAD: Final = ("world_size", "launcher", "telemetry_version", "python_version", "cpu_count", "node")
_NOT_COMPARED: Final = "loader_used_again"  # it is an event of the run, not a setting
_MAX_NAMED: Final = 8


@dataclass(frozen=True)
class Run:
    """One run, of the processes that no later one has replaced.

    Attributes:
        name, started: empty if it has no process.
        windows: windows after its first steps in which the training loop ran. ``steps``: steps in all of them.
        per_step_seconds: seconds of a rank for each of these steps, by category of the ledger.
        without_core_ratio: the share of the training loop that waited for a CPU core; None if that is not known.
        causes: seconds lost in stalls for each step of the whole run, by cause. ``compute_seconds``: seconds of the
            compute for each step of the whole run, by part; empty if it was not split.
        facts: known size, settings and environment by name; different values of the ranks are in one text.
        torn_lines: number of lines in its logs that could not be read.
        ended: whether all of its processes ended by themselves.
    """

    name: str
    started: str
    windows: tuple[Window, ...]
    steps: float
    per_step_seconds: dict[str, float]
    without_core_ratio: float | None
    causes: dict[str, float]
    compute_seconds: dict[str, float]
    facts: dict[str, Scalar]
    processes: Sequence[ProcessLog]
    torn_lines: int
    ended: bool

    @classmethod
    def of(cls, folder: str) -> Run:
        """Read the logs in a run folder.

        Raises:
            NoRunError: the folder has no run.
        """
        logs = load(Path(folder), all_windows=True)
        processes = not_replaced(logs)
        points = _points([process for process in processes if process.totals.steps_total])
        windows = [
            Window(
                fmean(end.steps - begin.steps for begin, end in zip(before, after, strict=True)),
                fmean(end.loop_seconds - begin.loop_seconds for begin, end in zip(before, after, strict=True)),
            )
            for before, after in pairwise(points)
        ]
        steps = sum(window.steps for window in windows)
        ranks = [*zip(points[0], points[-1], strict=True)] if steps else []
        all_steps = sum(process.totals.steps_total or 0 for process in processes)
        delay = fmean(_without_core(begin, end) for begin, end in ranks) if ranks else math.nan
        return cls(
            name=processes[-1].run,
            started=min(process.started for process in processes),
            windows=tuple(window for window in windows if window.seconds > 0),
            steps=steps,
            per_step_seconds={
                c: sum((getattr(end, c) - getattr(begin, c)) / steps / len(ranks) for begin, end in ranks)
                for c in CATEGORIES
            },
            without_core_ratio=None if math.isnan(delay) else delay,
            causes={cause: s / all_steps for cause, s in lost_by_cause(processes).items()} if all_steps else {},
            compute_seconds={part: s / all_steps for part, s in _by_part(processes).items()} if all_steps else {},
            facts=facts_of(processes),
            processes=processes,
            torn_lines=sum(process.torn_lines for process in logs),
            ended=all(process.ended for process in logs),
        )


def _by_part(processes: Sequence[ProcessLog]) -> dict[str, float]:
    split = [process.totals.compute_total_seconds for process in processes if process.totals.compute_total_seconds]
    seen = [part for part in COMPUTE_PARTS if any(part in each for each in split)]
    return {part: sum(each.get(part, 0.0) for each in split) for part in seen}


def _points(processes: Sequence[ProcessLog]) -> list[list[Point]]:
    """The totals of all ranks at the ends of the first rank's windows after its first steps.

    A window that is shorter than half of the usual one, as the last may be, joins its neighbour: a window with hardly
    any weight does not show the scatter.
    """
    series = [[Point(), *process.progress.points] for process in processes]
    started = [unix(process.started) or 0.0 for process in processes]
    newest = series[0][-1].loop_seconds if series else 0.0
    left_out = min(_FIRST_RATIO * newest, _FIRST_SECONDS)
    ends = [p for p in (series[0] if series else ()) if p.steps >= _FIRST_STEPS and p.loop_seconds >= left_out]
    if len(ends) > 2:
        least = median(end.loop_seconds - begin.loop_seconds for begin, end in pairwise(ends)) / 2
        kept = ends[:1]
        for point in ends[1:]:
            if point.loop_seconds - kept[-1].loop_seconds >= least:
                kept.append(point)
        ends = [*kept[:-1], ends[-1]]
    return [
        [
            point_at(own, "wall_seconds", end.wall_seconds + started[0] - begin)  # by the clock of its node
            for own, begin in zip(series, started, strict=True)
        ]
        for end in ends
    ]


def _without_core(begin: Point, end: Point) -> float:
    """The share of a rank's training loop in which a thread that it needed was ready to run and had no core.

    During compute that is the training thread, during waits for data the mean worker. NaN: not reported.
    """
    if math.isnan(begin.thread_delay):  # the first window of a run has no such figures: count from its start
        begin = Point(thread_delay=0.0)
    wall, known = end.wall_seconds - begin.wall_seconds, end.known - begin.known
    loop = end.loop_seconds - begin.loop_seconds
    if loop <= 0 or known <= _MOSTLY_KNOWN * wall:
        return math.nan
    waited = (end.data_wait - begin.data_wait) / loop
    thread, worker = end.thread_delay - begin.thread_delay, end.worker_delay - begin.worker_delay
    return min(1.0, (1 - waited) * thread / wall + waited * worker / known)


def facts_of(processes: Sequence[ProcessLog]) -> dict[str, Scalar]:
    """Recorded facts besides the pace, by name. If they differ between processes, all values are in one text."""
    named: dict[str, list[Scalar]] = {}
    for process in processes:
        facts = {name: getattr(process.head, name) for name in _HEAD} | process.environment | process.loader
        for name, value in facts.items():
            if value is not None and name != _NOT_COMPARED and value not in named.setdefault(name, []):
                named[name].append(value)
    found: dict[str, Scalar] = {}
    for name, values in named.items():
        found[name] = values[0] if len(values) == 1 else listed(sorted(map(str, values)), _MAX_NAMED)
    return found


FASTER: Final = "faster"
SLOWER: Final = "slower"
NO_DIFFERENCE: Final = "no difference"
NOT_COMPARABLE: Final = "not comparable"

MIN_STEPS: Final = 20
SAME_STEP: Final = ("world_size", "batch_size")
"""If these differ, a step is another amount of work."""

_MAX_DELAY_APART: Final = 0.01
_MAY_DIFFER: Final = frozenset({"node"})  # between runs of one version


class Sides(msgspec.Struct, frozen=True):
    """A figure of A and of B; None if it is not known."""

    a: float | None
    b: float | None

    @property
    def apart(self) -> float | None:
        """The value of B minus that of A."""
        return None if self.a is None or self.b is None else self.b - self.a


class Difference(Sides, frozen=True):
    """Seconds for each step of A and of B, and B's minus A's."""

    difference: float | None


class Fact(msgspec.Struct, frozen=True):
    """A setting, or a part of the environment, in which the runs differ."""

    what: str
    a: Scalar
    b: Scalar


class PairRatio(msgspec.Struct, frozen=True):
    """The names of two runs, and the steps per second of the second over those of the first."""

    a: str
    b: str
    ratio: float | None
    interval: tuple[float, float] | None


class Comparison(msgspec.Struct, frozen=True):
    """B against A: the output of ``compare --json``. Unknown values are None.

    docs/compare.md explains each field. ``compute_seconds``: empty unless the compute of all runs was split. ``notes``:
    what a reader must know about the logs and the runs.
    """

    a: str
    b: str
    verdict: str
    why: str | None
    ratio: float | None
    interval: tuple[float, float] | None
    warning: str | None
    without_core_ratio: Sides
    turns: int
    pairs: list[PairRatio]
    steps: Sides
    differences: list[Fact]
    per_step_seconds: dict[str, Difference]
    causes: dict[str, Sides]
    compute_seconds: dict[str, Sides]
    notes: list[str]


def compare_runs(pairs: Sequence[tuple[Run, Run]]) -> Comparison:
    """B against A, from one or more pairs of runs."""
    sides = list(zip(*pairs, strict=True))
    # How often a run of one side started next after a run of the other: 1 if all of A ran before all of B. A
    # disturbance of many minutes can be distinguished from a difference between the versions only this often.
    in_order = sorted(((run.started, side) for pair in pairs for side, run in enumerate(pair)), key=itemgetter(0))
    turns = sum(before != after for (_, before), (_, after) in pairwise(in_order))
    why = _not_comparable(pairs)
    each = [None if why else ratio_interval(a.windows, b.windows) for a, b in pairs]
    known = [ratio for ratio in each if ratio is not None]
    found = mean_ratio(known, turns) if known else None
    low, high = found.interval if found else (1.0, 1.0)
    verdict = FASTER if low > 1 else SLOWER if high < 1 else NO_DIFFERENCE
    split = all(run.compute_seconds for runs in sides for run in runs)
    delay = Sides(*(_mean(run.without_core_ratio for run in runs) for runs in sides))
    return Comparison(
        ", ".join(run.name for run in sides[0]),
        ", ".join(run.name for run in sides[1]),
        verdict if found else NOT_COMPARABLE,
        why=why,
        ratio=found and round(found.ratio, 5),
        interval=found and found.interval,
        warning=_warning(delay) if found else None,
        without_core_ratio=delay,
        turns=turns,
        pairs=[
            PairRatio(a.name, b.name, ratio and round(ratio.ratio, 5), ratio and ratio.interval)
            for (a, b), ratio in zip(pairs, each, strict=True)
        ],
        steps=Sides(*(round(sum(run.steps for run in runs)) for runs in sides)),
        differences=_differences(*sides),
        per_step_seconds=_per_step(*sides),
        causes=_by_name(*([run.causes for run in runs] for runs in sides)),
        compute_seconds=_by_name(*([run.compute_seconds for run in runs] for runs in sides)) if split else {},
        notes=[*_notes(pairs, turns)],
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 9) if known else None


def _warning(delay: Sides) -> str | None:
    if abs(delay.apart or 0.0) <= _MAX_DELAY_APART:
        return None
    return (
        f"the training loop waited for a CPU core for {percent(delay.a)} of its time in A and {percent(delay.b)} in B. "
        "If other programs used the cores, a part of the difference is theirs: run both on a machine that nobody else "
        "uses"
    )


def _not_comparable(pairs: Sequence[tuple[Run, Run]]) -> str | None:
    """Why a pair cannot be compared, or does not have the same two versions; None if all can be compared."""
    first: dict[str, tuple[Scalar, int]] = {}
    for number, (a, b) in enumerate(pairs, 1):
        why = _too_short("A", a) or _too_short("B", b)
        for name in SAME_STEP:
            if not why and name in a.facts and name in b.facts and a.facts[name] != b.facts[name]:
                why = f"a step is not the same work: {name} is {a.facts[name]} in A and {b.facts[name]} in B"
        if why:
            return why if len(pairs) == 1 else f"pair {number}: {why}"
        for name in (each for each in SAME_STEP if each in a.facts):
            value, where = first.setdefault(name, (a.facts[name], number))
            if value != a.facts[name]:
                here = f"{value} in pair {where} and {a.facts[name]} in pair {number}"
                return f"the pairs are not of the same work: {name} is {here}"
    return None


def _too_short(which: str, run: Run) -> str | None:
    if len(run.windows) < FEWEST_WINDOWS:
        count = "one window" if run.windows else "no window"
        return (
            f"{which} has {count} after its first steps, and two are needed to see how its pace scatters; run it for "
            "longer (with the default settings a minute is enough), or with a smaller log_interval_seconds"
        )
    if run.steps < MIN_STEPS:
        return f"{which} has {run.steps:.0f} steps after its first ones, and {MIN_STEPS} are needed; run it for longer"
    return None


def _differences(a: Sequence[Run], b: Sequence[Run]) -> list[Fact]:
    """The facts in which two sides differ. Those that make a step another amount of work come first.

    A fact of only one side is left out: an older version may not have recorded it.
    """
    of_a, of_b = (facts_of([process for run in runs for process in run.processes]) for runs in (a, b))
    found = [Fact(name, of_a[name], of_b[name]) for name in of_a if name in of_b and of_a[name] != of_b[name]]
    return sorted(found, key=lambda fact: (fact.what not in SAME_STEP, fact.what))


def _per_step(a: Sequence[Run], b: Sequence[Run]) -> dict[str, Difference]:
    """The means of the runs. As in the ratio, a long run does not count more."""
    found = {}
    for name in CATEGORIES:
        known = [[run.per_step_seconds[name] for run in runs if run.steps] for runs in (a, b)]
        apart = round(fmean(known[1]) - fmean(known[0]), 9) if all(known) else None
        found[name] = Difference(_mean(known[0]), _mean(known[1]), apart)
    return found


def _by_name(a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]]) -> dict[str, Sides]:
    """The means of the runs of each side, the largest first."""
    means: dict[str, list[float]] = {}
    for side, runs in enumerate((a, b)):
        for run in runs:
            for name, seconds in run.items():
                means.setdefault(name, [0.0, 0.0])[side] += seconds / len(runs)
    order = sorted(sorted(means), key=lambda name: -max(means[name]))
    return {name: Sides(*(round(seconds, 9) for seconds in means[name])) for name in order}


def _notes(pairs: Sequence[tuple[Run, Run]], turns: int) -> Iterable[str]:
    for number, pair in enumerate(pairs, 1):
        for which, run in zip("AB", pair, strict=True):
            name = which if len(pairs) == 1 else f"{which} of pair {number}"
            if run.torn_lines:
                yield f"{name} has {run.torn_lines} torn line(s) in its logs; they were skipped"
            if not run.ended:
                yield f"{name} has not ended, or was killed: its newest window counts as its end"
            if FEWEST_WINDOWS <= len(run.windows) < MANY_WINDOWS:
                yield f"{name} has {len(run.windows)} windows after its first steps; more make the interval shorter"
    if turns < len(pairs):
        yield (
            f"the runs of A and B did not take turns often enough, and the machine may have changed in between: so the "
            f"{len(pairs)} pairs count as {turns}"
        )
    for which, runs in zip("AB", zip(*pairs, strict=True), strict=True):
        first = runs[0].facts
        differ = {name for run in runs for name, value in run.facts.items() if name in first and value != first[name]}
        if differ - _MAY_DIFFER:
            yield f"the runs of {which} differ in {', '.join(sorted(differ - _MAY_DIFFER))}: are all of one version?"


_MIN_SHOWN_SECONDS: Final = 5e-7
"""Half a microsecond per step: smaller times are not shown."""

_MORE_PAIRS: Final = (
    "To see a smaller difference, run both once more, in the other order, and add --again RUN_A RUN_B: further pairs "
    "make the interval shorter."
)


def compare(pairs: Sequence[tuple[str, str]], *, as_json: bool, fail_over: float | None) -> int:
    """Print the comparison.

    Args:
        pairs: the run folders of A and B, for one or more pairs. With several pairs, no folder may be named twice.
        as_json: print one JSON object instead of text.
        fail_over: fail if B is slower by more than this, in percent; None: never.

    Returns:
        The exit status: 0; 1 if B is slower than ``fail_over`` allows; 2 if the runs cannot be compared.
    """
    folders = [folder for pair in pairs for folder in pair]
    real = [os.path.realpath(folder) for folder in folders]
    twice = [folder for at, folder in enumerate(folders) if real[at] in real[:at]]
    if twice and len(pairs) > 1:  # its errors would be taken for independent ones
        complain(f"{twice[0]} is named twice: with --again, each pair needs two runs of its own")
        return 2
    try:
        found = compare_runs([(Run.of(a), Run.of(b)) for a, b in pairs])
    except NoRunError as error:
        complain(str(error))
        return 2
    if as_json:
        written = show_json(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        written = show(render(found))
    if written or found.verdict == NOT_COMPARABLE:
        return 2
    # The whole interval must be below, so that it is not chance.
    return int(fail_over is not None and found.interval is not None and found.interval[1] < 1 - fail_over / 100)


def render(found: Comparison) -> str:
    """Differences of the settings, the verdict, and two tables: by category of the ledger and by cause."""
    counted = "; {} steps in all" if len(found.pairs) > 1 else ", {} steps"
    lines = [f"A: {found.a}{counted.format(found.steps.a)}", f"B: {found.b}{counted.format(found.steps.b)}"]
    lines += [*found.notes, ""]
    if found.differences:
        rows = [[fact.what, str(fact.a), str(fact.b)] for fact in found.differences]
        lines += [*table(["settings and environment", "A", "B"], rows, names_first=True), ""]
    else:
        lines += ["No recorded setting differs, and no recorded part of the environment.", ""]
    lines.append(_sentence(found))
    if found.warning:
        lines.append(f"Warning: {found.warning}.")
    elif found.verdict == NO_DIFFERENCE:
        lines.append(_MORE_PAIRS)
    if len(found.pairs) > 1 and found.verdict != NOT_COMPARABLE:
        rows = [
            [f"{number}: {each.a}, {each.b}", f"{each.ratio:.3f}", _range(each.interval)]
            for number, each in enumerate(found.pairs, 1)
        ]
        lines += ["", *table(["pair", "ratio", "95 % interval"], rows, names_first=True)]
    lines += _table("seconds for each step", found.per_step_seconds)
    lines += _table("compute, for each step", found.compute_seconds)
    lines += _table("lost in stalls, for each step", found.causes)
    return "\n".join(lines) + "\n"


def _sentence(found: Comparison) -> str:
    """The verdict, its figures, and the category that differs most."""
    if found.verdict == NOT_COMPARABLE:
        return f"Not comparable: {found.why}."
    figures = f"{found.ratio:.3f} times the steps per second of A (95 % interval: {_range(found.interval)})"
    if found.verdict == NO_DIFFERENCE:
        return f"No difference that can be told from chance: B does {figures}."
    return f"B is {found.verdict}: it does {figures}.{_most(found)}"


def _range(interval: tuple[float, float] | None) -> str:
    low, high = interval or (0.0, 0.0)
    return f"{low:.3f} to {high:.{3 if high < 100 else 0}f}"


def _most(found: Comparison) -> str:
    """The part of the loop with the difference: wait or compute. Empty if the means of the runs do not show it."""
    loop = {name: found.per_step_seconds[name].difference or 0.0 for name in (DATA_WAIT, COMPUTE)}
    total = sum(loop.values())
    name = max(loop, key=lambda name: loop[name] * (1 if total > 0 else -1))
    if not total or (total > 0) != (found.verdict != FASTER) or loop[name] / total < 0.5:
        return ""
    share = min(1.0, loop[name] / total)
    return f" {percent(share, 0)} of the difference is {name.replace('_', ' ')}: {_signed(loop[name])} a step."


def _table(heading: str, figures: Mapping[str, Sides]) -> list[str]:
    rows = []
    for name, sides in figures.items():
        if any(abs(value or 0.0) >= _MIN_SHOWN_SECONDS for value in (sides.a, sides.b)):
            label = name.replace("_", " ") if name in CATEGORIES else name
            rows.append([label, duration(sides.a), duration(sides.b), _signed(sides.apart)])
    return ["", *table([heading, "A", "B", "difference"], rows, names_first=True)] if rows else []


def _signed(seconds: float | None) -> str:
    return "-" if seconds is None else f"{'+' if seconds > 0 else ''}{duration(seconds)}"
