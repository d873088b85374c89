"""``python -m tests.reports``: runs the scripts after public reports, and judges what the agent says of them.

For each script: is the cause right, is the line right, is the first advice right and none harmful, and is a predicted
speed-up near the real one. Exits with 0 if all goals are reached.
"""

from __future__ import annotations

import sys
from typing import Final

from tests.campaign.command import Campaign

from .cases import ALL

REPORTS: Final = Campaign(
    name="reports",
    title="What the agent says of scripts after public reports",
    specimens=ALL,
    headings=("script", "after", "is", "named first", "cause", "line", "advice", "predicted", "real"),
    max_off=0.2,
)

if __name__ == "__main__":
    sys.exit(REPORTS.main())
