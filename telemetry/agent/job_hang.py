"""Why the whole job hangs: every rank says what it does, and the rank that serves its node decides and writes it down.

Nothing happens before a rank is stuck. Then each rank of the job puts its state on the board of its node, and the rank
that serves the node puts the states of all its ranks into the node's file. So each node knows all ranks and decides for
itself: the node of rank 0 may be the one that is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.hang_records import ALIVE, ENDED, GONE, SILENT, STOPPED, HangState
from telemetry.core.views import HangView
from telemetry.diagnose.hang_verdict import decide, with_sentence
from telemetry.job.hang_states import from_rows, to_rows
from telemetry.records import COMPUTE, DATA_WAIT
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.core.hang_records import HangVerdict
    from telemetry.publish.hang_board import HangBoard, RankProcess

_REFRESH_SECONDS: Final = 5.0
"""How often a rank says what it does, while the job hangs."""

_OLD_SECONDS: Final = 20.0
"""What a living rank said so long ago is of an earlier hang."""

_SETTLE_SECONDS: Final = 3.0
"""Ranks do not all become stuck at the same moment: so long after the first one, a picture in which a rank may still go
on is not used."""

_PATIENCE_SECONDS: Final = 15.0
"""After this time, a verdict is written without the ranks of which nothing is known yet. Collectives end after minutes,
and with them the processes."""

_MAX_LINES: Final = 20
"""Of one hang. The picture may change while ranks end one after the other."""

_RECORDER_OFF: Final = (
    "off; start the job with TORCH_FR_BUFFER_SIZE=2000, and torch records the collectives of each rank"
)


@dataclass(frozen=True, slots=True)
class HangSurroundings:
    """What the agent knows besides its own rank, at a tick.

    Attributes:
        leads: whether this rank serves its node. ``board``: of the node, else None.
        elsewhere: states of the ranks of other nodes. ``world_size``: number of ranks of the job.
    """

    leads: bool
    board: HangBoard | None
    elsewhere: tuple[HangState, ...]
    world_size: int


class JobHang:
    """One rank's part in finding out why the job hangs. Runs on the agent thread.

    Args:
        read: the state of this rank at this moment.
        emit: writes a line of the log.
        clock: the time of the day, as ISO-8601, so many seconds ago.
        recorder: of torch's flight recorder, see `RankStateReader`.
        mono_ns: the clock.

    Attributes:
        local: the states of this node's ranks, for the other nodes; empty while nothing hangs.
    """

    def __init__(
        self,
        read: Callable[[], HangState],
        emit: Callable[[str, dict[str, Any]], Any],
        clock: Callable[[float], str],
        recorder: Callable[[], str | None],
        *,
        mono_ns: Callable[[], int] = now_ns,
    ) -> None:
        self._read = read
        self._emit = emit
        self._clock = clock
        self._recorder = recorder
        self._now = mono_ns
        self._began_ns: int | None = None
        self._said_ns: int | None = None
        self._rank: int | None = None
        self._written: object = None
        self._lines = 0
        self._since = ""
        self._steps = 0
        self._over: dict[str, Any] | None = None
        self._verdict: HangVerdict | None = None
        self.local: tuple[HangState, ...] = ()

    def tick(self, *, hangs: bool, steps: int, around: Callable[[], HangSurroundings]) -> None:
        """Say what this rank does, and decide where that is its turn.

        Args:
            hangs: whether a rank of the job is known to be stuck.
            steps: of this rank that have ended.
            around: called only while something hangs.
        """
        if not hangs:
            if self._began_ns is not None:
                self._end(around())
            if self._over is not None and steps > self._steps:
                self._emit("hang", self._over)
                self._over = None
            return
        if self._began_ns is None:
            self._began_ns, self._steps, self._over = self._now(), steps, None
        surroundings = around()
        own = self._say(surroundings.board)
        if surroundings.leads or surroundings.world_size == 1:
            assert self._began_ns is not None  # noqa: S101 - set above
            silent_now = self._now() - self._began_ns > _PATIENCE_SECONDS * NS
            self.local = self._gather(own, surroundings.board, tell_silent=silent_now)
            self._decide(surroundings)

    def view(self) -> HangView | None:
        """For the endpoint; None while nothing hangs, and on ranks that do not serve their node."""
        verdict = self._verdict
        if verdict is None:
            return None
        first = next(iter(verdict.suspects), None)
        if first is None:
            return HangView(verdict.kind, None)
        return HangView(verdict.kind, first.rank, first.where and first.where.rpartition("/")[2])

    @property
    def sentence(self) -> str:
        """Why the job hangs, on the rank that serves its node. Empty if it does not, or no rank waits for another."""
        verdict = self._verdict
        return verdict.sentence if verdict is not None and verdict.waiting else ""

    def _say(self, board: HangBoard | None) -> HangState:
        own = self._read()
        now = self._now()
        if board is not None and (self._said_ns is None or now - self._said_ns >= _REFRESH_SECONDS * NS):
            (row,) = to_rows([own])
            board.put(own.rank, row | {"at_ns": now})
            self._said_ns, self._rank = now, own.rank
        return own

    def _gather(self, own: HangState, board: HangBoard | None, *, tell_silent: bool) -> tuple[HangState, ...]:
        """The state of each rank of this node of which one is known, or that says nothing although it is alive."""
        if board is None:
            return (own,)
        said = dict(self._said(board.states()))
        found = {own.rank: own}
        for process in board.processes():
            state = _state_of(process, said.get(process.pid), own.node)
            if state is None and tell_silent:
                state = HangState(process.rank, own.node, COMPUTE, state=SILENT)
            known = found.get(process.rank)
            if state is not None and (known is None or (known.process != ALIVE and state.process == ALIVE)):
                found[process.rank] = state
        return tuple(found[rank] for rank in sorted(found))

    def _said(self, rows: Iterable[dict[str, Any]]) -> Iterable[tuple[int, HangState]]:
        for row in rows:
            try:
                pid, age = int(row["pid"]), (self._now() - int(row["at_ns"])) / NS
                (state,) = from_rows([row])
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
            # Of a process that is stopped, what it said last is all there is.
            yield pid, state if age < _OLD_SECONDS else replace(state, stuck=False, waits=False, where=None, call=None)

    def _decide(self, around: HangSurroundings) -> None:
        assert self._began_ns is not None  # noqa: S101 - set by the caller
        passed = (self._now() - self._began_ns) / NS
        states = [*self.local, *around.elsewhere]
        states = [state for state in states if state.rank < max(around.world_size, 1)]
        found = decide(states, around.world_size)
        if found is None:
            return
        if passed < (_PATIENCE_SECONDS if found.silent else _SETTLE_SECONDS if any(map(_may_go_on, states)) else 0.0):
            return
        ranks = tuple(suspect.rank for suspect in found.suspects)  # not their places: one that computes has many
        key = (found.kind, ranks, tuple((w.ranks, w.collective, w.sequence) for w in found.waiting))
        if key == self._written:
            return
        self._since = self._since or self._clock(found.seconds)
        self._verdict = with_sentence(found, self._since[11:19])
        self._written = key
        if self._lines < _MAX_LINES:
            self._lines += 1
            recorder = {"recorder": _RECORDER_OFF} if self._recorder() == "off" else {}
            self._emit("hang", {"since": self._since} | self._verdict.fields() | recorder)

    def _end(self, around: HangSurroundings) -> None:
        """Nothing hangs any more. It is over once steps end again; else the processes are about to end."""
        if around.board is not None and self._rank is not None:
            around.board.take_back(self._rank)
        if self._verdict is not None:
            self._over = {"since": self._since, "kind": self._verdict.kind, "over": True}
        self._began_ns = self._said_ns = self._rank = self._written = self._verdict = None
        self._lines, self._since, self.local = 0, "", ()


def _may_go_on(state: HangState) -> bool:
    return state.process == ALIVE and not state.stuck and not state.waits and state.doing in {COMPUTE, DATA_WAIT}


def _state_of(process: RankProcess, said: HangState | None, node: str) -> HangState | None:
    """What is known of a process of this node; None of one that is alive and has said nothing yet."""
    silent = HangState(process.rank, node, ENDED)
    if process.ended:
        return silent
    if not process.state:
        return replace(silent, doing=COMPUTE, process=GONE)
    if process.state in "Tt":
        return replace(said or replace(silent, doing=COMPUTE), rank=process.rank, process=STOPPED, stuck=False)
    return said
