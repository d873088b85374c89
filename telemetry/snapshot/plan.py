"""How the ranks agree on the steps of a snapshot: by one small file that names a step to come.

The files are in ``RUN_DIR/snapshots/.meeting``:

    NUMBER.plan.json      the next snapshot; who creates the file with the next number first decides for all
    ID.request.json       a person asks for a snapshot, in another shell

A rank that wants a snapshot, or finds a request, creates the plan. Its step is so far ahead that the other ranks read
the plan in time: each looks once per tick, and none waits for another. A rank that reads it too late skips the
snapshot, and says so.

All ranks count their steps alike, because each counts the training batches since its start. If they do not (one started
earlier, or gets more batches), each records the steps with these numbers at another time, which the log shows. If nodes
do not share the run folder, the ranks of each node agree among themselves.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from telemetry.diagnosis.causes import CAUSES
from telemetry.model.records import StallRecord
from telemetry.safety.files import read_small, remove_file, replace_file
from telemetry.util.clock import unix_time
from telemetry.util.identity import MAX_RANK, slug

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.util.identity import Identity

REQUEST: Final = "request"
"""The reason of a snapshot that a person asked for. Otherwise the reason is the cause of a stall."""

CACHED_SECONDS: Final = 90.0
"""How late a rank on another node may see a new file. By default NFS caches a folder's state for 30 to 60 s
(``acdirmin`` and ``acdirmax`` of nfs(5))."""

NOTICE_TICKS: Final = 3
"""A rank looks once per tick. One that misses two ticks still reads a plan in time, and so does a training thread that
is kept busy."""

_STEPS_AHEAD: Final = 3
"""The profiler is prepared one step ahead, and that step must not have begun."""

_REQUEST_SECONDS: Final = 600.0
"""An older request is removed: the command that waited for it was killed."""

_MAX_FILE_BYTES: Final = 1 << 20

_REASON: Final = "|".join((REQUEST, *CAUSES))
FOLDER: Final = re.compile(rf"({_REASON})-step\d{{1,19}}")
"""Matches the name of a snapshot's folder."""

_ID: Final = r"\d{13}-[0-9a-f]{8}"  # milliseconds since 1970, and a random part
_PLAN_FILE: Final = re.compile(r"(\d{1,9})\.plan\.json")
_REQUEST_FILE: Final = re.compile(rf"({_ID})\.request\.json")


class Request(msgspec.Struct, frozen=True):
    """Somebody wants a snapshot.

    Attributes:
        id: the id of the request and of its snapshot. It begins with the Unix time of the request in milliseconds.
        reason: the cause of the stall, or `REQUEST`.
        rank: the one rank to record; None for all.
        steps: the most steps to record.
        asked_by: who wants it, in words.
        stall: the stall; None without one.
    """

    id: Annotated[str, Meta(pattern=rf"^{_ID}\Z")]
    reason: Annotated[str, Meta(pattern=rf"^({_REASON})\Z")]
    rank: Annotated[int, Meta(ge=0, le=MAX_RANK)] | None
    steps: Annotated[int, Meta(ge=1, le=50)]
    asked_by: str
    stall: StallRecord | None = None

    def wants(self, rank: int) -> bool:
        """Whether this rank is to record."""
        return self.rank in {None, rank}


class Plan(msgspec.Struct, frozen=True):
    """What all ranks do with a request: they record from ``first_step`` on, counted from 1."""

    request: Request
    first_step: Annotated[int, Meta(ge=0, lt=1 << 62)]

    @property
    def folder(self) -> str:
        """Name of the snapshot's folder. It is not new if an earlier attempt has recorded the same steps."""
        return f"{self.request.reason}-step{self.first_step}"

    def file_name(self, rank: Identity) -> str:
        """Name of a rank's trace. TensorBoard's plugin reads the worker and the span, which is that of all, from it."""
        worker, span = f"rank-{rank.rank}.{slug(rank.node)}_{rank.pid}", int(self.request.id[:13])
        return f"{worker}.{span}.pt.trace.json.gz"


_request_decoder: Final = msgspec.json.Decoder(Request)
_plan_decoder: Final = msgspec.json.Decoder(Plan)


def new_id() -> str:
    """An id for a request that is made now."""
    return f"{int(unix_time() * 1000):013d}-{secrets.token_hex(4)}"


def first_step(steps: int, step_seconds: float, notice_seconds: float) -> int:
    """The first step to record, if so many have ended and each rank sees the plan within ``notice_seconds``."""
    return steps + math.ceil(notice_seconds / max(step_seconds, 1e-6)) + _STEPS_AHEAD


class Meeting:
    """The plans and requests of a run, as one process sees them, without the plans of earlier attempts.

    Raises:
        OSError: the folder cannot be read.
    """

    def __init__(self, snapshots: Path) -> None:
        self._folder = snapshots / ".meeting"
        self._read = max(self._numbers(), default=0)  # number of the newest plan that was read
        self._answered: set[str] = set()  # ids of requests that have a plan, or cannot be read

    def next_plan(self) -> Plan | None:
        """The oldest plan that was not read yet.

        Raises:
            MsgspecError: it is not a valid plan. It is left out from then on.
            OSError: the folder or the file cannot be read.
        """
        number = min((each for each in self._numbers() if each > self._read), default=None)
        if number is None:
            return None
        self._read = number
        plan = _plan_decoder.decode(self._content(f"{number}.plan.json"))
        self._answered.add(plan.request.id)
        return plan

    def next_request(self) -> Request | None:
        """The oldest request that has no plan. Raises as `next_plan`."""
        asked = {match[1] for name in self._names() if (match := _REQUEST_FILE.fullmatch(name))}
        self._answered &= asked
        for id_ in sorted(asked - self._answered):
            name = f"{id_}.request.json"
            if unix_time() - int(id_[:13]) / 1000 > _REQUEST_SECONDS:
                remove_file(self._folder / name)
                continue
            self._answered.add(id_)  # so that one that cannot be read is reported once
            try:
                request = _request_decoder.decode(self._content(name))
            except FileNotFoundError:
                continue  # it has just been withdrawn
            self._answered.discard(id_)
            return request
        return None

    def decide(self, request: Request, first: int) -> Plan | None:
        """Create the next plan. Returns None if another rank was first: its plan is the next one to read.

        Raises:
            OSError: the file cannot be written.
        """
        plan = Plan(request, first)
        if not self._write(f"{self._read + 1}.plan.json", plan):
            return None
        self._read += 1
        self._answered.add(request.id)
        return plan

    def ask(self, request: Request) -> None:
        """Write a request for all ranks."""
        self._write(f"{request.id}.request.json", request)

    def withdraw(self, request: Request) -> None:
        """Remove a request."""
        remove_file(self._folder / f"{request.id}.request.json")

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._folder)  # noqa: PTH208 - at every tick, and pathlib takes several times as long
        except FileNotFoundError:
            return []

    def _numbers(self) -> list[int]:
        return [int(match[1]) for name in self._names() if (match := _PLAN_FILE.fullmatch(name))]

    def _content(self, name: str) -> bytes:
        return read_small(self._folder / name, _MAX_FILE_BYTES)

    def _write(self, name: str, message: Request | Plan) -> bool:
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        return replace_file(self._folder / name, msgspec.json.encode(message) + b"\n", first=True)
