"""A window of slices, added up: what the causes are named from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.records import Slice


@dataclass(frozen=True, slots=True)
class Evidence:
    """One rank over one window. Sums are seconds; what nothing told is None.

    Attributes:
        loop: wait and compute, the time of the training loop.
        fetch_seconds: mean time of a worker for one batch; ``fetch_cpu_seconds`` of it on a core.
        cpu_share, runnable_share, blocked_share: of the time the workers spent in fetches.
        ready_batches: mean number of batches that lay ready.
        stuck_seconds: the longest time a fetch was seen in progress.
        process_cpu_per_step: CPU time of the training process (without its workers) for one step.
    """

    seconds: float
    steps: int
    wait: float
    exposed: float | None
    edge_wait: float
    edges: int
    late_wait: float
    compute: float
    evaluation: float
    checkpoint: float
    garbage: float
    source: str | None
    workers: int
    fetches: int | None
    fetch_seconds: float | None
    fetch_cpu_seconds: float | None
    busy_ratio: float | None
    cpu_share: float | None
    runnable_share: float | None
    blocked_share: float | None
    ready_batches: float | None
    stuck_seconds: float
    process_cpu_per_step: float | None
    cores: float
    throttled_ratio: float | None
    gpu_utilization_ratio: float | None
    gpu_throttled_ratio: float
    settings: dict[str, Any]

    @property
    def loop(self) -> float:
        """Seconds of the training loop."""
        return self.wait + self.compute

    def as_log_field(self) -> dict[str, Any]:
        """The figures that are there, with unit suffixes, for the log."""
        seconds = ("wait", "exposed", "edge_wait", "late_wait", "compute", "checkpoint", "garbage")
        plain = (
            "steps", "source", "workers", "edges", "fetch_seconds", "fetch_cpu_seconds", "ready_batches",
            "stuck_seconds", "cores", "settings",
        )  # fmt: skip
        ratios = ("busy_ratio", "throttled_ratio", "gpu_utilization_ratio")
        shares = ("cpu_share", "runnable_share", "blocked_share")
        field = {f"{name}_seconds": getattr(self, name) for name in seconds}
        field |= {name: getattr(self, name) for name in (*plain, *ratios)}
        field |= {f"worker_{name.removesuffix('_share')}_ratio": getattr(self, name) for name in shares}
        field["window_seconds"] = self.seconds
        return {name: round(v, 6) if isinstance(v, float) else v for name, v in field.items() if v is not None}


def gather(slices: Sequence[Slice]) -> Evidence:
    """Add up a window. ``slices`` must not be empty."""
    newest = slices[-1]
    steps = sum(s.steps for s in slices)
    told = [s for s in slices if s.fetches is not None and s.fetch_busy is not None]  # not before the workers began
    fetches = sum(s.fetches or 0 for s in told)
    fetch = sum(s.fetch_busy or 0.0 for s in told) / fetches if fetches else None
    shares = _shares(slices)
    process_cpu = _all([s.process_cpu for s in slices])
    cpu_share = shares.get("cpu")
    return Evidence(
        seconds=sum(s.seconds for s in slices),
        steps=steps,
        wait=sum(s.wait for s in slices),
        exposed=_all([s.exposed for s in slices]),
        edge_wait=sum(s.edge_wait for s in slices),
        edges=sum(s.edges for s in slices),
        late_wait=sum(s.late_wait for s in slices),
        compute=sum(s.compute for s in slices),
        evaluation=sum(s.evaluation for s in slices),
        checkpoint=sum(s.checkpoint for s in slices),
        garbage=sum(s.garbage for s in slices),
        source=newest.source,
        workers=max((s.workers.training_workers for s in slices if s.workers is not None), default=0),
        fetches=fetches if told else None,
        fetch_seconds=fetch,
        fetch_cpu_seconds=fetch * cpu_share if fetch is not None and cpu_share is not None else None,
        busy_ratio=_mean([s.workers.busy_ratio for s in slices if s.workers is not None]),
        cpu_share=cpu_share,
        runnable_share=shares.get("runnable"),
        blocked_share=shares.get("blocked"),
        ready_batches=_mean([s.workers.ready_batches for s in slices if s.workers is not None]),
        stuck_seconds=max((s.workers.fetching_seconds for s in slices if s.workers is not None), default=0.0),
        process_cpu_per_step=process_cpu / steps if process_cpu is not None and steps else None,
        cores=newest.cores,
        throttled_ratio=_mean([s.throttled_ratio for s in slices]),
        gpu_utilization_ratio=_mean([s.gpu_utilization_ratio for s in slices]),
        gpu_throttled_ratio=sum(s.seconds for s in slices if s.gpu_throttled) / (sum(s.seconds for s in slices) or 1.0),
        settings=newest.settings,
    )


def _shares(slices: Sequence[Slice]) -> dict[str, float]:
    """Of the workers' time in fetches: running, runnable, blocked; empty where the kernel does not tell."""
    samples = [s.workers for s in slices if s.workers is not None and s.workers.blocked_ratio is not None]
    parts = {
        "cpu": sum(w.cpu_ratio or 0.0 for w in samples),
        "runnable": sum(w.runnable_ratio or 0.0 for w in samples),
        "blocked": sum(w.blocked_ratio or 0.0 for w in samples),
    }
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()} if total > 0 else {}


def _all(values: Sequence[float | None]) -> float | None:
    """The sum, None if any part of it is not known."""
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
