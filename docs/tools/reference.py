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

from telemetry.agent.collectors import mean_of
from telemetry.config import GROUPS, settings
from telemetry.diagnosis.evidence import Evidence, evidence_field
from telemetry.diagnosis.findings import FINDINGS
from telemetry.model.records import FAILURES, RankPace, WorkersSample
from telemetry.node.metrics import NEVER, SECTIONS, metrics
from telemetry.sinks.figures import METRIC_FIGURES, STATE_FIGURES, WINDOW_FIGURES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.config import Setting
    from telemetry.node.metrics import Metric, MetricGroup

DOCS: Final = Path(__file__).resolve().parents[1]
BEGIN: Final = "<!-- begin generated: `make docs-reference` -->\n"
END: Final = "<!-- end generated -->\n"


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
        parts.append(f"## {title}\n\n{table(('Name', 'Type', 'Labels', 'Meaning', 'Absent'), cells)}")
    users: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for _, metric in metrics():
        if metric.label is not None and metric.label.values:
            users.setdefault((metric.label.name, metric.label.values), []).append(metric.name)
    values = [(f"`{label}`", _names(names), _names(values)) for (label, values), names in users.items()]
    parts.append(f"## Label values\n\n{table(('Label', 'Of', 'Values'), values)}")
    return "\n".join(parts)


def _metric(group: MetricGroup[Any], metric: Metric[Any]) -> tuple[str, ...]:
    labels = ["node", *group.labels] if group.of_node else [*group.labels]
    if metric.label is not None:
        labels.append(metric.label.name)
    if metric.type == "histogram":
        labels.append("le")
    return f"`{metric.name}`", metric.type, _names(labels), f"{metric.help} {metric.details}".strip()


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
    rows = [(f"`{figure.name}`", figure.help) for figure in (*WINDOW_FIGURES, *STATE_FIGURES)]
    return (
        f"{table(('Name', 'Meaning'), rows)}\n"
        "Each [metric](METRICS.md) that has no labels of its own, by its name without `training_`: "
        f"{_names(figure.name for figure in METRIC_FIGURES)}.\n"
    )


# -- output.md -------------------------------------------------------------------------------------------------------

EVIDENCE: Final = {
    "window_seconds": "length of the window",
    "steps": "steps that ended in the window",
    "batches_per_step": "batches that a step takes, mostly 1",
    "wait_seconds": "wait in the window",
    "exposed_seconds": "exposed wait",
    "compute_seconds": "compute",
    "evaluation_seconds": "time in evaluations",
    "edges": "epoch boundaries: iterations that began",
    "iterations_left": "iterations that were left before their end",
    "edge_wait_seconds": "wait at epoch boundaries: end and start of an iteration, and its first batch",
    "around_edges_seconds": "how much longer than others the batches next to epoch boundaries were waited for",
    "edge_share": "share of the training loop in waits at epoch boundaries, if epochs are longer than a window",
    "first_fetch_seconds": "mean time of a worker's first fetch of an epoch",
    "worker_start_seconds": "mean time from the begin of an iteration until that fetch begins",
    "first_fetch_ratio": "share of the wait at epoch boundaries in which first fetches take longer than others",
    "checkpoint_seconds": "time to write checkpoints",
    "checkpoints": "steps with a checkpoint",
    "checkpoint_interval_seconds": "training time between the newest two checkpoints; 0 if the window has several",
    "early_checkpoint_seconds": "mean time of the first checkpoints of the run",
    "around_checkpoints_seconds": "how much longer the compute of steps with a checkpoint took than of others",
    "garbage_seconds": "garbage collection on the training thread",
    "garbage_wait_seconds": "its part in waits inside an epoch",
    "own_collections_ratio": "share of the collections of all objects that the script has started itself",
    "recompilations": "how often torch.compile has compiled functions again",
    "recompile_seconds": "time of these compilations",
    "recompiled_function": "the function that took most of it",
    "recompiled_because": "the check that failed in the newest one, as torch says it",
    "edge_garbage_seconds": "its part in waits at epoch boundaries",
    "source": "where batches come from: `training_thread`, `workers`, `watched` or `read_ahead`",
    "settings": "settings of the loader, by the names of DataLoader's arguments",
    "iterable_data": "whether the loader's data set is an IterableDataset",
    "asks_for_its_worker": "whether a function of that data set uses `get_worker_info`",
    "shuffled": "whether the batches come in random order",
    "has_set_epoch": "whether the data set has `set_epoch()`",
    "one_by_one": "whether each sample is fetched by a call of `__getitem__` of its own",
    "batch_size": "samples of a batch",
    "sample_code": "file, line and name of the function that gives a sample",
    "read_by_thread": "whether another thread of the training process reads a DataLoader",
    "iterated_at": "file, line and function in which the newest iterator was made",
    "own_fetch_cpu_ratio": "share of the training thread's own fetches that ran on a core",
    "compute_parts": "the share of each part of the compute",
    "where": "the line of your code in most samples of the training thread",
    "outlier_wait_seconds": "wait in single steps that waited much longer than the steps around them",
    "fetch_wait_seconds": "fetch wait",
    "transfer_wait_seconds": "transfer wait",
    "transfer_wait_long_fetch_seconds": "transfer wait while the worker was in an unusually long fetch",
    "head_of_line_seconds": "fetch wait with head-of-line blocking",
    "blocking_worker": "the worker that was waited for longest with head-of-line blocking",
    "transfer_seconds": "mean time to transfer a batch of a worker that is not busy",
    "transfer_from_busy_seconds": "mean time to transfer a batch of a busy worker",
    "freeing_seconds": "mean time of the training thread to free a batch; part of the compute",
    "receiving_cpu_seconds": "mean CPU time of the training thread to receive and unpickle a batch",
    "ready_batches": "mean number of ready batches in the result queues",
    "slack_seconds": "mean slack of a batch",
    "sampler_seconds": "time of DataLoader's sampler in waits inside an epoch",
    "edge_sampler_seconds": "time of DataLoader's sampler in waits at epoch boundaries",
    "edge_share_of_sampler": "the sampler's part of `edge_share`",
    "sampler_cpu_ratio": "share of the sampler's time on a core",
    "workers": "number of workers",
    "configured_workers": "`num_workers` of the loader; workers without items may have ended",
    "empty_workers": "workers to which the data set gives no item",
    "same_batches": "whether several workers have given the same batches",
    "worker_cores": "cores that the workers may use, if fewer than the rank may use",
    "fetches": "fetches that ended in the window",
    "fetch_seconds": "mean time of a fetch",
    "fetch_cpu_seconds": "mean CPU time of a fetch",
    "longest_fetch_seconds": "upper bound of all fetches",
    "slowest_fetch_seconds": "mean time of a fetch of the slowest worker",
    "long_fetches": "fetches of more than a second: how long each was in progress when last seen",
    "fetching_seconds": "duration so far of the longest fetch in progress",
    "read_bytes": "read from storage by all workers",
    "written_bytes": "written by all workers, with the pickled part of batches",
    "worker_busy_ratio": "share of the time in which a worker is busy",
    "worker_cpu_ratio": "share of the time in fetches in which a worker is running",
    "worker_runnable_ratio": "share of the time in fetches in which a worker is runnable; null if unknown",
    "worker_blocked_ratio": "share of the time in fetches in which a worker is blocked",
    "pickling_cores": "cores that the workers use outside of fetches, for pickling",
    "cores": "cores that this rank may use and no other process uses",
    "cores_of_others": "cores that other processes use",
    "host_cpu_ratio": "use of all cores of the machine",
    "process_cpu_per_step_seconds": "CPU time of the training process for a step, without its workers",
    "own_runnable_seconds": "run-queue delay of the training thread",
    "throttled_ratio": "share of the periods in which the cgroup's CPU quota was used up",
    "gpu_utilization_ratio": "share of the time in which the GPU ran a kernel",
    "gpu_idle_seconds": "time of the training loop without a kernel and without a wait",
    "gpu_slowed_seconds": "time lost because the GPU's clock was throttled",
    "paces": "the pace of this rank, and then those of the ranks that it may wait for",
    "earlier_paces": "paces of this rank at the time of older paces of the others",
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
    "in_sync_samples": "samples of these in calls in which ranks wait for one another",
    "on_gpu": "whether it trains on a GPU",
    "cause": "the cause of its open stall",
    "where": "the line of your code in most samples, outside of calls in which ranks wait",
    "phase": "the phase that it is in: an evaluation, a checkpoint, or a debugger that has paused it",
    "seconds_without_step": "seconds since its newest step",
    "waits_for_ranks": "whether it has spent this time in calls in which ranks wait for one another",
    "gpu_busy_ratio": "share of the time in which its GPU ran something",
    "last_step": "steps of the run that had ended at the end of the window",
    "away_in": "the category of the ledger with most of `away_seconds`",
    "core_wait_seconds": "seconds of run-queue delay of its training thread",
    "cores_busy_ratio": "use of all cores of its machine",
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
    "stuck_in": "in a hang: the category of the ledger that the training thread is in",
    "stuck_at": "in a hang: the innermost frames of the training thread",
    "worker_at": "in a hang: the line of the worker whose fetch takes longest",
    "lines": "the lines in which the time was spent",
    "lines_of": "of what these are shares",
    "line_samples": "number of samples",
    "line_verdict": "a sentence on the first line",
}
"""Fields that only some stalls have."""

WORKERS: Final = {
    "workers": EVIDENCE["workers"],
    "training_workers": "workers of loaders that give training batches",
    "resident_memory_bytes": "resident memory of all workers",
    "ready_batches": EVIDENCE["ready_batches"],
    "fetching_seconds": EVIDENCE["fetching_seconds"],
    "fetches_total": "fetches of the run so far",
    "cpu_ratio": "share of the time in which a worker is running, in a fetch",
    "busy_ratio": EVIDENCE["worker_busy_ratio"],
    "runnable_ratio": "share of the time in which a worker is runnable",
    "blocked_ratio": "share of the time in which a worker is blocked; the three add up to `busy_ratio`",
    "read_bytes_per_second": "read from storage by all workers",
    "slack_seconds": EVIDENCE["slack_seconds"],
    "fetch_wait_seconds_total": "fetch wait of the run so far",
    "transfer_wait_seconds_total": "transfer wait of the run so far",
    "head_of_line_seconds_total": "fetch wait of the run so far with head-of-line blocking",
    "matched_total": "batches of the run so far that were matched with their fetch",
    "from_busy_total": "batches of these whose worker was busy during their transfer",
    "transfer_wait_busy_worker_seconds_total": "transfer wait of the run so far for these",
    "transfer_wait_long_fetch_seconds_total": "its part with the worker in an unusually long fetch",
    "head_of_line_batches": "finished batches that wait behind one that is not finished",
    "head_of_line_worker": "the worker that fetches that one",
    "head_of_line_since_seconds": "how long that fetch has taken",
    "written_bytes_per_second": "written by all workers, with the pickled part of batches",
    "allowed_cores": "cores that all training workers together may use",
    "packing_ratio": "share of the time in which a worker is running outside of fetches, for pickling",
}
"""What each field of the event ``workers`` is."""


def fields_part() -> str:
    """The tables of fields. Raises ValueError for a field without a meaning, and for a meaning without a field."""
    evidence = written_evidence()
    parts = (
        ("Of a window", list(evidence), EVIDENCE),
        ("Of a pace", list(evidence["paces"][0]), PACE),
        ("Of some stalls", list(STALL), STALL),
        ("Of the event `workers`", written_workers(), WORKERS),
    )
    for title, names, meanings in parts:
        if set(names) != set(meanings):
            raise ValueError(
                f"{title}: these fields need a meaning, or are no longer written: {set(names) ^ set(meanings)}"
            )
    tables = [
        f"### {title}\n\n{table(('Field', 'Meaning'), ((f'`{name}`', meanings[name]) for name in names))}"
        for title, names, meanings in parts
    ]
    kinds = table(("Kind", "Meaning"), ((f"`{kind}`", text) for kind, text in FINDINGS.items()))
    failures = table(("`failure`", "Meaning"), ((f"`{name}`", text) for name, text in FAILURES.items()))
    return "\n".join([*tables, f"### Kinds of findings\n\n{kinds}", f"### Failures\n\n{failures}"])


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
