"""The names of a run's log files, ``RUN_DIR/logs/rank-RANK.PID[.NUMBER].jsonl[.ROTATED]``."""

from __future__ import annotations

import re
from typing import Final

LOG_NAME: Final = re.compile(r"rank-(?P<rank>\d+)\.(?P<pid>\d+)(?:\.(?P<number>\d+))?\.jsonl(?:\.(?P<rotated>\d+))?")
"""``number`` counts the processes that have had this rank and pid (none for the first). ``rotated`` is the number of an
older file of the same log; the oldest has the highest."""
