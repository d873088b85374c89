"""Writes the reference pages, or their generated parts, from the code: ``make docs-reference``.

METRICS.md comes from the table of metrics, settings.md from the fields of `telemetry.Config`, the figures of
integrations.md from `telemetry.sinks.figures`, the fields of output.md from what the log writes, and the tables of
overhead.md from the results of the benchmark. The text around the generated parts is written by hand, in the pages
themselves.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, structs

from telemetry.config import GROUPS, settings
from telemetry.diagnosis.endings import FAILURES
from telemetry.diagnosis.evidence import Evidence, evidence_field
from telemetry.diagnosis.findings import FINDINGS
from telemetry.model.records import RankPace, StallDetails, WorkersSample
from telemetry.node.metrics import NEVER, SECTIONS, metrics
from telemetry.sinks.figures import METRIC_FIGURES, STATE_FIGURES, WINDOW_FIGURES
from telemetry.sources.polling import mean_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.config import Setting
    from telemetry.node.metrics import Metric, MetricGroup

DOCS: Final = Path(__file__).resolve().parents[1]
BEGIN: Final = "<!-- begin generated: `make docs-reference` -->\n"
END: Final = "<!-- end generated -->\n"

OF_ALL_GPUS: Final = ("gpu", "uuid")
"""Labels of the metrics of GPUs; METRICS.md says so above its tables."""


def main() -> None:
    """Write every page anew."""
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")


def page(name: str) -> str:
    """The whole page, with its generated part made anew. Raises ValueError if it lacks the marks of that part."""
    text = (DOCS / name).read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/{name} lacks the marks of the generated part: {BEGIN}{END}")
    return f"{before}{BEGIN}\n{PAGES[name]()}\n{END}{after}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table. A ``|`` in a cell is escaped."""
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def meanings(rows: Iterable[tuple[str, str]]) -> str:
    """A Markdown list of names and what each means."""
    return "".join(f"- `{name}`: {meaning}\n" for name, meaning in rows)


# -- METRICS.md ------------------------------------------------------------------------------------------------------


def metrics_part() -> str:
    """One table a section, and one of the values of labels."""
    parts = []
    for title, groups in SECTIONS.items():
        rows = [(group, metric) for group in groups for metric in group.metrics]
        absent = [group.absent if metric.absent is None else metric.absent for group, metric in rows]
        said = [
            "" if text == NEVER else "as above" if text == above else text
            for text, above in zip(absent, ["", *absent], strict=False)
        ]
        cells = [(*_metric(group, metric), text) for (group, metric), text in zip(rows, said, strict=True)]
        parts.append(f"## {title}\n\n{table(('Name', 'Meaning', 'Absent'), cells)}")
    users: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for _, metric in metrics():
        if metric.label is not None and metric.label.values:
            users.setdefault((metric.label.name, metric.label.values), []).append(metric.name)
    values = [(f"`{label}`", _names(names), _names(values)) for (label, values), names in users.items()]
    parts.append(f"## Label values\n\n{table(('Label', 'Of', 'Values'), values)}")
    return "\n".join(parts)


def _metric(group: MetricGroup[Any], metric: Metric[Any]) -> tuple[str, ...]:
    labels = [label for label in group.labels if label not in OF_ALL_GPUS]
    if metric.label is not None:
        labels.append(metric.label.name)
    labelled = f"Label{'s' * (len(labels) > 1)} {_names(labels)}." if labels else ""
    return f"`{metric.name}`", " ".join(filter(None, (metric.help, labelled, metric.details)))


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# -- settings.md -----------------------------------------------------------------------------------------------------


def settings_part() -> str:
    """One table for each group of settings."""
    head = ("Setting", "Default", "Allowed", "Meaning")
    return "\n".join(
        f"## {group[0].capitalize()}\n\n{table(head, (_setting(each) for each in settings() if each.group == group))}"
        for group in GROUPS.values()
    )


def _setting(setting: Setting) -> tuple[str, ...]:
    unit = f" {setting.unit}" if setting.unit and setting.default is not None else ""
    return f"`{setting.name}`", f"{setting.default_text}{unit}", setting.allowed, setting.help


# -- integrations.md -------------------------------------------------------------------------------------------------


def figures_part() -> str:
    """The names of `telemetry.metrics`; what those of metrics mean stands in METRICS.md."""
    return (
        f"{meanings((figure.name, figure.help) for figure in (*WINDOW_FIGURES, *STATE_FIGURES))}\n"
        "Each [metric](METRICS.md) without a label of its own is there, too, by its name without `training_`: "
        f"`{METRIC_FIGURES[0].name}` and so on.\n"
    )


# -- output.md -------------------------------------------------------------------------------------------------------

EVIDENCE: Final = {
    "window_seconds": "length of the window",
    "steps": "steps that ended in the window",
    "batches_per_step": "batches of a step, mostly 1",
    "wait_seconds": "wait",
    "exposed_seconds": "exposed wait",
    "compute_seconds": "compute",
    "evaluation_seconds": "time in evaluations",
    "edges": "epoch boundaries: iterations that began",
    "iterations_left": "iterations that were left before their end",
    "edge_wait_seconds": "wait at epoch boundaries",
    "around_edges_seconds": "extra wait for the batches next to epoch boundaries",
    "edge_share": "share of the training loop in waits at epoch boundaries, if epochs are longer than a window",
    "first_fetch_seconds": "mean time of a worker's first fetch of an epoch",
    "worker_start_seconds": "mean time from the start of an iteration to that fetch",
    "first_fetch_ratio": "share of the wait at epoch boundaries because first fetches take longer than others",
    "checkpoint_seconds": "time to write checkpoints",
    "checkpoints": "steps with a checkpoint",
    "checkpoint_interval_seconds": "training time between the newest two checkpoints; 0 if the window has several",
    "early_checkpoint_seconds": "mean time of the run's first checkpoints",
    "around_checkpoints_seconds": "extra compute of steps with a checkpoint",
    "garbage_seconds": "garbage collection on the training thread",
    "garbage_wait_seconds": "its part in waits inside an epoch",
    "own_collections_ratio": "share of the full collections that the script itself started",
    "recompilations": "recompilations by torch.compile",
    "recompile_seconds": "their time",
    "recompiled_function": "the function with most of it",
    "recompiled_because": "the check that failed in the newest one, in torch's words",
    "edge_garbage_seconds": "its part in waits at epoch boundaries",
    "source": "where batches come from: `training_thread`, `workers`, `watched` or `read_ahead`",
    "settings": "settings of the loader, by DataLoader's names",
    "iterable_data": "whether the data set is an IterableDataset",
    "asks_for_its_worker": "whether it uses `get_worker_info`",
    "shuffled": "whether the order is random",
    "has_set_epoch": "whether the data set has `set_epoch()`",
    "one_by_one": "whether each sample has its own call of `__getitem__`",
    "batch_size": "samples of a batch",
    "own_collate": "whether code that is not of torch makes a batch of the samples",
    "sample_code": "file, line and name of the function that gives a sample",
    "read_by_thread": "whether another thread of the process reads a DataLoader",
    "iterated_at": "file, line and function that made the newest iterator",
    "own_fetch_cpu_ratio": "share of the training thread's own fetches on a core",
    "compute_parts": "share of each part of the compute",
    "where": "the line of your code in most samples of the training thread",
    "outlier_wait_seconds": "wait in single steps that waited much longer than their neighbours",
    "fetch_wait_seconds": "fetch wait",
    "transfer_wait_seconds": "transfer wait",
    "transfer_wait_long_fetch_seconds": "transfer wait while the worker was in an unusually long fetch",
    "head_of_line_seconds": "fetch wait with head-of-line blocking",
    "blocking_worker": "the worker with most of it",
    "transfer_seconds": "mean transfer time of a batch of an idle worker",
    "transfer_from_busy_seconds": "the same of a busy worker",
    "freeing_seconds": "mean time to free a batch on the training thread; part of the compute",
    "receiving_cpu_seconds": "mean CPU time to receive and unpickle a batch on the training thread",
    "ready_batches": "mean number of ready batches",
    "slack_seconds": "mean slack of a batch",
    "sampler_seconds": "time of the sampler in waits inside an epoch",
    "edge_sampler_seconds": "time of the sampler in waits at epoch boundaries",
    "edge_share_of_sampler": "the sampler's part of `edge_share`",
    "sampler_cpu_ratio": "share of the sampler's time on a core",
    "workers": "number of workers",
    "configured_workers": "`num_workers` of the loader",
    "empty_workers": "workers without items",
    "same_batches": "whether several workers gave the same batches",
    "worker_cores": "cores that the workers may use, if fewer than the rank may",
    "fetches": "fetches that ended in the window",
    "fetch_seconds": "mean time of a fetch",
    "fetch_cpu_seconds": "mean CPU time of a fetch",
    "longest_fetch_seconds": "upper bound of all fetches",
    "slowest_fetch_seconds": "mean time of a fetch of the slowest worker",
    "long_fetches": "fetches of more than a second: their time when last seen",
    "fetching_seconds": "time so far of the longest fetch in progress",
    "read_bytes": "read from storage by all workers",
    "written_bytes": "written by all workers, with pickled batches",
    "worker_busy_ratio": "share of the time in which a worker is busy",
    "worker_cpu_ratio": "running share of the time in fetches",
    "worker_runnable_ratio": "runnable share of it; null if unknown",
    "worker_blocked_ratio": "blocked share of it",
    "pickling_cores": "cores that the workers use for pickling",
    "cores": "cores that this rank may use and no other process uses",
    "cores_of_others": "cores that other processes use",
    "host_cpu_ratio": "CPU use of the machine",
    "process_cpu_per_step_seconds": "CPU time of the training process for a step, without workers",
    "own_cpu_seconds": "CPU time of the training thread",
    "own_runnable_seconds": "run-queue delay of the training thread",
    "throttled_ratio": "share of the periods in which the CPU quota (cgroup) was used up",
    "gpu_utilization_ratio": "share of the time with a kernel on the GPU",
    "gpu_idle_seconds": "time of the training loop without a kernel and without a wait",
    "gpu_slowed_seconds": "time lost because the GPU's clock was throttled",
    "paces": "the pace of this rank, then of those that it may wait for",
    "earlier_paces": "older paces of this rank, from the time of the others' paces",
}
"""What each field is that `evidence_field` writes. Its unit stands in its name."""

PACE: Final = {
    "rank": "the rank",
    "seconds": "length of its window",
    "steps": "steps that ended in it",
    "compute_seconds": "seconds of compute in it",
    "exposed_wait_seconds": "seconds of exposed wait in it",
    "away_seconds": "seconds in it that are neither wait nor compute",
    "stack_samples": "samples of the training thread while it computed",
    "in_sync_samples": "those of them in calls in which ranks wait for one another",
    "on_gpu": "whether it trains on a GPU",
    "cause": "the cause of its open stall",
    "where": "the line of your code in most samples, outside of calls in which ranks wait",
    "phase": "its phase: an evaluation, a checkpoint, or a debugger that paused it",
    "seconds_without_step": "seconds since its newest step",
    "waits_for_ranks": "whether it spent them in calls in which ranks wait for one another",
    "gpu_busy_ratio": "share of the time with a kernel on its GPU",
    "last_step": "steps of the run so far",
    "away_in": "the category of the ledger with most of `away_seconds`",
    "core_wait_seconds": "seconds of run-queue delay of its training thread",
    "cores_busy_ratio": "CPU use of its machine",
    "node": "its node, if it is another one",
}
"""What each field of an entry of ``paces`` is."""

STALL: Final = {
    "lost_seconds": "what each cause has cost in the stall so far",
    "share_ratio": "the share of the first cause, if others cost about as much",
    "also": "these other causes: `cause`, `share_ratio`, `advice`",
    "straggler_rank": "the straggler",
    "straggler_node": "its node",
    "straggler_reason": "why it is slow",
    "stuck_for_seconds": "in a hang: time without progress",
    "stuck_in": "in a hang: the training thread's category of the ledger",
    "stuck_at": "in a hang: the innermost frames of the training thread",
    "worker_at": "in a hang: the line of the worker whose fetch takes longest",
    "stacks": "in a hang: the stacks of all threads and workers",
    "lines": "the lines in which the time was spent",
    "lines_of": "of what these are shares",
    "line_samples": "number of samples",
    "line_verdict": "a sentence on the first line",
}
"""Fields that only some stalls have."""

WORKERS: Final = {
    "workers": EVIDENCE["workers"],
    "training_workers": "those that give training batches",
    "resident_memory_bytes": "resident memory of all workers",
    "ready_batches": EVIDENCE["ready_batches"],
    "fetching_seconds": EVIDENCE["fetching_seconds"],
    "fetches_total": "fetches so far",
    "cpu_ratio": "running share of the time, in a fetch",
    "busy_ratio": EVIDENCE["worker_busy_ratio"],
    "runnable_ratio": "runnable share of it",
    "blocked_ratio": "blocked share of it; the three add up to `busy_ratio`",
    "read_bytes_per_second": "read from storage by all workers",
    "slack_seconds": EVIDENCE["slack_seconds"],
    "fetch_wait_seconds_total": "fetch wait so far",
    "transfer_wait_seconds_total": "transfer wait so far",
    "head_of_line_seconds_total": "fetch wait so far with head-of-line blocking",
    "matched_total": "batches so far that were matched with their fetch",
    "from_busy_total": "those of them whose worker was busy during the transfer",
    "transfer_wait_busy_worker_seconds_total": "transfer wait so far for these",
    "transfer_wait_long_fetch_seconds_total": "its part with the worker in an unusually long fetch",
    "head_of_line_batches": "finished batches that wait behind one that is not finished",
    "head_of_line_worker": "the worker that fetches that one",
    "head_of_line_since_seconds": "how long that fetch has taken",
    "written_bytes_per_second": "written by all workers, with pickled batches",
    "allowed_cores": "cores that the training workers may use",
    "pickling_ratio": "share of the time in which a worker pickles",
}
"""What each field of the event ``workers`` is."""


def fields_part() -> str:
    """The lists of fields. Raises ValueError for a field without a meaning, and for a meaning without a field."""
    evidence = written_evidence()
    parts = (
        ("Of a window", list(evidence), EVIDENCE),
        ("Of a pace", list(evidence["paces"][0]), PACE),
        ("Of some stalls", list(StallDetails.__struct_fields__), STALL),
        ("Of the event `workers`", written_workers(), WORKERS),
    )
    for title, names, known in parts:
        if set(names) != set(known):
            raise ValueError(
                f"{title}: these fields need a meaning, or are no longer written: {set(names) ^ set(known)}"
            )
    fields = [f"### {title}\n\n{meanings((name, known[name]) for name in names)}" for title, names, known in parts]
    kinds = meanings(FINDINGS.items())
    failures = meanings((name, each.means) for name, each in FAILURES.items())
    return "\n".join([*fields, f"### Kinds of findings\n\n{kinds}", f"### Failures\n\n{failures}"])


def written_evidence() -> dict[str, Any]:
    """The field ``evidence`` of a stall in which everything was measured."""
    pace = RankPace(**dict.fromkeys(RankPace.__struct_fields__, 1))
    values: dict[str, Any] = {}
    for spec in structs.fields(Evidence):
        part = spec.type if isinstance(spec.default, Struct) else None
        values[spec.name] = 1 if part is None else part(**dict.fromkeys(part.__struct_fields__, 1))
    paces = {"pace": pace, "peers": (pace,), "earlier_paces": (pace,)}
    evidence = Evidence(**values | paces)
    return evidence_field(structs.replace(evidence, long_fetches=(1.0,)))


def written_workers() -> list[str]:
    """The fields of the event ``workers``."""
    return list(mean_of([_filled(WorkersSample, deliveries=WorkersSample.__dataclass_fields__["deliveries"].default)]))


def _filled(kind: Any, **values: Any) -> Any:
    return kind(**{spec.name: 1 for spec in dataclasses.fields(kind)} | values)


# -- overhead.md -----------------------------------------------------------------------------------------------------

RESULTS: Final = DOCS.parent / "benchmarks" / "results" / "overhead-amd-epyc-2-cores.json"

STEPS: Final = {
    "the floor: two stamps and a store": "floor adds: two stamps, stored in a list",
    "**telemetry**, everything on": "telemetry adds",
    "prometheus_client: a counter and two histograms": "prometheus_client",
    "TraceML 0.5.0": "TraceML 0.5.0 adds",
}
"""Rows of the first table, and how the measured ones begin: hot and cold."""

ELSEWHERE: Final = {
    "the agent's threads after five minutes, 8 DataLoader workers, one scrape in 15 s": (
        "The agent's own threads",
        "CPU with 8",
    ),
    "the same with one scrape a second": ("The agent's own threads", "the same with one scrape a second"),
    "the same in the first minute of a run": ("The agent's own threads", "in the first minute"),
    "a node of 8 ranks with 2 workers each, all agents together": ("The agent's own threads", "a node with 8 ranks"),
    "the three [sinks](integrations.md#sinks), a row every 10 s": ("The sinks", "all on: more by"),
    "a fetch in a DataLoader worker, hot": ("Per fetch", "hot, nothing else is done: telemetry adds"),
    "the same after a convolution of an image": ("Per fetch", "cold, after a convolution of an image: telemetry adds"),
    "resident memory at the start": ("Memory", "added to torch at the start, RSS"),
    "growth over a million steps": ("Memory", "growth over 1,000,000 steps"),
    "`GET /metrics` of a node with 8 ranks": ("A scrape of a node of 8 ranks", "GET /metrics"),
    "a step during a scrape is longer by": ("A scrape of a node of 8 ranks", "steps met by a scrape longer by"),
    "the 99.99th percentile of steps of 40 µs is longer by": (
        "The longest of many steps",
        "longer by, 99.99th percentile",
    ),
}
"""Rows of the second table, and how the section and the name of the measured ones begin."""


def overhead_part() -> str:
    """What the agent costs on the training thread, and elsewhere."""
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]

    def cost(section: str, name: str) -> str:
        row = next(r for r in measured if r["section"].startswith(section) and r["name"].startswith(name))
        median, low, high = (_two_digits(row[key]) for key in ("median", "p10", "p90"))
        return f"{median} {row['unit'].replace('us', 'µs')} ({low} to {high})"

    kinds = ("Per step on the training thread, hot", "Per step on the training thread, cold")
    steps = ((title, *(cost(kind, name) for kind in kinds)) for title, name in STEPS.items())
    elsewhere = ((title, cost(*row)) for title, row in ELSEWHERE.items())
    return f"{table(('Added to a step', 'Hot', 'Cold'), steps)}\n{table(('Elsewhere', 'Cost'), elsewhere)}"


def _two_digits(figure: float) -> str:
    return f"{figure:.0f}" if abs(figure) >= 10 else f"{figure:.1f}" if abs(figure) >= 1 else f"{figure:.2g}"


PAGES: Final[dict[str, Callable[[], str]]] = {
    "METRICS.md": metrics_part,
    "settings.md": settings_part,
    "integrations.md": figures_part,
    "output.md": fields_part,
    "overhead.md": overhead_part,
}
"""What makes the generated part of each page."""


if __name__ == "__main__":
    main()
