"""The energy of the GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.colours import CATEGORIES
from grafana.panels import Query, bars

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders import bargauge


def energy_in_range(runs: str) -> bargauge.Panel:
    """Kilowatt-hours by category of the ledger, in the time range of the dashboard.

    Args:
        runs: matchers of the runs that are shown.
    """
    return bars(
        "Energy of the GPUs",
        "Kilowatt-hours in the time range of the dashboard, from the GPUs' own counters. A GPU that ranks share counts "
        "once, with everything that runs on it. The split by what the rank did is an estimate by time.",
        "short",
        Query(
            "sort_desc(sum by (category) (max by (category, uuid) "
            f"(increase(training_gpu_energy_joules_total{{{runs}}}[$__range]))) / 3.6e6 > 0.0005)",
            "{{category}}",
        ),
        colours=CATEGORIES,
        no_value="Not measured",
    )
