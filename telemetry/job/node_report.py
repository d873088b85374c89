"""What one node reports about its ranks to the others: one small JSON file, replaced as a whole.

It contains no time that is compared with another machine's clock. A reader treats a report as alive as long as its
``sequence`` changes, measured with the reader's own clock.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from telemetry.core.tick import RankPace

_VERSION: Final = 1
MAX_BYTES: Final = 1 << 20
"""A report of 8 ranks takes 3 KB, that of a group of nodes 12 KB."""

_NUMBERS: Final = (
    "rank", "seconds", "steps", "compute_seconds", "away_seconds", "samples", "in_sync_samples", "seconds_without_step",
    "node_ranks",
)  # fmt: skip
_PACE_FIELDS: Final = frozenset(field.name for field in fields(RankPace))


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The ranks of one node, or the candidates among those of a group of nodes.

    Attributes:
        writer: name of the node that wrote it.
        sequence: increases with each report of that node, from any start.
        nodes: how many nodes the report is about.
        ranks: their newest paces. Each names its node.
    """

    writer: str
    sequence: int
    nodes: int
    ranks: tuple[RankPace, ...]


def encoded(report: NodeReport) -> bytes:
    """A report as the content of its file."""
    ranks = [asdict(pace) for pace in report.ranks]
    content = {"version": _VERSION, "writer": report.writer, "sequence": report.sequence, "nodes": report.nodes}
    return json.dumps(content | {"ranks": ranks}, separators=(",", ":")).encode()


def decoded(content: bytes) -> NodeReport | None:
    """The report in a file; None if the file is damaged, of another version, or not a report."""
    try:
        found: Any = json.loads(content)
        if found["version"] != _VERSION:
            return None
        ranks = tuple(_pace(pace) for pace in found["ranks"])
        return NodeReport(str(found["writer"]), int(found["sequence"]), int(found["nodes"]), ranks)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _pace(found: dict[str, Any]) -> RankPace:
    """A pace, without the fields that a newer version of this package has added.

    Raises:
        TypeError: a field is missing or is not a number although it must be one.
    """
    pace = RankPace(**{name: value for name, value in found.items() if name in _PACE_FIELDS})
    for name in _NUMBERS:
        if not isinstance(getattr(pace, name), (int, float)):
            raise TypeError(name)
    return pace
