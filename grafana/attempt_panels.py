"""What restarts and hangs cost a run, over all its attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from grafana.colours import LOST
from grafana.panels import Query, bars

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders import bargauge

_NOTHING: Final = "Nothing is lost"


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
        no_value=_NOTHING,
    )
