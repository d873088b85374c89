"""Rendezvous: the ranks agree on the steps to record, through small files, without a collective and without blocking.

The files are in ``RUN_DIR/snapshots/.meeting``, by the id of the request:

    ID.request.json       a snapshot is requested
    ID.answer-RANK.json   a rank has read the request, and tells how far it is
    ID.plan.json          the steps to record, or why there is no snapshot; the first plan that is written is valid
    ID.result-RANK.json   how it ended on a rank

Each rank polls once per tick and never waits for another. The lowest rank that has answered writes the plan, as soon as
all have answered or three ticks have passed. If that rank dies, the next one writes it. The first step to record is as
far ahead of the furthest rank as the fastest rank can get in three ticks. So all ranks read the plan in time. A rank
that reads it too late skips the snapshot, and the others record.

All ranks count their steps alike, because each counts the training batches since its start. If they do not (one started
earlier, or gets more batches), each records the steps with these numbers at another time. Then the manifest says that
the recordings do not overlap. If nodes do not share the run folder, the ranks of each node agree among themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from telemetry.snapshot import protocol as p
from telemetry.snapshot.private_folder import Folder, open_folder
from telemetry.snapshot.request_files import (
    RENDEZVOUS_FOLDER,
    RequestFiles,
    RequestFolderWatch,
    clear,
    dump,
    id_seconds,
    load,
    scan,
)
from telemetry.util.clock import unix_time

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CACHED_SECONDS: Final = 90.0
"""Notice for ranks on other nodes that see a folder late. By default NFS caches a folder's state for 30 to 60 s
(``acdirmin`` and ``acdirmax`` of nfs(5)). A request and its answer take up to 90 s together, because a node that writes
into a folder reads its state again."""

NOTICE_TICKS: Final = 3
"""A rank polls once per tick. One that misses two ticks still reads a plan in time."""

_WARM_UP_STEPS: Final = 2
"""The profiler is prepared one step ahead, and that step must not have begun."""

_REQUEST_SECONDS: Final = 120.0
"""A request that is older by this time, plus twice the notice, is ignored: nobody waits for it any more."""

_FILE_SECONDS: Final = 600.0
"""Older files are removed by any rank that finds them."""

_CLOCK_SECONDS: Final = 2.0
"""The largest difference that is expected between the clocks of two machines."""

_ALONE_SECONDS: Final = 0.1
"""Time from a plan until the training thread sees it, if there is only one rank."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far this rank is: steps that have ended, and seconds that one takes."""

    steps: int
    step_seconds: float


class Rendezvous:
    """One rank's part in the rendezvous.

    Args:
        snapshots: the folder ``RUN_DIR/snapshots``.
        rank: this rank.
        world_size: how many ranks there are.
        tick_seconds: how often `poll` is called.
        refuses: the policy of this rank: why a request is refused; None if it is not.
        clock: Unix time.
        far: whether other nodes may see a file late, called only while there is a request.
    """

    def __init__(
        self,
        snapshots: Path,
        *,
        rank: int,
        world_size: int,
        tick_seconds: float,
        refuses: Callable[[p.Request], str | None],
        clock: Callable[[], float] = unix_time,
        far: Callable[[], bool] = lambda: False,
    ) -> None:
        self._snapshots = snapshots
        self._rank = rank
        self._world = world_size
        self._tick = tick_seconds
        self._refuses = refuses
        self._clock = clock
        self._far = far
        self._began = clock()
        self._done: set[str] = set()  # ids that this rank has dealt with
        self._mine: set[str] = set()  # ids of this rank's own requests, which it may withdraw
        self._first_seen: dict[str, float] = {}
        self._watch = RequestFolderWatch(snapshots / RENDEZVOUS_FOLDER)

    def adopt(self, rank: int, world_size: int) -> None:
        """The rank of this process, or the size of the job, is now known to be another one."""
        self._rank, self._world = rank, world_size

    def ask(self, request: p.Request) -> None:
        """Write a request for all ranks.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._open() as folder:
            folder.write(f"{request.id}.request.json", dump(request))
        self._watch.expect()
        self._mine.add(request.id)

    def poll(self, position: Callable[[], Position | None]) -> p.Plan | None:
        """Read new files, answer a request, and write the plan if it is this rank's turn.

        Args:
            position: returns how far this rank is. It is called only if there are files. It returns None while that is
                unknown or a snapshot is in progress. Then no request is answered.

        Returns:
            A plan for this rank that it has not read before. The plan may be a refusal.

        Raises:
            OSError: the folder cannot be read or written.
        """
        if self._watch.stays_empty():
            return None
        with self._open() as folder:
            found = scan(folder)
            now = self._clock()
            self._watch.listed(found, now)
            self._forget(found)
            waits, where = False, position() if found else None
            for id_, files in sorted(found.items()):
                if now - id_seconds(id_) > _FILE_SECONDS:
                    clear(folder, id_, files)
                elif id_seconds(id_) < self._began - _CLOCK_SECONDS:
                    self._done.add(id_)  # of an earlier run in the same folder
                elif id_ not in self._done:
                    heard = self._follow(folder, id_, files, where, waits=waits)
                    if heard is not None:
                        return heard
                    waits = waits or id_ not in self._done
        return None

    def report(self, plan: p.Plan, result: p.Result) -> None:
        """Write how a plan ended on this rank. The last rank to do so removes the request and the answers.

        Raises:
            OSError: the folder cannot be written.
        """
        id_ = plan.request.id
        with self._open() as folder:
            folder.write(f"{id_}.result-{self._rank}.json", dump(result))
            files = scan(folder).get(id_, RequestFiles())
            if files.results >= set(plan.ranks):
                clear(folder, id_, RequestFiles(request=files.request, answers=files.answers))

    # -- one request -------------------------------------------------------------------------------------------

    def _follow(
        self, folder: Folder, id_: str, files: RequestFiles, position: Position | None, *, waits: bool
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
            return None  # the request has just been withdrawn
        except (p.InvalidError, OSError):
            self._done.add(id_)  # so that the error is reported once
            raise

    def _answer(
        self, folder: Folder, id_: str, files: RequestFiles, position: Position, *, waits: bool
    ) -> p.Plan | None:
        request = p.request_from(load(folder, f"{id_}.request.json"))
        now = self._clock()
        if request.id != id_ or now - id_seconds(id_) > _REQUEST_SECONDS + 2 * NOTICE_TICKS * self._hears():
            self._done.add(id_)
            return None
        if waits and request.kind != p.COMMAND:  # an older request is open, and its snapshot serves both
            if id_ in self._mine:
                folder.remove(f"{id_}.request.json")
                self._done.add(id_)
            return None
        if not request.concerns(self._rank):
            return None
        if self._rank not in files.answers:
            answer = p.Answer(self._rank, position.steps, position.step_seconds, now, self._hears())
            folder.write(f"{id_}.answer-{self._rank}.json", dump(answer))
            files.answers.add(self._rank)
        return self._propose(folder, request, files)

    def _propose(self, folder: Folder, request: p.Request, files: RequestFiles) -> p.Plan | None:
        now, answered = self._clock(), sorted(files.answers)
        since = now - self._first_seen.setdefault(request.id, now)
        expected = 1 if request.rank is not None else self._world
        turn = answered.index(self._rank)
        complete = len(answered) >= expected and turn == 0
        if not complete and since < (NOTICE_TICKS + 2 * turn) * self._hears():
            return None
        refused = self._refuses(request)
        plan = p.Plan(request, refused) if refused else self._plan(folder, request, answered)
        if folder.write(f"{request.id}.plan.json", dump(plan), first=True):
            self._done.add(request.id)
            return plan
        return None  # another rank was first: its plan is read at the next tick

    def _hears(self) -> float:
        """Seconds after which this rank has seen a new file. It needs three times this as notice."""
        return max(self._tick, CACHED_SECONDS / NOTICE_TICKS) if self._far() else self._tick

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

    # -- files -------------------------------------------------------------------------------------------------

    def _open(self) -> Any:
        with open_folder(self._snapshots, make=True):
            pass
        return open_folder(self._snapshots / RENDEZVOUS_FOLDER, make=True)

    def _forget(self, found: dict[str, RequestFiles]) -> None:
        self._done &= found.keys()
        self._mine &= found.keys()
        for gone in self._first_seen.keys() - found.keys():
            del self._first_seen[gone]


def first_step(answers: list[p.Answer], now: float) -> int:
    """The first step to record: as far ahead of the furthest rank as the fastest can get until all know the plan."""
    fastest = min(max(answer.step_seconds, 1e-6) for answer in answers)
    furthest = max(answer.steps + max(0.0, now - answer.at) / fastest for answer in answers)
    notice = NOTICE_TICKS * max(answer.hears for answer in answers) if len(answers) > 1 else _ALONE_SECONDS
    return math.ceil(furthest + notice / fastest) + _WARM_UP_STEPS + 1
