"""The report's verdict on a run that has ended. It is on the whole logs; the live view follows only their ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from telemetry.report.log_files import NoRunError
from telemetry.report.log_reader import load
from telemetry.report.rank_processes import not_replaced
from telemetry.report.summary import judged
from telemetry.util.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from telemetry.core.run_verdict import JudgedRun
    from telemetry.top.rank_row import RankFacts


class EndedRun:
    """Reads the logs as the report does, once for each end of the run.

    Args:
        path: the run folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._of: tuple[object, ...] = ()
        self._verdict: JudgedRun | None = None
        self.note = ""
        """Why there is no verdict; empty if there is one."""

    def verdict(self, facts: Sequence[RankFacts]) -> JudgedRun | None:
        """The verdict of ``telemetry report``; None if the logs can no longer be read.

        Args:
            facts: of the processes that have ended.
        """
        of = tuple((each.log.rank, each.log.pid, each.log.started, each.log.last_time) for each in facts)
        if of != self._of:
            try:
                self._verdict, self.note = judged(not_replaced(load(self._path))), ""
            except (NoRunError, OSError) as error:
                self._verdict = None
                self.note = one_line(
                    f"the verdict is on the ends of the logs alone; their whole cannot be read: {error}"
                )
            self._of = of
        return self._verdict
