"""``python -m benchmarks.overhead``: measures everything in one run, side by side, in a random order.

Each figure is a median with the spread from the 10th to the 90th percentile. "Added" is the median of differences to
the bare loop that ran next to it. The median decides about a target. A figure that cannot be measured here says why.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import child, machine, report, scrape, sink_cost, traceml
from benchmarks.agent_cpu import BESIDE
from benchmarks.effort import FULL, MS, QUICK, US, Effort, Pool
from benchmarks.instruments import BARE, FLOOR, FLOOR_LIST, NEXT_ONLY, PROMETHEUS, STAND_IN, TELEMETRY
from benchmarks.report import AT_LEAST, AT_MOST, BELOW, Row, Target
from benchmarks.spread import (
    Spread,
    of_groups,
    of_percentile,
    paired,
    percentile,
    ratio_of_medians,
    spread,
)
from benchmarks.tail import STEP_US
from benchmarks.tool_environment import ToolError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

RESULTS: Final = Path(__file__).resolve().parent / "results"

_HOT: Final = "Per step on the training thread, hot (a tight loop that does nothing else)"
_COLD: Final = "Per step on the training thread, cold (in place inside a real training step)"
_GPU: Final = "Per step on the training thread, with CUDA events on a GPU"
_FETCH: Final = "Per fetch in a DataLoader worker"
_MEMORY: Final = "Memory"
_SCRAPE: Final = "A scrape of a node of 8 ranks, at 5 Hz, in a process that trains"
_THREADS: Final = "The agent's own threads"
_TAIL: Final = f"The longest of many steps of {STEP_US:.0f} us, 8 DataLoader workers and one scrape a second"
_WORKERS: Final = 8
_RANKS: Final = 8
_RANK_WORKERS: Final = 2
_UNIT: Final = "% of a core"


# -- (a) the training thread ---------------------------------------------------------------------------------------


def training_thread(effort: Effort) -> list[Row]:
    """Everything side by side on a CPU step: processes with telemetry and with TraceML take turns."""
    ours, theirs = Pool(), Pool()
    try:
        interpreter = traceml.ENVIRONMENT.python(install=effort.install_traceml)
    except ToolError as error:
        interpreter, theirs.missing = None, str(error)
    for _ in range(effort.processes):
        for pool in random.sample((ours, theirs), 2):
            if pool is ours:
                pool.add(lambda: child.run("benchmarks.instruments", effort.loops()))
            elif interpreter is not None:
                pool.add(lambda: traceml.run(interpreter, effort.loops()))
    return [
        *_loop_rows(_HOT, "hot", ours, theirs, limit=0.8),
        *_loop_rows(_COLD, "cold", ours, theirs, limit=6.0),
        *_whole_rows(ours, theirs),
    ]


def _loop_rows(section: str, loop: str, ours: Pool, theirs: Pool, *, limit: float) -> list[Row]:
    where = "the whole loop" if loop == "hot" else "next() and an optimizer's hooks"
    rows = [
        Row(section, f"bare: {where}", "us", ours.plain(loop, BARE), note=ours.missing),
        Row(section, "floor adds: two stamps, stored in an array", "us", ours.added(loop, FLOOR)),
        Row(section, "floor adds: two stamps, stored in a list", "us", ours.added(loop, FLOOR_LIST)),
        Row(section, "telemetry adds", "us", ours.added(loop, TELEMETRY), Target(AT_MOST, limit), _health(ours)),
    ]
    if loop == "hot":
        rows.append(Row(section, "  of which in next()", "us", ours.added(loop, NEXT_ONLY)))
    else:
        rows += [
            Row(section, "  of which in next()", "us", ours.added(loop, TELEMETRY, "next")),
            Row(section, "  of which in the optimizer hook", "us", ours.added(loop, TELEMETRY, "optimizer")),
        ]
    note = "a counter and two histograms"
    rows.append(Row(section, "prometheus_client on every step adds", "us", ours.added(loop, PROMETHEUS), note=note))
    added = theirs.added(loop, traceml.TRACEML)
    name = f"TraceML {traceml.VERSION}"
    rows.append(Row(section, f"{name} adds", "us", added, note=theirs.missing))
    ratio = _ratio(theirs.differences(loop, traceml.TRACEML), ours.differences(loop, TELEMETRY))
    rows.append(Row(section, f"{name} / telemetry", "x", ratio, Target(AT_LEAST, 30.0), theirs.missing))
    return rows


def _whole_rows(ours: Pool, theirs: Pool) -> list[Row]:
    """The same steps from end to end. This is noisier, but includes everything."""
    note = "noise of the whole step included"
    rows = [Row(_COLD, "bare: the whole step", "us", ours.plain("cold", BARE, "whole"))]
    rows.append(Row(_COLD, "telemetry adds to the whole step", "us", ours.added("cold", TELEMETRY, "whole"), note=note))
    whole = theirs.added("cold", traceml.TRACEML, "whole")
    name = f"TraceML {traceml.VERSION} adds to the whole step"
    rows.append(Row(_COLD, name, "us", whole, note=theirs.missing or note))
    return rows


def _ratio(above: Sequence[float], below: Sequence[float]) -> Spread | None:
    if not above or not below or statistics.median(below) <= 0:
        return None
    return ratio_of_medians(above, below)


def _health(pool: Pool) -> str:
    """Whether the agent worked during the measurement."""
    if not pool.answers:
        return pool.missing
    broken = [a for a in pool.answers if not a["running"] or a["hook_errors"] or not a["steps"]]
    dropped = sum(answer["dropped_steps"] for answer in pool.answers)
    state = "AGENT DID NOT WORK" if broken else f"{sum(a['steps'] for a in pool.answers)} steps seen by the agent"
    return f"{state}, {dropped} dropped" if dropped else state


def gpu(effort: Effort) -> list[Row]:
    """The same on a GPU, where waits are timed with events. Means, because only some steps record events."""
    import torch

    name, target = "telemetry adds (mean of all steps)", Target(AT_MOST, 15.0)
    rows = _stand_in(effort)
    if not torch.cuda.is_available():
        return [Row(_GPU, name, "us", None, target, "no CUDA device here"), *rows]
    pool = Pool()
    for _ in range(effort.processes):
        pool.add(lambda: child.run("benchmarks.instruments", effort.loops() | {"device": "cuda", "hot_rounds": 0}))
    pairs = sum(answer["gpu_pairs"] or 0 for answer in pool.answers)
    note = f"{pairs} pairs of events read" if pool.answers else pool.missing
    return [
        Row(_GPU, "bare: next() and an optimizer's hooks", "us", pool.plain("cold", BARE)),
        Row(_GPU, name, "us", pool.added("cold", TELEMETRY), target, note),
        Row(_GPU, "telemetry adds to the dearest step of a block", "us", pool.added("cold", TELEMETRY, "peak")),
        *rows,
    ]


def _stand_in(effort: Effort) -> list[Row]:
    """Steps whose wait is not timed, beside the same steps without a device. Processes take turns."""
    device, none = Pool(), Pool()
    for _ in range(effort.processes):
        for pool, name in random.sample(((device, STAND_IN), (none, "cpu")), 2):
            loops = effort.loops() | {"device": name, "hot_rounds": 0}
            pool.add(functools.partial(child.run, "benchmarks.instruments", loops))
    pairs = sum(answer["gpu_pairs"] or 0 for answer in device.answers)
    note = f"{_health(device)}; {pairs} pairs of events read"
    name = "telemetry adds to a step whose wait is not timed, with stand-ins for CUDA"
    return [
        Row(_GPU, name, "us", device.added("cold", TELEMETRY), Target(AT_MOST, 4.0), note),
        Row(_GPU, "  the same without a device", "us", none.added("cold", TELEMETRY), note=none.missing),
    ]


def worker_fetches(effort: Effort) -> list[Row]:
    """What the probe adds in a worker."""
    pool = Pool()
    rounds = {"hot_rounds": effort.hot_rounds, "cold_rounds": 4 * effort.cold_rounds}
    pool.add(lambda: child.run("benchmarks.worker_fetch", rounds))
    rows = []
    for kind, name in (("hot", "hot, nothing else is done"), ("cold", "cold, after a convolution of an image")):
        taken = pool.answers[0][kind] if pool.answers else {}
        floor, added = (spread(taken[what]).scaled(US) if taken else None for what in ("floor", "timed"))
        note = f"{pool.answers[0]['fetches']} fetches counted" if pool.answers else pool.missing
        rows += [
            Row(_FETCH, f"{name}: floor adds: two stamps, stored in shared memory", "us", floor),
            Row(_FETCH, f"{name}: telemetry adds", "us", added, Target(BELOW, 5.0) if kind == "hot" else None, note),
        ]
    return rows


# -- (b) memory, (c) scrapes ------------------------------------------------------------------------------------------


def memory(effort: Effort) -> list[Row]:
    """Resident memory added at the start, and by a million steps."""
    rows, starts = [], _pairs("benchmarks.memory", effort.memory_pairs, {})
    for kind, target in (("rss", Target(AT_MOST, 20.0)), ("pss", None)):
        rows.append(_memory_row(f"added to torch at the start, {kind.upper()}", kind, starts, target))
    parameters = {"steps": effort.growth_steps, "warm_up": effort.growth_warm_up}
    growth = _pairs("benchmarks.memory", effort.growth_pairs, parameters)
    name = f"growth over {effort.growth_steps:,} steps, RSS, less that without the agent"
    note = "no snapshot is taken; half a byte a step is what the readings can tell from none"
    rows.append(_memory_row(name, "growth", growth, Target(BELOW, 0.5), note))
    return rows


def _pairs(module: str, count: int, parameters: dict[str, Any]) -> tuple[Pool, Pool]:
    """Run the same process with and without the agent, alternately."""
    pools = (Pool(), Pool())
    for _ in range(count):
        for agent in random.sample((True, False), 2):
            pools[not agent].add(functools.partial(child.run, module, parameters | {"agent": agent}))
    return pools


def _memory_row(name: str, kind: str, pools: tuple[Pool, Pool], target: Target | None, note: str = "") -> Row:
    with_agent, without = ([answer[kind] for answer in pool.answers] for pool in pools)
    if not with_agent or len(with_agent) != len(without):
        return Row(_MEMORY, name, "MiB", None, target, pools[0].missing or pools[1].missing)
    return Row(_MEMORY, name, "MiB", paired(with_agent, without), target, note)


def scrapes(effort: Effort) -> list[Row]:
    """The duration of a scrape, and its effect on the steps."""
    pool = Pool()
    parameters = {"pairs": effort.scrape_pairs, "segment_seconds": effort.segment_seconds, "hertz": 5.0}
    pool.add(lambda: child.run("benchmarks.scrape", parameters))
    if not pool.answers:
        return [Row(_SCRAPE, "GET /metrics", "ms", None, Target(BELOW, 5.0), pool.missing)]
    answer = pool.answers[0]
    latencies = answer["latencies"]
    size = f"{answer['samples']} samples, {answer['bytes'] / 1024:.0f} KiB, {answer['failed']} failed"
    during = [percentile(each["during"], 0.5) for each in answer["met"] if each["during"]]
    between = [percentile(each["between"], 0.5) for each in answer["met"] if each["during"]]
    under, above = Target(BELOW, 5.0), Target(BELOW, 1.0)
    return [
        Row(_SCRAPE, "GET /metrics", "ms", spread(latencies).scaled(MS), under, size),
        Row(_SCRAPE, "GET /metrics, 99th percentile", "ms", of_percentile(latencies, 0.99).scaled(MS), under),
        Row(_SCRAPE, "bare: a step, median", "ms", _reduced(answer["quiet"], statistics.median)),
        Row(_SCRAPE, "step longer by, 99.9th percentile", "ms", _longer(answer, lambda s: percentile(s, 0.999)), above),
        Row(_SCRAPE, "step longer by, worst of a segment", "ms", _longer(answer, max), above),
        Row(_SCRAPE, "steps met by a scrape longer by, median", "ms", paired(during, between).scaled(MS), above),
        _flood(effort),
    ]


def _flood(effort: Effort) -> Row:
    """How many times as long the steps take while clients scrape as often as no server of metrics does."""
    pool = Pool()
    parameters = {"pairs": effort.scrape_pairs, "segment_seconds": effort.segment_seconds, **scrape.FLOOD}
    pool.add(lambda: child.run("benchmarks.scrape", parameters))
    name, target = f"steps under {scrape.FLOOD['hertz']:.0f} scrapes a second", Target(AT_MOST, 1.3)
    if not pool.answers:
        return Row(_SCRAPE, name, "times as long", None, target, pool.missing)
    (answer,) = pool.answers
    slow, quiet = (of_groups(answer[kind], statistics.mean) for kind in ("scraped", "quiet"))
    times = ratio_of_medians(slow, quiet)
    answered = len(answer["latencies"]) / (effort.scrape_pairs * effort.segment_seconds)
    return Row(_SCRAPE, name, "times as long", times, target, f"{answered:.0f} a second are answered, the others wait")


def _reduced(groups: Sequence[Sequence[float]], reduce: Callable[[Sequence[float]], float]) -> Spread:
    return spread(of_groups(groups, reduce)).scaled(MS)


def _longer(answer: dict[str, Any], reduce: Callable[[Sequence[float]], float]) -> Spread:
    """How much longer, by some measure, the steps of a scraped segment are than those of the quiet one next to it."""
    return paired(of_groups(answer["scraped"], reduce), of_groups(answer["quiet"], reduce)).scaled(MS)


# -- (d) the agent's own threads, and how much longer they make the longest steps ------------------------------------


def agent_threads(effort: Effort) -> list[Row]:
    """CPU of the agent's threads and of TraceML's, in the first minute and later. Processes with each take turns."""
    ours, theirs = Pool(), Pool()
    try:
        interpreter = traceml.ENVIRONMENT.python(install=effort.install_traceml)
    except ToolError as error:
        interpreter, theirs.missing = None, str(error)
    parameters: dict[str, Any] = {
        "slices": effort.cpu_slices, "workers": _WORKERS, "first": effort.first_seconds,
        "scrape_seconds": effort.scrape_seconds,
    }  # fmt: skip
    for _ in range(effort.life_processes):
        for pool in random.sample((ours, theirs), 2):
            if pool is ours:
                life = parameters | {"settle": effort.calm_seconds}
                pool.add(functools.partial(child.run, "benchmarks.agent_cpu", life, "life"))
            elif interpreter is not None:
                pool.add(functools.partial(traceml.run, interpreter, parameters, "agent_cpu.measure_traceml"))
    rare, target = f"one scrape in {effort.scrape_seconds:.0f} s", Target(AT_MOST, 0.25)
    name = f"CPU with {_WORKERS} DataLoader workers, {rare}, calm (after 5 minutes)"
    traceml_name = f"TraceML {traceml.VERSION}: "
    return [
        _threads_row(name, ours, "slices", target),
        _threads_row("the same with one scrape a second", ours, "often"),
        _threads_row(f"in the first minute, {rare}", ours, "first"),
        _threads_row(f"{traceml_name}its threads in the training process", theirs, "slices"),
        _threads_row(f"{traceml_name}the same in the first minute", theirs, "first"),
        _threads_row(f"{traceml_name}with its launcher and the process that collects", theirs, "slices", but=()),
        _threads_ratio(f"telemetry / TraceML {traceml.VERSION}, calm", ours, theirs, (BESIDE,)),
        _threads_ratio(f"telemetry / TraceML {traceml.VERSION}, calm, all processes", ours, theirs, ()),
    ]


def _threads_row(
    name: str, pool: Pool, when: str, target: Target | None = None, but: Collection[str] = (BESIDE,)
) -> Row:
    shares = _shares(pool, when, but)
    note = pool.missing or _by_thread(pool, when)
    return Row(_THREADS, name, _UNIT, spread(shares) if shares else None, target, note)


def _threads_ratio(name: str, ours: Pool, theirs: Pool, but: Collection[str]) -> Row:
    mine, other = _shares(ours, "slices", but), _shares(theirs, "slices", but)
    ratio = ratio_of_medians(mine, other) if mine and other else None
    return Row(_THREADS, name, "x", ratio, Target(BELOW, 1.0), theirs.missing)


def _readings(pool: Pool, when: str) -> list[dict[str, float]]:
    found = [answer[when] for answer in pool.answers]
    return [reading for each in found for reading in (each if isinstance(each, list) else [each])]


def _shares(pool: Pool, when: str, but: Collection[str] = (BESIDE,)) -> list[float]:
    """Percent of a core in each reading."""
    return [100 * sum(used for name, used in each.items() if name not in but) for each in _readings(pool, when)]


def _by_thread(pool: Pool, when: str) -> str:
    readings = _readings(pool, when)
    names = sorted({name for reading in readings for name in reading})
    medians = {name: 100 * statistics.median(reading.get(name, 0.0) for reading in readings) for name in names}
    return ", ".join(f"{name} {median:.2f} %" for name, median in medians.items())


def node(effort: Effort) -> list[Row]:
    """All ranks of a node together."""
    name = f"a node with {_RANKS} ranks, {_RANK_WORKERS} workers each: all of them together"
    pool = Pool()
    parameters = {"ranks": _RANKS, "workers": _RANK_WORKERS, "slices": effort.cpu_slices}
    pool.add(lambda: child.run("benchmarks.agent_cpu", parameters, "node"))
    if not pool.answers:
        return [Row(_THREADS, name, _UNIT, None, note=pool.missing)]
    slices = pool.answers[0]["slices"]
    *others, most = sorted(statistics.median(100 * reading[rank] for reading in slices) for rank in range(_RANKS))
    note = f"the rank that serves, which takes most, {most:.2f} %; the others {others[0]:.2f} to {others[-1]:.2f} %"
    return [Row(_THREADS, name, _UNIT, spread([100 * sum(reading) for reading in slices]), note=note)]


def tail(effort: Effort) -> list[Row]:
    """How much longer the longest steps take with the agent."""
    pool = Pool()
    pool.add(
        lambda: child.run(
            "benchmarks.tail", {"pairs": effort.tail_pairs, "segment_seconds": 2 * effort.segment_seconds}
        )
    )
    answer = pool.answers[0] if pool.answers else {"bare": [], "agent": []}

    def of(kind: str, name: str, factor: float = MS) -> Spread | None:
        return spread([each[name] for each in answer[kind]]).scaled(factor) if answer[kind] else None

    def longer(name: str) -> Spread | None:
        values = [[each[name] for each in answer[kind]] for kind in ("agent", "bare")]
        return paired(*values).scaled(MS) if answer["agent"] else None

    per_second = "ms in every second"
    return [
        Row(_TAIL, "bare: a step, median", "us", of("bare", "p50", US), note=pool.missing),
        Row(_TAIL, "bare: 99.99th percentile", "ms", of("bare", "p99.99")),
        Row(_TAIL, "bare: the longest of a segment", "ms", of("bare", "max")),
        Row(_TAIL, "longer by, 99.9th percentile", "ms", longer("p99.9")),
        Row(_TAIL, "longer by, 99.99th percentile", "ms", longer("p99.99"), Target(AT_MOST, 0.7)),
        Row(_TAIL, "longer by, the longest of a segment", "ms", longer("max"), Target(AT_MOST, 3.0)),
        Row(_TAIL, "more time in steps longer than 1 ms", per_second, longer("long")),
        Row(_TAIL, "bare: waits for the GIL in steps over 0.15 ms", per_second, of("bare", "gil")),
        Row(_TAIL, "with the agent: the same", per_second, of("agent", "gil")),
        Row(_TAIL, "with the agent: the longest wait for the GIL", "ms", of("agent", "gil_max")),
    ]


# -- all of it -----------------------------------------------------------------------------------------------------

PARTS: Final[dict[str, Callable[[Effort], list[Row]]]] = {
    "steps": training_thread,
    "gpu": gpu,
    "fetch": worker_fetches,
    "threads": agent_threads,
    "sinks": sink_cost.sinks,
    "node": node,
    "tail": tail,
    "memory": memory,
    "scrape": scrapes,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write. Returns the exit code. It is 0 even if a target is missed, which is a result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test in under a minute")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part (may be repeated)")
    parser.add_argument("--again", action="store_true", help="put the parts of --only into the results of the full run")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(argv)
    effort = QUICK if options.quick else FULL
    about = machine.describe()
    rows: list[Row] = []
    started = time.monotonic()
    for name in options.only or PARTS:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        rows += PARTS[name](effort)
    about["effort"] = f"{effort.name}, {time.monotonic() - started:.0f} s"
    print(report.text(about, rows))
    if options.again and options.only and not options.quick:
        about, rows = report.replaced(options.output, machine.slug(about), about, rows)
        options.only = None
    partial = "quick-" if options.quick else "part-" if options.only else ""
    for path in report.write(options.output, partial + machine.slug(about), about, rows):
        print(f"written: {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
