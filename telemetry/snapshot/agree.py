"""When a snapshot is taken, and how the ranks agree on its steps: by small files, without a collective or blocking.

The files are in ``RUN_DIR/snapshots/.meeting``, by the id of the request:

    ID.request.json       a snapshot is requested
    ID.answer-RANK.json   a rank has read the request, and has done so many steps
    ID.plan.json          the steps to record, or why there is no snapshot; the first plan that is written is valid
    ID.result-RANK.json   the result on a rank

Each rank polls once per tick and never waits for another. The lowest rank that has answered writes the plan, as soon as
all have answered or three ticks have passed. If that rank dies, the next one writes it. The first step to record is as
far ahead of the furthest rank as the fastest rank can get in three ticks. So all ranks read the plan in time. A rank
that reads it too late skips the snapshot, and the others record.

All ranks count their steps alike, because each counts the training batches since its start. If they do not (one started
earlier, or gets more batches), each records the steps with these numbers at another time, which the log shows. If nodes
do not share the run folder, the ranks of each node agree among themselves.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from telemetry.diagnosis.causes import CAUSES
from telemetry.records import StallRecord
from telemetry.util.clock import NS, now_ns, unix_time
from telemetry.util.files import caches_folders, read_small, remove_file, replace_file
from telemetry.util.processes import MAX_RANK

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from telemetry.config import Config
    from telemetry.node.peers import JobLink
    from telemetry.util.processes import Identity

REQUEST: Final = "request"
"""The reason of a snapshot that a person requested. Otherwise the reason is the cause of a stall."""

STALL: Final = "stall"
API: Final = "api"
COMMAND: Final = "command"

MAX_STEPS: Final = 50

CACHED_SECONDS: Final = 90.0
"""Notice for ranks on other nodes that see a folder late. By default NFS caches a folder's state for 30 to 60 s
(``acdirmin`` and ``acdirmax`` of nfs(5)). A request and its answer take up to 90 s together, because a node that writes
into a folder reads its state again."""

_NOTICE_TICKS: Final = 3
"""A rank polls once per tick. One that misses two ticks still reads a plan in time."""

_WARM_UP_STEPS: Final = 3
"""The profiler is prepared and operators are counted two steps ahead, and that step must not have begun."""

_REQUEST_SECONDS: Final = 120.0
"""A request that is older than this, plus twice the notice, is ignored: nobody waits for it any more."""

_FILE_SECONDS: Final = 600.0
"""Older files are removed by any rank that finds them."""

_CLOCK_SECONDS: Final = 2.0
"""The largest difference that is expected between the clocks of two machines."""

_ALONE_SECONDS: Final = 0.1
"""Time from a plan until the training thread sees it, if there is only one rank."""

_MAX_FILE_BYTES: Final = 1 << 20

_ID: Final = r"\d{13}-[0-9a-z]{1,32}"  # milliseconds since 1970, and a random part
_REASON: Final = "|".join((REQUEST, *CAUSES))
FOLDER: Final = rf"({_REASON})-step\d{{1,15}}(\.\d{{1,4}})?"
"""Matches the name of a snapshot's folder."""

_FILE: Final = re.compile(rf"({_ID})\.(request|plan|(?:answer|result)-\d+)\.json")

_Rank = Annotated[int, Meta(ge=0, le=MAX_RANK)]
_Steps = Annotated[int, Meta(ge=0)]


class InvalidMessageError(Exception):
    """A file is not the message that its name promises; the text has the reason."""


class Request(msgspec.Struct, frozen=True):
    """A snapshot is requested.

    Attributes:
        id: the id of the request and of its snapshot.
        kind: a stall, ``telemetry.request_snapshot()``, or ``telemetry snapshot`` in another shell.
        reason: the cause of the stall, or `REQUEST`.
        rank: the one rank to record; None for all.
        steps: number of steps to record.
        asked_by: who requested it, in words.
        stall: the stall; None without one.
    """

    id: Annotated[str, Meta(pattern=rf"^{_ID}\Z")]
    kind: Literal["stall", "api", "command"]
    reason: Annotated[str, Meta(pattern=rf"^({_REASON})\Z")]
    rank: _Rank | None
    steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)]
    asked_by: str
    stall: StallRecord | None = None


class Answer(msgspec.Struct, frozen=True):
    """A rank's answer to a request: its progress.

    Attributes:
        steps: number of steps that had ended.
        step_seconds: duration of a step.
        at: time of the answer, Unix time.
        hears: delay with which the rank may see a file, seconds. It needs three times this as notice.
    """

    rank: _Rank
    steps: _Steps
    step_seconds: Annotated[float, Meta(ge=0)]
    at: Annotated[float, Meta(ge=0)]
    hears: Annotated[float, Meta(ge=0)]


class Plan(msgspec.Struct, frozen=True):
    """The agreement of the ranks. If the request is refused, only the first two fields are set.

    Attributes:
        refused: why the request is refused; None if it is not.
        first_step, last_step: the steps to record, counted from 1.
        ranks: the ranks that have answered; they are expected to record.
        folder: name of the snapshot's folder.
        stamp_ms: Unix time in milliseconds. It is the same in the names of all traces of the snapshot.
    """

    request: Request
    refused: str | None
    first_step: _Steps = 0
    last_step: _Steps = 0
    ranks: tuple[_Rank, ...] = ()
    folder: Annotated[str, Meta(pattern=rf"^({FOLDER})?\Z")] = ""
    stamp_ms: _Steps = 0


class Result(msgspec.Struct, frozen=True):
    """The result of a snapshot on a rank: ``result`` as the metric's label, ``why`` in words, ``path`` of the trace."""

    rank: _Rank
    result: str
    why: str | None
    path: str | None
    first_step: int | None
    last_step: int | None


_Message = TypeVar("_Message", Request, Answer, Plan, Result)


def new_id(now: float) -> str:
    """An id for a request that is made now (Unix time)."""
    return f"{int(now * 1000):013d}-{secrets.token_hex(4)}"


def ranks_of(kind: str, names: Iterable[str]) -> set[int]:
    """The ranks that have written a file of this kind, ``answer`` or ``result``, among the files of one request."""
    return {int(name.partition("-")[2]) for name in names if name.startswith(f"{kind}-")}


# -- when a snapshot is taken --------------------------------------------------------------------------------------


class Trigger:
    """One rank's policy. It reads no clock.

    Attributes:
        taken: number of snapshots so far, with those that failed on this rank.
        off: why this run takes no more snapshots; None if it may.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stall_since: float | None = None
        self._fired = False
        self._last: float | None = None
        self.taken = 0
        self.off: str | None = None

    def stalled(self, now: float, cause: str | None) -> bool:
        """Whether the open stall triggers a snapshot now. Called at each tick.

        A stall triggers one snapshot, after the settle time and if the cooldown is over. A stall caused by checkpoints
        triggers none, because a trace of steps does not show them.

        Args:
            now: monotonic seconds.
            cause: the cause of the open stall; None without one.
        """
        if cause is None or cause == "checkpoint":
            self._stall_since, self._fired = None, False
            return False
        if self._stall_since is None:
            self._stall_since = now
        held = now - self._stall_since
        # A rank that waits for a straggler waits longer: the straggler's own snapshot shows the reason.
        settle = self._config.snapshot_settle_seconds * (2 if cause == "straggler" else 1)
        if self._fired or held < settle or self.refuses(now, STALL) is not None:
            return False
        self._fired = True
        return True

    def refuses(self, now: float, kind: str) -> str | None:
        """Why a request is refused; None if it is not. The cooldown holds for stalls, not for a person's request."""
        if self.off is not None:
            return self.off
        if self.taken >= self._config.max_snapshots:
            return f"this run has taken its max_snapshots = {self._config.max_snapshots}"
        if kind == STALL and self._last is not None:
            left = self._last + self._config.snapshot_cooldown_seconds - now
            if left > 0:
                return f"the cooldown since the last snapshot has {left:.0f} s to go"
        return None

    def took(self, now: float) -> None:
        """Count an agreed snapshot. It also shows the open stall, even if a person requested it."""
        self.taken += 1
        self._fired = self._stall_since is not None
        self._last = now


# -- the files and the agreement -----------------------------------------------------------------------------------


class RequestFolder:
    """The files of all requests of a run, in ``RUN_DIR/snapshots/.meeting``. The ranks and the command use it."""

    def __init__(self, snapshots: Path) -> None:
        self.path = snapshots / ".meeting"

    def scan(self) -> dict[str, set[str]]:
        """The existing files: by id, names such as ``request``, ``plan`` and ``answer-3``."""
        found: dict[str, set[str]] = {}
        try:
            entries = os.listdir(self.path)  # noqa: PTH208 - at every tick, and pathlib takes several times as long
        except FileNotFoundError:
            return {}
        for entry in entries:
            match = _FILE.fullmatch(entry)
            if match is not None:
                found.setdefault(match[1], set()).add(match[2])
        return found

    def read(self, id_: str, name: str, kind: type[_Message]) -> _Message:
        """Read a message. Raises `InvalidMessageError` if it is not a valid one of this kind."""
        content = read_small(self._file(id_, name), _MAX_FILE_BYTES)
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidMessageError(f"{id_}.{name}.json: {error}") from None

    def write(self, id_: str, name: str, message: _Message, *, first: bool = False) -> bool:
        """Write a message; with ``first`` only if the file does not exist. Returns whether it was written."""
        self.path.mkdir(0o700, parents=True, exist_ok=True)
        return replace_file(self._file(id_, name), msgspec.json.encode(message) + b"\n", first=first)

    def remove(self, id_: str, names: Iterable[str]) -> None:
        """Remove files of a request, if they exist."""
        for name in names:
            remove_file(self._file(id_, name))

    def _file(self, id_: str, name: str) -> Path:
        return self.path / f"{id_}.{name}.json"


class Agreement:
    """One rank's part in the agreement.

    Args:
        snapshots: the folder ``RUN_DIR/snapshots``.
        tick_seconds: time between two calls of `poll`.
        trigger: the policy of this rank.
        job: knows whether the job has ranks on other nodes; None without a board.
    """

    def __init__(
        self, snapshots: Path, identity: Identity, tick_seconds: float, trigger: Trigger, job: JobLink | None
    ) -> None:
        self._snapshots = snapshots
        self._files = RequestFolder(snapshots)
        self._identity = identity
        self._tick = tick_seconds
        self._trigger = trigger
        self._job = job
        self._began = unix_time()
        self._done: set[str] = set()  # ids that this rank has handled
        self._mine: set[str] = set()  # ids of this rank's own requests, which it may withdraw
        self._first_seen: dict[str, float] = {}

    def ask(self, request: Request) -> None:
        """Write a request for all ranks."""
        self._files.write(request.id, "request", request)
        self._mine.add(request.id)

    def poll(self, steps: int, step_seconds: float | None) -> Plan | None:
        """Read new files, answer a request, and write the plan if it is this rank's turn.

        Args:
            steps: number of steps that have ended.
            step_seconds: duration of a step; None while that is unknown or a snapshot is in progress. Then no request
                is answered.

        Returns:
            A plan for this rank that it has not read before. The plan may be a refusal.

        Raises:
            InvalidMessageError: a file is not a valid message. It is read once.
            OSError: the folder cannot be read or written.
        """
        found, now = self._files.scan(), unix_time()
        self._done &= found.keys()
        self._mine &= found.keys()
        self._first_seen = {id_: seen for id_, seen in self._first_seen.items() if id_ in found}
        waits = False
        for id_, names in sorted(found.items()):
            asked = int(id_[:13]) / 1000
            if now - asked > _FILE_SECONDS:
                self._files.remove(id_, names)
            elif asked < self._began - _CLOCK_SECONDS:
                self._done.add(id_)  # from an earlier run in the same folder
            elif id_ not in self._done:
                here = None if step_seconds is None else self._here(steps, step_seconds, now)
                plan = self._follow(id_, names, here, waits=waits)
                if plan is not None:
                    return plan
                waits = waits or id_ not in self._done
        return None

    def report(self, plan: Plan, result: Result) -> None:
        """Write the result of a plan on this rank."""
        self._files.write(plan.request.id, f"result-{self._identity.rank}", result)

    def _follow(self, id_: str, names: set[str], here: Answer | None, *, waits: bool) -> Plan | None:
        try:
            if "plan" in names:
                self._done.add(id_)
                plan = self._files.read(id_, "plan", Plan)
                return plan if plan.request.rank in {None, self._identity.rank} else None
            if "request" in names and here is not None:
                return self._answer(self._files.read(id_, "request", Request), names, here, waits=waits)
        except FileNotFoundError:
            pass  # the request has just been withdrawn
        except (InvalidMessageError, OSError):
            self._done.add(id_)  # so that the error is reported once
            raise
        return None

    def _answer(self, request: Request, names: set[str], here: Answer, *, waits: bool) -> Plan | None:
        id_, now = request.id, here.at
        if now - int(id_[:13]) / 1000 > _REQUEST_SECONDS + 2 * _NOTICE_TICKS * here.hears:
            self._done.add(id_)
            return None
        if waits and request.kind != COMMAND:  # an older request is open, and its snapshot serves both
            if id_ in self._mine:
                self._files.remove(id_, ["request"])
                self._done.add(id_)
            return None
        if request.rank not in {None, self._identity.rank}:
            return None
        answered = ranks_of("answer", names)
        if self._identity.rank not in answered:
            self._files.write(id_, f"answer-{self._identity.rank}", here)
        ranks = sorted({self._identity.rank, *answered})
        turn, since = ranks.index(self._identity.rank), now - self._first_seen.setdefault(id_, now)
        complete = len(ranks) >= (1 if request.rank is not None else self._identity.world_size) and turn == 0
        if not complete and since < (_NOTICE_TICKS + 2 * turn) * here.hears:
            return None
        refused = self._trigger.refuses(now_ns() / NS, request.kind)
        plan = Plan(request, refused) if refused else self._plan(request, ranks, now)
        if self._files.write(id_, "plan", plan, first=True):
            self._done.add(id_)
            return plan
        return None  # another rank was first: its plan is read at the next tick

    def _plan(self, request: Request, ranks: list[int], now: float) -> Plan:
        first = first_step([self._files.read(request.id, f"answer-{rank}", Answer) for rank in ranks], now)
        name = f"{request.reason}-step{first}"
        names = (name, *(f"{name}.{number}" for number in range(2, 10_000)))
        return Plan(
            request=request,
            refused=None,
            first_step=first,
            last_step=first + request.steps - 1,
            ranks=tuple(ranks),
            folder=next(each for each in names if not (self._snapshots / each).exists()),
            stamp_ms=int(now * 1000),
        )

    def _here(self, steps: int, step_seconds: float, now: float) -> Answer:
        job = self._job
        far = job is not None and job.ranks_elsewhere(self._identity.world_size) and caches_folders(self._snapshots)
        hears = max(self._tick, CACHED_SECONDS / _NOTICE_TICKS) if far else self._tick
        return Answer(self._identity.rank, steps, step_seconds, now, hears)


def first_step(answers: list[Answer], now: float) -> int:
    """The first step to record: as far ahead of the furthest rank as the fastest can get until all know the plan."""
    fastest = min(max(answer.step_seconds, 1e-6) for answer in answers)
    furthest = max(answer.steps + max(0.0, now - answer.at) / fastest for answer in answers)
    notice = _NOTICE_TICKS * max(answer.hears for answer in answers) if len(answers) > 1 else _ALONE_SECONDS
    return math.ceil(furthest + notice / fastest) + _WARM_UP_STEPS + 1
