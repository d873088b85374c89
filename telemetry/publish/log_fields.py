"""Records as the fields of a log line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from telemetry.core.log_kind import LOG_KIND
from telemetry.records import Deliveries

if TYPE_CHECKING:
    from telemetry.records import Percentiles, PhaseSpan, Totals


def rounded(value: Any, digits: int = 6) -> Any:
    """Round floats to microseconds. More digits are noise, and would make the log of a long run larger."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    return value


def percentiles(value: Percentiles | None) -> dict[str, float] | None:
    """``{"p50", "p95", "p99", "max"}``; None if nothing was counted."""
    return None if value is None else rounded(asdict(value))


def mean_of(samples: Sequence[Any]) -> dict[str, Any]:
    """One set of fields for the samples of an interval. Each field's kind decides, see `telemetry.core.log_kind`.

    A number is null if no sample has it. If some samples have it, it is their mean.
    """
    newest = samples[-1]
    merged: dict[str, Any] = {}
    for spec in fields(newest):
        kind = spec.metadata.get(LOG_KIND)
        values = [v for s in samples if (v := getattr(s, spec.name)) is not None]
        last = values[-1] if values and kind == "newest" else getattr(newest, spec.name)
        if kind == "skip":
            continue
        if isinstance(last, Deliveries):
            merged |= rounded(_deliveries(last))
        elif kind != "newest" and values and all(map(_is_number, values)):
            mean = sum(values) / len(values)
            merged[spec.name] = round(mean) if isinstance(values[-1], int) else rounded(mean)
        else:
            merged[spec.name] = list(last) if isinstance(last, tuple) else rounded(last)
    if "pickling_ratio" in merged:
        merged["packing_ratio"] = merged.pop("pickling_ratio")
    return merged


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _deliveries(total: Deliveries) -> dict[str, float]:
    """Sums over the run. The waits have the names of their metrics; the other names are older than the record's."""
    return {
        "fetch_wait_seconds_total": total.fetch_wait_seconds,
        "transfer_wait_seconds_total": total.transfer_wait_seconds,
        "head_of_line_seconds_total": total.head_of_line_wait_seconds,
        "matched_total": total.batches,
        "from_busy_total": total.from_busy,
        "transfer_wait_busy_worker_seconds_total": total.transfer_wait_busy_worker_seconds,
        "transfer_wait_long_fetch_seconds_total": total.transfer_wait_long_fetch_seconds,
    }


def cpu_seconds(totals: Totals) -> dict[str, float] | None:
    """CPU seconds by who used them, while the training loop ran; None before the first are known.

    ``used``: the process and its workers. ``others``: everyone else on the machine, other ranks too. ``known``: the
    wall clock over which these two were measured. ``thread``: the training thread, over its whole life, and
    ``thread_delay``: its run-queue delay. ``worker``, ``worker_delay``: of the mean worker.
    """
    cpu, workers = totals.sampled.cpu, totals.sampled.workers
    if cpu.other_cores.known is None or cpu.used_cores.known is None:
        return None
    told = {"used": cpu.used_cores.known, "others": cpu.other_cores.known, "known": cpu.other_cores.seconds}
    if totals.run_queue_delay_seconds is not None and totals.thread_cpu_seconds is not None:
        told |= {"thread": totals.thread_cpu_seconds, "thread_delay": totals.run_queue_delay_seconds}
    if workers.cpu_seconds > 0:  # the kernel tells running from run-queue delay
        told |= {"worker": workers.cpu_seconds, "worker_delay": workers.runnable_seconds}
    return told


def phase(span: PhaseSpan, started: str) -> dict[str, Any]:
    """The fields of an evaluation, checkpoint or named phase that has ended."""
    return {
        "name": span.name,
        "category": span.category,
        "started": started,
        "seconds": rounded(span.seconds),
    }
