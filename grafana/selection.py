"""How the queries of the Run dashboard choose their series."""

from __future__ import annotations

from typing import Final

from grafana.shared_panels import Scope

RUN: Final = 'run="$run"'
"""Matcher of the run."""

SELECTED: Final = 'run="$run", rank=~"$rank"'
"""Matchers of the run and the chosen ranks."""

LOOP: Final = 'category=~"data_wait|compute"'
"""The categories of the ledger that make up the training loop."""

_LOST: Final = f"sum_over_time(run_rank:training_stall_lost_seconds:rate5m{{{SELECTED}}}[$__range] @ end())"

WORST: Final = f"and on (run, rank) topk(16, {_LOST})"
"""Keeps a graph by rank readable: the chosen ranks that lost most in the time range, the same ones over all of it."""

RUN_SCOPE: Final = Scope(
    matchers=SELECTED, machines=RUN, filter="", shown=WORST, rank="rank {{rank}}", gpu="rank {{rank}}, GPU {{gpu}}"
)
"""The scope of panels that the Run dashboard shares with another dashboard."""


def rate(metric: str, more: str = "") -> str:
    """The rate of a counter of the chosen ranks."""
    matchers = f"{SELECTED}, {more}" if more else SELECTED
    return f"rate({metric}{{{matchers}}}[$__rate_interval])"


def spent(category: str) -> str:
    """Seconds a second that the chosen ranks spend in a category of the ledger."""
    return rate("training_time_seconds_total", f'category="{category}"')


def of(metric: str, more: str = "") -> str:
    """A metric of the chosen ranks."""
    return f"{metric}{{{SELECTED}, {more}}}" if more else f"{metric}{{{SELECTED}}}"
