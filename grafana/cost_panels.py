"""What runs cost: money, in the currency of the setting ``gpu_hour_price``, energy, and GPU-hours lost to restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from grafana import frame
from grafana.colours import CATEGORIES, LOST
from grafana.panels import Query, bars, figure
from grafana.tables import Column, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grafana_foundation_sdk.builders import bargauge, stat, table

_NO_PRICE: Final = "No run has a price"
_RUNS_SHOWN: Final = 50
_WAITING: Final = 'category="data_wait"'


class _Money:
    """Expressions of money in the time range of the dashboard, with one series for each run.

    Only runs with a price have a series. What is priced but lost nothing is 0.

    Args:
        runs: matchers of the runs that are shown.
    """

    def __init__(self, runs: str) -> None:
        hourly = f"run:training_cost_per_hour:sum{{{runs}}}"
        self.now = hourly
        # Money an hour, read once a minute and summed, is 60 times the money.
        self._alive = f"sum_over_time({hourly}[$__range:1m]) / 60"
        self._lost = f"increase(run_category:training_run_lost_seconds:max{{{runs}, %s}}[$__range]) / 3600"
        self._hourly_at_most = f"max_over_time({hourly}[$__range])"
        stalls = f"run_cause:training_stall_cost_per_hour:rate5m{{{runs}}}"
        self.stalls = self._or_0(f"sum by (run) (sum_over_time({stalls}[$__range:1m])) / 60")
        self.restarts = self._restarts('category=~"redone|restore|replay|down"')
        down = self._restarts('category="down"')
        self.total = f"({self._alive}) + on (run) ({down})"
        self.hours_without_price = f"sum_over_time(run:training_ranks_without_price:count{{{runs}}}[$__range:1m]) / 60"

    def _restarts(self, categories: str) -> str:
        """Lost seconds are those of the run: times what all its ranks cost."""
        return self._or_0(f"sum by (run) ({self._lost % categories}) * on (run) group_left () {self._hourly_at_most}")

    def _or_0(self, expr: str) -> str:
        return f"{expr} or on (run) 0 * {self._alive}"


def costs(runs: str) -> Iterator[stat.Panel | table.Panel | bargauge.Panel]:
    """What all runs that are shown cost, run by run, and the energy.

    Args:
        runs: matchers of the runs that are shown.
    """
    money = _Money(runs)
    yield _sum(
        "Cost an hour, now",
        money.now,
        "What the ranks that are alive cost an hour, by the price in their runs' settings (`gpu_hour_price`). One rank "
        "counts as one GPU.",
        of_range=False,
    )
    yield _sum(
        "Cost",
        money.total,
        "Of the GPU-hours in the time range of the dashboard, also of those in which a run was down between two "
        "attempts. All runs must have their price in the same currency.",
    )
    yield _sum(
        "Lost to stalls",
        money.stalls,
        "What the GPU-hours that were lost in stalls have cost, in the time range of the dashboard. The bars of "
        "GPU-hours lost, above, have their causes.",
    )
    yield _sum(
        "Lost to restarts",
        money.restarts,
        "What was redone, restored and replayed after restarts, and the time down, have cost in the time range of the "
        "dashboard. It is counted when the next attempt begins.",
    )
    yield figure(
        "GPU-hours without a price",
        "GPU-hours in the time range of runs that have no price. They are not in the figures beside this one: set "
        "`gpu_hour_price` for these runs too.",
        "short",
        Query(f"sum({money.hours_without_price}) or vector(0)"),
        decimals=1,
        of_range=True,
    )
    yield _by_run(runs, money)
    yield energy_in_range(runs).height(8)


def _sum(title: str, by_run: str, description: str, *, of_range: bool = True) -> stat.Panel:
    query = Query(f"sum({by_run})")
    return figure(title, description, "short", query, decimals=2, of_range=of_range, no_value=_NO_PRICE).span(5)


def _by_run(runs: str, money: _Money) -> table.Panel:
    return (
        rows(
            "Cost, by run",
            "The runs that cost most in the time range of the dashboard. A run without a price has GPU-hours without "
            "one, and no cost. Waiting for data is one of the stalls, if it lasted.",
            Column("cost", "short", f"topk({_RUNS_SHOWN}, {money.total})", decimals=2, width=110),
            Column("lost to stalls", "short", money.stalls, decimals=2, width=120),
            Column("lost to restarts", "short", money.restarts, decimals=2, width=120),
            Column("GPU-hours without a price", "short", money.hours_without_price, decimals=1, width=190),
            Column("kWh", "short", f"sum by (run) ({kilowatt_hours(runs)})", decimals=2, width=90),
            Column("kWh waiting", "short", f"sum by (run) ({kilowatt_hours(runs, _WAITING)})", decimals=2, width=110),
            keys={"run": 0},
            links={"run": frame.TO_RUN},
            sort=["cost"],
            no_value="No run is there",
        )
        .height(8)
        .span(18)
    )


def kilowatt_hours(runs: str, more: str = "") -> str:
    """Kilowatt-hours of each run and category of the ledger, in the time range of the dashboard.

    Args:
        runs: matchers of the runs that are shown.
        more: further matchers.
    """
    matchers = f"{runs}, {more}" if more else runs
    # Watts, read once a minute and summed, give watt-minutes.
    return f"sum_over_time(run_category:training_gpu_energy_joules:rate5m{{{matchers}}}[$__range:1m]) / 60 / 1000"


def energy_in_range(runs: str) -> bargauge.Panel:
    """Kilowatt-hours by category of the ledger, in the time range of the dashboard.

    Args:
        runs: matchers of the runs that are shown.
    """
    return bars(
        "Energy of the GPUs",
        "Kilowatt-hours in the time range of the dashboard, from the GPUs' own counters. A GPU that ranks share counts "
        "once, with everything that runs on it; if runs share it, each gets an equal part. The split by what the rank "
        "did is an estimate by time.",
        "short",
        Query(f"sort_desc(sum by (category) ({kilowatt_hours(runs)}) > 0.0005)", "{{category}}"),
        colours=CATEGORIES,
        no_value="Not measured",
    )


def lost_in_range(runs: str) -> bargauge.Panel:
    """GPU-hours that restarts and hangs cost in the time range of the dashboard.

    Args:
        runs: matchers of the runs that are shown.
    """
    return bars(
        "GPU-hours lost to restarts",
        "Lost to restarts and hangs in the time range of the dashboard, over all ranks. Redone: steps after the newest "
        "checkpoint. Down: no process was there. `telemetry report` has the attempts and how often to save.",
        "short",
        Query(
            f"sort_desc(sum by (category) (increase(run_category:training_run_lost_seconds:max{{{runs}}}[$__range]) "
            f"* on (run) group_left () sum by (run) (max_over_time(run:training_ranks_alive:sum{{{runs}}}[$__range]))) "
            "/ 3600 > 0.005)",
            "{{category}}",
        ),
        colours=LOST,
        no_value="Nothing is lost",
    )
