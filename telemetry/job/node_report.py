"""What one node reports about its ranks to the others: one small JSON file, replaced as a whole.

It contains no time that is compared with another machine's clock. A reader treats a report as alive as long as its
``sequence`` changes, measured with the reader's own clock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from telemetry.job.hang_states import from_rows, to_rows
from telemetry.records import RankPace, pace_fields, pace_from
from telemetry.util.files import parse_object

if TYPE_CHECKING:
    from telemetry.core.hang_records import HangState

_VERSION: Final = 1
MAX_BYTES: Final = 1 << 20
"""A report of 8 ranks takes 3 KB, that of a group of nodes 12 KB."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The ranks of one node, or the candidates among those of a group of nodes.

    Attributes:
        writer: name of the node that wrote it.
        sequence: increases with each report of that node, from any start.
        nodes: how many nodes the report is about.
        ranks: their newest paces. Each names its node.
        hang: during a hang, the state of each rank.
        members: of a group of nodes, all its ranks as rows of `hang_states`, in the state that is true if all its nodes
            are lost. They are read only then, so they may be damaged.
    """

    writer: str
    sequence: int
    nodes: int
    ranks: tuple[RankPace, ...]
    hang: tuple[HangState, ...] = ()
    members: Any = ()


def encoded(report: NodeReport) -> bytes:
    """A report as the content of its file."""
    ranks = [*map(pace_fields, report.ranks)]
    content = {"version": _VERSION, "writer": report.writer, "sequence": report.sequence, "nodes": report.nodes}
    hang = {"hang": to_rows(report.hang)} if report.hang else {}
    members = {"members": report.members} if report.members else {}
    return json.dumps(content | {"ranks": ranks} | hang | members, separators=(",", ":")).encode()


def decoded(content: bytes) -> NodeReport | None:
    """The report in a file; None if the file is damaged, of another version, or not a report."""
    try:
        found = _parsed(content)
        if found["version"] != _VERSION:
            return None
        ranks = tuple(map(pace_from, found["ranks"]))
        hang = from_rows(found.get("hang", ()))
        writer, sequence, nodes = str(found["writer"]), int(found["sequence"]), int(found["nodes"])
        return NodeReport(writer, sequence, nodes, ranks, hang, found.get("members", ()))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _parsed(content: bytes) -> Any:
    """The JSON value of a report; None if it is damaged."""
    try:
        return orjson.loads(content)
    except ValueError:
        return parse_object(content)  # the name of a source file that is no UTF-8 has lone surrogates
