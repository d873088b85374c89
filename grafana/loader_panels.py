"""The data loaders of the chosen ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from grafana import shared_panels
from grafana.colours import WAITED_FOR
from grafana.panels import Query, graph, half
from grafana.selection import LOOP, RUN_SCOPE, buckets, of, of_each, summed_rate, summed_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grafana_foundation_sdk.builders import timeseries

_NONE: Final = "No workers (num_workers=0)"


def loader() -> Iterator[timeseries.Panel]:
    """What the workers do, and how far ahead they are."""
    yield shared_panels.worker_states(
        RUN_SCOPE,
        "Mean over the workers of the chosen ranks. Running near one: they are CPU-bound, and more workers or "
        "cheaper decoding help. Blocked: they wait for storage, the network or locks. Without a core: there are "
        "more workers than cores, or a CPU limit. Idle: they are ahead of the training.",
    )
    yield graph(
        "Workers",
        "Live worker processes, over the chosen ranks. Without persistent_workers they end with each epoch.",
        "short",
        Query(f"sum({of('training_loader_workers')})", "workers"),
        Query(f"min({of('training_loader_workers')})", "fewest of a rank"),
        no_value="Not measured",
    )
    yield graph(
        "Ready batches, by rank",
        "Batches that are ready for the training. At zero each step waits for its batch. At the prefetch depth the "
        "loader is fast enough.",
        "short",
        Query(of_each("training_loader_ready_batches"), "rank {{rank}}"),
        no_value=_NONE,
    )
    yield graph(
        "Slack, by rank",
        "How long a batch had been ready when it was requested. It shrinks before the device idles. At zero the "
        "loader is too slow.",
        "s",
        Query(of_each("training_loader_slack_seconds"), "rank {{rank}}"),
        no_value=_NONE,
    )
    loop = f"({summed_time(LOOP)} > 0)"
    fetch_wait, blocked, transfer_wait = (
        summed_rate(f"training_loader_{what}_seconds") for what in ("fetch_wait", "head_of_line", "transfer_wait")
    )
    yield graph(
        "What the waits are for",
        "Share of the training loop. Fetch wait: the fetch of the batch had not ended; a faster loader helps. Head of "
        "line: the same, while a later batch of another worker was ready; a larger prefetch_factor or in_order=False "
        "helps. Transfer wait: the fetch had ended, and the batch was still being sent and pinned; pin_memory and "
        "fewer, larger tensors help.",
        "percentunit",
        Query(f"clamp_min({fetch_wait} - {blocked}, 0) / {loop}", "fetch wait"),
        Query(f"{blocked} / {loop}", "head of line"),
        Query(f"{transfer_wait} / {loop}", "transfer wait"),
        stacked=True,
        colours=WAITED_FOR,
        no_value=_NONE,
    )
    fetches = buckets("training_loader_fetch_duration_seconds")
    yield graph(
        "Fetch time of a batch",
        "Percentiles over all workers of the chosen ranks; without workers, over the fetches of the training "
        "thread. Divided by the number of workers, this is the time per batch of the loader: compare it with the "
        "step. A long tail shows single slow samples or files.",
        "s",
        *(
            Query(f"histogram_quantile({q}, {fetches})", name)
            for q, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
        ),
        no_value="No fetch was seen to end",
    )
    yield half(
        graph(
            "Finished batches held up, by rank",
            "Finished batches that wait for an earlier, unfinished one. The log (event workers) names the worker "
            "that they wait for.",
            "short",
            Query(of_each("training_loader_head_of_line_batches"), "rank {{rank}}"),
            no_value=_NONE,
        )
    )
    yield half(
        graph(
            "Memory of the workers, by rank",
            "Resident memory, summed over a rank's workers. Shared pages count for each worker. If it grows with "
            "every epoch, reference counts of Python objects cause copies: keep the index in NumPy or Arrow.",
            "bytes",
            Query(of_each("training_loader_workers_memory_bytes"), "rank {{rank}}"),
            no_value=_NONE,
        )
    )
