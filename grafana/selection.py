"""How the queries of the Run dashboard choose their series."""

from __future__ import annotations

from typing import Final

from grafana.shared_panels import Scope

RUN: Final = 'run="$run"'
"""Matcher of the run."""

SELECTED: Final = 'run="$run", rank=~"$rank"'
"""Matchers of the run and the chosen ranks."""

ALL_RANKS: Final = ".+"
"""What `$rank` is when all ranks are chosen."""

SELECTED_NOT_ALL: Final = f'{SELECTED}, instance!~"$rank"'
"""The same, but matches no scraped series when all ranks are chosen: each has an `instance`, and no rank is one."""

SHOWN: Final = 'run="$run", rank=~"$worst"'
"""Matchers of the run and the ranks that have a line of their own in a graph."""

_NAMES: Final = "run_rank:training_worst_ranks:last|training_run_info"

SHOWN_RANKS: Final = f'label_values({{__name__=~"{_NAMES}", {SELECTED}, job!~"$rank"}}, rank)'
"""Values of `$worst`: the chosen ranks; if all are chosen, those that were among the worst at some time in the range.

Only the recorded series has no `job`. So it is the only one left when `$rank` is `.+`.
"""

LOOP: Final = 'category=~"data_wait|compute"'
"""The categories of the ledger that make up the training loop."""

_LOST: Final = f"sum_over_time(run_rank:training_stall_lost_seconds:rate5m{{{SHOWN}}}[$__range] @ end())"

WORST: Final = f"and on (run, rank) topk(16, {_LOST})"
"""Keeps a graph by rank readable: the chosen ranks that lost most in the time range, the same ones over all of it."""

RUN_SCOPE: Final = Scope(
    matchers=SELECTED,
    each_matchers=SHOWN,
    machines=RUN,
    filter="",
    shown=WORST,
    rank="rank {{rank}}",
    gpu="rank {{rank}}, GPU {{gpu}}",
)
"""The scope of panels that the Run dashboard shares with another dashboard."""


def rate(metric: str, more: str = "") -> str:
    """The rate of a counter of the chosen ranks."""
    matchers = f"{SELECTED}, {more}" if more else SELECTED
    return f"rate({metric}{{{matchers}}}[$__rate_interval])"


def rate_of_each(metric: str, more: str = "") -> str:
    """The rate of a counter, of the ranks that have a line of their own."""
    matchers = f"{SHOWN}, {more}" if more else SHOWN
    return f"rate({metric}{{{matchers}}}[$__rate_interval])"


def buckets(histogram: str) -> str:
    """The rates of the buckets of a histogram over the chosen ranks: recorded for all, else of each."""
    return (
        f"sum by (le) (run_le:{histogram}_bucket:rate1m{{{SELECTED}}} or "
        f"rate({histogram}_bucket{{{SELECTED_NOT_ALL}}}[$__rate_interval]))"
    )


def rate_of_all(record: str, counter: str, more: str = "") -> str:
    """The rate of a counter: recorded for all ranks, else of each of the chosen ranks."""
    more = f", {more}" if more else ""
    return f"({record}{{{SELECTED}{more}}} or rate({counter}{{{SELECTED_NOT_ALL}{more}}}[$__rate_interval]))"


def of_all(record: str, metric: str) -> str:
    """A metric: recorded for all ranks, else of each of the chosen ranks."""
    return f"({record}{{{SELECTED}}} or {metric}{{{SELECTED_NOT_ALL}}})"


def summed_rate(seconds: str) -> str:
    """The rate of a counter of seconds, summed over the chosen ranks."""
    return f"sum({rate_of_all(f'run:{seconds}:sum_rate1m', f'{seconds}_total')})"


def summed_time(matcher: str) -> str:
    """Seconds per second in categories of the ledger, summed over the chosen ranks."""
    times = rate_of_all("run_category:training_time_seconds:sum_rate1m", "training_time_seconds_total", matcher)
    return f"sum({times})"


def spent(category: str) -> str:
    """Seconds per second that the chosen ranks spend in a category of the ledger, of each or as a recorded mean."""
    record = "run_category:training_time_seconds:avg_rate1m"
    return rate_of_all(record, "training_time_seconds_total", f'category="{category}"')


def of_each(metric: str) -> str:
    """A metric, one line for each of the worst of the chosen ranks."""
    return f"{metric}{{{SHOWN}}} {WORST}"


def of(metric: str, more: str = "") -> str:
    """A metric of the chosen ranks."""
    return f"{metric}{{{SELECTED}, {more}}}" if more else f"{metric}{{{SELECTED}}}"
