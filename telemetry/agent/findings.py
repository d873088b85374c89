"""The findings of this process: whoever finds something tells it here, and the log and the last line have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.diagnosis.findings import by_weight

if TYPE_CHECKING:
    from telemetry.agent.log import EventLog
    from telemetry.diagnosis.findings import Finding, FindingKind

_NEWS: Final = 0.05
"""A finding is logged again once its share has changed by this much, or its advice. The text has many figures."""


class FindingLog:
    """Logs findings, each kind once and then when it has changed. Used on the agent thread."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._newest: dict[FindingKind, Finding] = {}
        self._logged: dict[FindingKind, Finding] = {}

    def tell(self, finding: Finding) -> None:
        """Log a finding. It may be told at every tick: only what is new is logged."""
        self._newest[finding.kind] = structs.replace(finding, rank=self._event_log.identity.rank)
        before = self._logged.get(finding.kind)
        if before is None or _has_changed(before, finding):
            self._write(finding.kind)

    def end(self) -> None:
        """Log what has changed since it was logged, at the end of the run."""
        for kind in [kind for kind, finding in self._newest.items() if self._logged[kind] != finding]:
            self._write(kind)

    @property
    def newest(self) -> list[Finding]:
        """The findings so far, the most important first."""
        return sorted(self._newest.values(), key=by_weight)

    def _write(self, kind: FindingKind) -> None:
        self._logged[kind] = self._newest[kind]
        self._event_log.emit("finding", structs.asdict(self._newest[kind]))


def _has_changed(before: Finding, now: Finding) -> bool:
    if (before.share_ratio is None) != (now.share_ratio is None):
        return True
    settings = [[(each.setting, each.value) for each in found.advice] for found in (before, now)]
    return settings[0] != settings[1] or abs((before.share_ratio or 0.0) - (now.share_ratio or 0.0)) >= _NEWS
