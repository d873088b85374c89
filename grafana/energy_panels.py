"""The energy of the GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.colours import CATEGORIES
from grafana.panels import Query, bars

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders import bargauge


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
