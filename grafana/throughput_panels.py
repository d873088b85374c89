"""What runs train on: samples and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.panels import Query, graph, half

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grafana_foundation_sdk.builders import timeseries


def throughput_by_run(runs: str) -> Iterator[timeseries.Panel]:
    """Samples and tokens a second, by run.

    Args:
        runs: matchers of the runs that are shown.
    """
    for name, absent in (
        ("samples", "the size of a batch is not known"),
        ("tokens", "no batch has input_ids, and the script tells no tokens"),
    ):
        yield half(
            graph(
                f"{name.capitalize()} a second, by run",
                "Of all ranks together, in the last five minutes: the ten runs with most. Evaluations, checkpoints "
                f"and restarts make it lower. A run is absent where {absent}.",
                "short",
                Query(f"topk(10, run:training_{name}:rate5m{{{runs}}})", "{{run}}"),
                no_value="Not known",
            )
        )
