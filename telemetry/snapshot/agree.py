"""Which steps to record, agreed on by the ranks through small files, without a collective and without waiting.

In ``RUN_DIR/snapshots/.meeting``, by the id of the request:

    ID.request.json       somebody wants a snapshot
    ID.answer-RANK.json   a rank has heard of it, and says where it is
    ID.plan.json          which steps (or why not); the first one written holds, whoever writes it
    ID.result-RANK.json   what came of it on a rank

Every rank looks in at its tick and never waits for another one. The lowest rank that has answered proposes, as soon as
all have answered or three ticks have passed; should it die, the next one does. The first step lies ahead of the
furthest rank by what that rank can do in three ticks, so that all hear of the plan in time; one that does not is past
it and skips it. So does a rank that is killed in between: the others record.

Ranks count their steps alike because each counts the training batches since its start. Where they do not (one began
earlier, or gets more batches), each records the steps of that number, at another time; the snapshot's description then
says that the recordings do not overlap. Where the run folder is not shared, the ranks of one node agree.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from telemetry.snapshot import plan as p
from telemetry.snapshot.folder import Folder, open_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MEETING: Final = ".meeting"

HEARING_TICKS: Final = 3
"""A rank looks in once a tick; one that is late twice still hears of a plan in time."""

_WARM_UP_STEPS: Final = 2
"""The profiler is prepared a step ahead, and that step must not have begun."""

_REQUEST_SECONDS: Final = 120.0
"""An older request is not followed up: whoever asked has gone, or was another run's."""

_FILE_SECONDS: Final = 600.0
"""What is older is removed by whoever sees it."""

_CLOCK_SECONDS: Final = 2.0
"""How far the clocks of two machines may be apart."""

_ALONE_SECONDS: Final = 0.1
"""From a plan to the training thread's hearing of it, where the rank that proposes is the only one."""

_NAME: Final = re.compile(r"([0-9a-z-]+)\.(request|plan|(answer|result)-(\d+))\.json")


@dataclass
class Files:
    """What there is of one request; answers and results by rank."""

    request: bool = False
    plan: bool = False
    answers: set[int] = field(default_factory=set)
    results: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Position:
    """Where this rank is: steps that have ended, and what one takes."""

    steps: int
    step_seconds: float


def new_id(now: float) -> str:
    """An id for a request made now (Unix time)."""
    return f"{int(now * 1000):013d}-{secrets.token_hex(4)}"


def id_seconds(text: str) -> float:
    """When the request with an id was made, Unix time."""
    return int(text[:13]) / 1000


class Meeting:
    """One rank's part in it.

    Args:
        snapshots: the folder ``RUN_DIR/snapshots``.
        rank: this one.
        world_size: how many there are.
        tick_seconds: how often `look` is called.
        allows: the policy of this rank: why a request is to be refused, None where it is not.
        clock: Unix time.
    """

    def __init__(
        self,
        snapshots: Path,
        *,
        rank: int,
        world_size: int,
        tick_seconds: float,
        allows: Callable[[p.Request], str | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._snapshots = snapshots
        self._rank = rank
        self._world = world_size
        self._tick = tick_seconds
        self._allows = allows
        self._clock = clock
        self._began = clock()
        self._done: set[str] = set()  # ids this rank is through with
        self._mine: set[str] = set()  # ids of requests of this rank that may be withdrawn
        self._first_seen: dict[str, float] = {}

    def adopt(self, rank: int, world_size: int) -> None:
        """This rank has another number, or the job another size, than was known so far."""
        self._rank, self._world = rank, world_size

    def ask(self, request: p.Request) -> None:
        """Put a request before the ranks.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._open() as folder:
            folder.write(f"{request.id}.request.json", dump(request))
        self._mine.add(request.id)

    def look(self, position: Position | None) -> p.Plan | None:
        """Take part: answer what is asked, propose where it is this rank's turn.

        Args:
            position: of this rank; None while it cannot say, or has a snapshot in hand: then it only listens.

        Returns:
            A plan that this rank has not heard of before and that concerns it; it may be a refusal.

        Raises:
            OSError: the folder cannot be read or written.
        """
        with self._open() as folder:
            found = scan(folder)
            now = self._clock()
            self._forget(found)
            waits = False
            for id_, files in sorted(found.items()):
                if now - id_seconds(id_) > _FILE_SECONDS:
                    clear(folder, id_, files)
                elif id_seconds(id_) < self._began - _CLOCK_SECONDS:
                    self._done.add(id_)  # of a run before this one in the same folder
                elif id_ not in self._done:
                    heard = self._follow(folder, id_, files, position, waits=waits)
                    if heard is not None:
                        return heard
                    waits = waits or id_ not in self._done
        return None

    def report(self, plan: p.Plan, result: p.Result) -> None:
        """Say what came of a plan on this rank. The last one to say so clears what led to it.

        Raises:
            OSError: the folder cannot be written.
        """
        id_ = plan.request.id
        with self._open() as folder:
            folder.write(f"{id_}.result-{self._rank}.json", dump(result))
            files = scan(folder).get(id_, Files())
            if files.results >= set(plan.ranks):
                clear(folder, id_, Files(request=files.request, answers=files.answers))

    # -- one request -------------------------------------------------------------------------------------------

    def _follow(
        self, folder: Folder, id_: str, files: Files, position: Position | None, *, waits: bool
    ) -> p.Plan | None:
        try:
            if files.plan:
                self._done.add(id_)
                plan = p.plan_from(load(folder, f"{id_}.plan.json"))
                return plan if plan.request.id == id_ and plan.request.concerns(self._rank) else None
            if not files.request or position is None:
                return None
            return self._answer(folder, id_, files, position, waits=waits)
        except FileNotFoundError:
            return None  # withdrawn since it was seen
        except (p.InvalidError, OSError):
            self._done.add(id_)  # told once
            raise

    def _answer(self, folder: Folder, id_: str, files: Files, position: Position, *, waits: bool) -> p.Plan | None:
        request = p.request_from(load(folder, f"{id_}.request.json"))
        now = self._clock()
        if request.id != id_ or now - id_seconds(id_) > _REQUEST_SECONDS:
            self._done.add(id_)
            return None
        if waits and request.kind != p.COMMAND:  # an older one is on the table: it does for both
            if id_ in self._mine:
                folder.remove(f"{id_}.request.json")
                self._done.add(id_)
            return None
        if not request.concerns(self._rank):
            return None
        if self._rank not in files.answers:
            answer = p.Answer(self._rank, position.steps, position.step_seconds, now, self._tick)
            folder.write(f"{id_}.answer-{self._rank}.json", dump(answer))
            files.answers.add(self._rank)
        return self._propose(folder, request, files)

    def _propose(self, folder: Folder, request: p.Request, files: Files) -> p.Plan | None:
        now, answered = self._clock(), sorted(files.answers)
        since = now - self._first_seen.setdefault(request.id, now)
        expected = 1 if request.rank is not None else self._world
        turn = answered.index(self._rank)
        complete = len(answered) >= expected and turn == 0
        if not complete and since < (HEARING_TICKS + 2 * turn) * self._tick:
            return None
        refused = self._allows(request)
        plan = p.Plan(request, refused) if refused else self._plan(folder, request, answered)
        if folder.write(f"{request.id}.plan.json", dump(plan), first=True):
            self._done.add(request.id)
            return plan
        return None  # another rank was first: its plan is heard at the next tick

    def _plan(self, folder: Folder, request: p.Request, answered: list[int]) -> p.Plan:
        answers = [p.answer_from(load(folder, f"{request.id}.answer-{rank}.json")) for rank in answered]
        first = first_step(answers, self._clock())
        return p.Plan(
            request=request,
            refused=None,
            first_step=first,
            last_step=first + request.steps - 1,
            ranks=tuple(answered),
            folder=self._free_name(f"{request.reason}-step{first}"),
            stamp_ms=int(self._clock() * 1000),
        )

    def _free_name(self, wanted: str) -> str:
        with open_folder(self._snapshots) as snapshots:
            taken = set(snapshots.names())
        numbered = (f"{wanted}.{number}" for number in range(2, 10_000))
        return wanted if wanted not in taken else next(name for name in numbered if name not in taken)

    # -- the table ---------------------------------------------------------------------------------------------

    def _open(self) -> Any:
        with open_folder(self._snapshots, make=True):
            pass
        return open_folder(self._snapshots / MEETING, make=True)

    def _forget(self, found: dict[str, Files]) -> None:
        self._done &= found.keys()
        self._mine &= found.keys()
        for gone in self._first_seen.keys() - found.keys():
            del self._first_seen[gone]


def first_step(answers: list[p.Answer], now: float) -> int:
    """The first step to record: ahead of the furthest rank by what the fastest can do until all have heard of it."""
    quickest = min(max(answer.step_seconds, 1e-6) for answer in answers)
    furthest = max(answer.steps + max(0.0, now - answer.at) / quickest for answer in answers)
    hearing = HEARING_TICKS * max(answer.hears for answer in answers) if len(answers) > 1 else _ALONE_SECONDS
    return math.ceil(furthest + hearing / quickest) + _WARM_UP_STEPS + 1


def clear(folder: Folder, id_: str, files: Files) -> None:
    """Remove what there is of a request."""
    names = ["request"] * files.request + ["plan"] * files.plan
    names += [f"answer-{rank}" for rank in files.answers] + [f"result-{rank}" for rank in files.results]
    for name in names:
        folder.remove(f"{id_}.{name}.json")


def scan(folder: Folder) -> dict[str, Files]:
    """What is on the table, by the id of the request. Names that are none of ours are passed over."""
    found: dict[str, Files] = {}
    for name in folder.names():
        match = _NAME.fullmatch(name)
        if match is None or not p.valid_id(match[1]):
            continue
        files = found.setdefault(match[1], Files())
        if match[2] == "request":
            files.request = True
        elif match[2] == "plan":
            files.plan = True
        else:
            (files.answers if match[3] == "answer" else files.results).add(int(match[4]))
    return found


def load(folder: Folder, name: str) -> object:
    """What a file says.

    Raises:
        InvalidError: it is no JSON.
        OSError: it cannot be read.
    """
    try:
        value: object = json.loads(folder.read(name))
    except ValueError as error:
        raise p.InvalidError(f"{name}: {error}") from None
    return value


def dump(record: p.Request | p.Answer | p.Plan | p.Result) -> bytes:
    """A record as it stands in a file."""
    return json.dumps(p.as_json(record)).encode()
