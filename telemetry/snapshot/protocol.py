"""The messages by which ranks agree on a snapshot: request, answer, plan and result, as small JSON objects.

They are read from files, so each field is checked. A field of the wrong type, or a name that would lead out of the
folder, makes the whole message invalid.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Final

from telemetry.records import CAUSES
from telemetry.util.processes import MAX_RANK

REQUEST: Final = "request"
"""The reason of a snapshot that a person requested. Otherwise the reason is the cause of a stall."""

STALL: Final = "stall"
API: Final = "api"
COMMAND: Final = "command"
KINDS: Final = (STALL, API, COMMAND)
"""Where a request comes from: a stall, ``telemetry.request_snapshot()``, or ``telemetry snapshot`` in another shell."""

MAX_STEPS: Final = 50
_ID: Final = re.compile(r"\d{13}-[0-9a-z]{1,32}")
_FOLDER: Final = re.compile(rf"({'|'.join((REQUEST, *CAUSES))})-step\d{{1,15}}(\.\d{{1,4}})?")


class InvalidError(ValueError):
    """A message is invalid; the text names the field or the file."""


def valid_id(text: str) -> bool:
    """Whether a text is the id of a snapshot: milliseconds since 1970, and a random part."""
    return _ID.fullmatch(text) is not None


def valid_folder(text: str) -> bool:
    """Whether a text is the name of a snapshot's folder."""
    return _FOLDER.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Request:
    """A snapshot is requested.

    Attributes:
        id: the id of the request and of its snapshot.
        kind: one of `KINDS`.
        reason: the cause of the stall, or `REQUEST`.
        rank: the one rank to record; None for all.
        steps: how many steps to record.
        asked_by: who requested it, in words.
        stall: the fields of the stall as in the log; None without one.
    """

    id: str
    kind: str
    reason: str
    rank: int | None
    steps: int
    asked_by: str
    stall: dict[str, Any] | None = None

    def concerns(self, rank: int) -> bool:
        """Whether a rank must record."""
        return self.rank is None or self.rank == rank


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank's answer to a request: how far it is.

    Attributes:
        rank: the rank.
        steps: how many steps had ended.
        step_seconds: how long one step takes.
        at: when that was, Unix time.
        hears: how late the rank may see a file, seconds.
    """

    rank: int
    steps: int
    step_seconds: float
    at: float
    hears: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What the ranks have agreed on.

    Attributes:
        request: the request.
        refused: why the request is refused; None if it is not.
        first_step, last_step: the steps to record, counted from 1.
        ranks: the ranks that have answered; they are expected to record.
        folder: name of the snapshot's folder.
        stamp_ms: Unix time in milliseconds. It is the same in the names of all traces of the snapshot.
    """

    request: Request
    refused: str | None
    first_step: int = 0
    last_step: int = 0
    ranks: tuple[int, ...] = ()
    folder: str = ""
    stamp_ms: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """How a snapshot ended on one rank: ``result`` as the metric's label, ``why`` in words, ``path`` of the trace."""

    rank: int
    result: str
    why: str | None
    path: str | None
    first_step: int | None
    last_step: int | None


def as_json(record: Request | Answer | Plan | Result) -> dict[str, Any]:
    """A record as a JSON object."""
    return asdict(record)


def request_from(value: object) -> Request:
    """Read a request.

    Raises:
        InvalidError: it is not a valid request.
    """
    fields = _object(value)
    kind, reason = _text(fields, "kind"), _text(fields, "reason")
    if kind not in KINDS or reason not in (REQUEST, *CAUSES) or not valid_id(_text(fields, "id")):
        raise InvalidError("a request with an unknown kind, reason or id")
    rank = fields.get("rank")
    stall = fields.get("stall")
    return Request(
        id=_text(fields, "id"),
        kind=kind,
        reason=reason,
        rank=None if rank is None else _whole(fields, "rank", 0, MAX_RANK),
        steps=_whole(fields, "steps", 1, MAX_STEPS),
        asked_by=_text(fields, "asked_by"),
        stall=stall if isinstance(stall, dict) else None,
    )


def answer_from(value: object) -> Answer:
    """Read an answer; raises as `request_from`."""
    fields = _object(value)
    return Answer(
        rank=_whole(fields, "rank", 0, MAX_RANK),
        steps=_whole(fields, "steps", 0, 1 << 62),
        step_seconds=_number(fields, "step_seconds"),
        at=_number(fields, "at"),
        hears=_number(fields, "hears"),
    )


def plan_from(value: object) -> Plan:
    """Read a plan; raises as `request_from`."""
    fields = _object(value)
    request = request_from(fields.get("request"))
    if fields.get("refused") is not None:
        return Plan(request, _text(fields, "refused"))
    first = _whole(fields, "first_step", 1, 1 << 62)
    ranks = fields.get("ranks")
    if not isinstance(ranks, list) or not all(isinstance(r, int) and 0 <= r <= MAX_RANK for r in ranks):
        raise InvalidError("ranks is not a list of ranks")
    if not valid_folder(_text(fields, "folder")):
        raise InvalidError("folder is not the name of a snapshot")
    return Plan(
        request=request,
        refused=None,
        first_step=first,
        last_step=_whole(fields, "last_step", first, first + MAX_STEPS - 1),
        ranks=tuple(ranks),
        folder=_text(fields, "folder"),
        stamp_ms=_whole(fields, "stamp_ms", 0, 1 << 53),
    )


def result_from(value: object) -> Result:
    """Read a result; raises as `request_from`."""
    fields = _object(value)
    return Result(
        rank=_whole(fields, "rank", 0, MAX_RANK),
        result=_text(fields, "result"),
        why=None if fields.get("why") is None else _text(fields, "why"),
        path=None if fields.get("path") is None else _text(fields, "path"),
        first_step=None if fields.get("first_step") is None else _whole(fields, "first_step", 0, 1 << 62),
        last_step=None if fields.get("last_step") is None else _whole(fields, "last_step", 0, 1 << 62),
    )


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidError("not a JSON object")
    return value


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > 1000:
        raise InvalidError(f"{name} is not a text")
    return value


def _whole(fields: dict[str, Any], name: str, low: int, high: int) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidError(f"{name} is not a whole number from {low} to {high}")
    return value


def _number(fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e12:
        raise InvalidError(f"{name} is not a number")
    return float(value)
