"""The totals of a process over its last minute: differences of the totals of its log lines."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

SECONDS: Final = 60.0

_STEPS: Final = 3
_LONGEST_SECONDS: Final = 600.0

_SUMS: Final = (
    *("steps_total", "wall_seconds", "exposed_wait_total_seconds", "unseen_steps_total", "first_wait_seconds"),
    *("samples_total", "tokens_total"),
)
_SUMS_BY_NAME: Final = ("ledger_total_seconds", "stall_lost_total_seconds")
_KEPT: Final = (*_SUMS, *_SUMS_BY_NAME, "exposed_wait_absent")


class RecentTotals:
    """Keeps the totals of one process for a minute.

    Args:
        from_start: whether the first totals that are added are the first of the process.
    """

    def __init__(self, *, from_start: bool) -> None:
        self._kept: deque[dict[str, Any]] = deque()
        self._zero = from_start
        self._grows = False

    def add(self, line: dict[str, Any]) -> None:
        """Newer totals: the fields of a window, or of an exposition in the same words."""
        if "wall_seconds" not in line or "ledger_total_seconds" not in line:
            return
        totals: dict[str, Any] = {name: line[name] for name in _KEPT if name in line}
        if self._kept and totals["wall_seconds"] < self._kept[-1]["wall_seconds"]:
            self._kept.clear()  # another process
            self._zero = False
        self._kept.append(totals)
        while len(self._kept) > 2 and _is_enough(self._kept[1], totals):
            self._kept.popleft()
            self._zero = False

    def over(self, newest: dict[str, Any] | None = None) -> dict[str, Any]:
        """The totals over the last minute, in the words of a log line; empty where they are not known yet.

        Args:
            newest: totals that are newer than the last that were added, such as those of a heartbeat.
        """
        if not self._kept:
            return {}
        now, before = newest or self._kept[-1], self._kept[0]
        if self._zero:
            return dict(now)
        if now["wall_seconds"] <= before["wall_seconds"]:
            return {}
        return difference(now, before)

    def newest_ledger(self) -> dict[str, float]:
        """The seconds by category between the last two totals; empty before there are two."""
        if len(self._kept) < 2:
            return {}
        ledger: dict[str, float] = difference(self._kept[-1], self._kept[-2])["ledger_total_seconds"]
        return ledger

    @property
    def loses_time(self) -> bool:
        """Whether stalls cost time between the last two totals, or no step ended: a stall is open then."""
        if len(self._kept) < 2:
            return False
        last = difference(self._kept[-1], self._kept[-2])
        return any(last.get("stall_lost_total_seconds", {}).values()) or not last.get("steps_total")


def _is_enough(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether the time between two totals is a minute and has some steps. Of steps that take minutes, it is longer."""
    seconds = now["wall_seconds"] - before["wall_seconds"]
    steps = now.get("steps_total", 0) - before.get("steps_total", 0)
    return bool(seconds >= SECONDS and (steps >= _STEPS or seconds >= _LONGEST_SECONDS))


def difference(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What was added to totals. What one of them lacks is absent; a sum by name begins at 0."""
    added: dict[str, Any] = {name: now[name] - before[name] for name in _SUMS if name in now and name in before}
    for name in _SUMS_BY_NAME:
        if name in now:
            old = before.get(name, {})
            added[name] = {key: max(0.0, value - old.get(key, 0.0)) for key, value in now[name].items()}
    if "exposed_wait_absent" in now:
        added["exposed_wait_absent"] = now["exposed_wait_absent"]
    return added
