"""Rows on the agent's background work: CPU time of its threads, and how much longer it makes the longest steps."""

from __future__ import annotations

import functools
import random
import statistics
from typing import TYPE_CHECKING, Any, Final

from benchmarks import child, traceml
from benchmarks.agent_cpu import BESIDE
from benchmarks.effort import MS, US, Effort, Pool
from benchmarks.report import AT_MOST, BELOW, Row, Target
from benchmarks.spread import Spread, paired, ratio_of_medians, spread
from benchmarks.tail import STEP_US
from benchmarks.tool_environment import ToolError

if TYPE_CHECKING:
    from collections.abc import Collection

_THREADS: Final = "The agent's own threads"
_TAIL: Final = f"The longest of many steps of {STEP_US:.0f} us, 8 DataLoader workers and one scrape a second"
_WORKERS: Final = 8
_RANKS: Final = 8
_RANK_WORKERS: Final = 2
_UNIT: Final = "% of a core"


def agent_threads(effort: Effort) -> list[Row]:
    """CPU of the agent's threads and of TraceML's. Processes with each take turns."""
    ours, theirs = Pool(), Pool()
    try:
        interpreter = traceml.ENVIRONMENT.python(install=effort.install_traceml)
    except ToolError as error:
        interpreter, theirs.missing = None, str(error)
    parameters: dict[str, Any] = {"slices": effort.cpu_slices, "workers": _WORKERS}
    for _ in range(effort.cpu_processes):
        for pool in random.sample((ours, theirs), 2):
            if pool is ours:
                pool.add(lambda: child.run("benchmarks.agent_cpu", parameters))
            elif interpreter is not None:
                there = functools.partial(traceml.run, interpreter, parameters, "agent_cpu.measure_traceml")
                pool.add(there)
    name, target = f"CPU at 1 Hz with {_WORKERS} DataLoader workers, one scrape a second", Target(AT_MOST, 0.25)
    mine, other = _shares(ours), _shares(theirs)
    rows = [Row(_THREADS, name, _UNIT, spread(mine) if mine else None, target, ours.missing or _by_thread(ours))]
    traceml_name, note = f"TraceML {traceml.VERSION}: the same, ", theirs.missing or _by_thread(theirs)
    threads_name = f"{traceml_name}its threads in the training process"
    rows.append(Row(_THREADS, threads_name, _UNIT, spread(other) if other else None, note=note))
    everything = _shares(theirs, but=())
    note = "with its launcher and the process that collects"
    rows.append(Row(_THREADS, f"{traceml_name}all of it", _UNIT, spread(everything) if everything else None, note=note))
    ratio = ratio_of_medians(mine, other) if mine and other else None
    rows.append(Row(_THREADS, f"telemetry / TraceML {traceml.VERSION}", "x", ratio, Target(BELOW, 1.0), theirs.missing))
    return rows


def _shares(pool: Pool, but: Collection[str] = (BESIDE,)) -> list[float]:
    """Percent of a core in each slice."""
    readings = [reading for answer in pool.answers for reading in answer["slices"]]
    return [100 * sum(used for name, used in reading.items() if name not in but) for reading in readings]


def _by_thread(pool: Pool) -> str:
    readings = [reading for answer in pool.answers for reading in answer["slices"]]
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
    ranks = [statistics.median(100 * reading[rank] for reading in slices) for rank in range(_RANKS)]
    note = f"rank 0, which serves, {ranks[0]:.2f} %; the others {min(ranks[1:]):.2f} to {max(ranks[1:]):.2f} %"
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
