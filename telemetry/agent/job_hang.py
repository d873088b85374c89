"""Why the whole job hangs: every rank publishes what it does, and the rank that serves its node decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.diagnosis.hangs import ALIVE, ENDED, GONE, LEFT, SILENT, STOPPED, HangState, decide
from telemetry.model.records import CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER
from telemetry.seams.collectives import awaited
from telemetry.sources.proc import thread_state
from telemetry.sources.stuck_stacks import place_of, stack_hash
from telemetry.util.clock import NS, now_ns
from telemetry.util.stacks import stack_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.agent.event_log import EventLog
    from telemetry.agent.stall_monitor import StallMonitor
    from telemetry.diagnosis.hangs import HangVerdict
    from telemetry.log.lines import HangLine
    from telemetry.loop.ledger import Accounting
    from telemetry.node.board import Board, RankHead
    from telemetry.node.peers import JobLink
    from telemetry.seams.tracker import StepTracker
    from telemetry.util.clock import WallClock
    from telemetry.util.identity import Identity

# -- the numbers -------------------------------------------------------------------------------------------------------
# `tests.faults.hang_campaign` has the verdicts that they lead to.

_SETTLE_SECONDS: Final = 3.0
"""Ranks do not all become stuck at the same moment. For this time after the first one, no verdict is made while a rank
may still go on."""

_PATIENCE_SECONDS: Final = 15.0
"""A rank that has published nothing for this long does not answer. After this time, a verdict is written even if some
ranks are still unknown: collectives end after minutes, and with them the processes."""

_MAX_LINES: Final = 20
"""A hang has at most this many log lines. The verdict may change while ranks end one after the other."""

_RECORDER_OFF: Final = (
    "off; start the job with TORCH_FR_BUFFER_SIZE=2000, and torch records the collectives of each rank"
)


# -- this rank ---------------------------------------------------------------------------------------------------------


class OwnState:
    """Reads what the training thread of this rank does while the job hangs.

    Args:
        identity: this process.
        tracker: the state of the training thread.
        accounting: has the ledger's category.
        stalls: whether this rank is stuck.

    Attributes:
        recorder_is_off: whether torch's recorder was off at the newest reading.
    """

    def __init__(self, identity: Identity, tracker: StepTracker, accounting: Accounting, stalls: StallMonitor) -> None:
        self.identity = identity
        self._tracker = tracker
        self._accounting = accounting
        self._stalls = stalls
        self.recorder_is_off = False

    @property
    def node_hangs(self) -> bool:
        """Whether this rank or another one that it knows is stuck."""
        return self._stalls.job_hangs

    @property
    def steps(self) -> int:
        """Steps of this rank that have ended."""
        return self._accounting.steps_total

    def read(self) -> HangState:
        """The current state. Takes about a tenth of a millisecond."""
        monitor, stack = self._stalls.stuck_monitor, stack_of(self._tracker.thread)
        state, doing = thread_state("self", self._tracker.native_thread), self._doing()
        at = monitor.fetch if monitor.fetch is not None and doing == DATA_WAIT else place_of(stack)
        found = awaited(stack, state, fetching=doing == DATA_WAIT)
        self.recorder_is_off = found.recorder_is_off
        return HangState(
            rank=self.identity.rank,
            node=self.identity.node,
            doing=doing,
            process=ALIVE,
            stuck=self._stalls.stuck is not None,
            seconds=round(monitor.seconds, 1),
            waits=found.waits,
            where=at.where,
            call=at.call,
            state=at.state or state,
            stack=stack_hash(stack),
            steps=self.steps,
            collective=found.collective,
        )

    def _doing(self) -> str:
        """The ledger's category, or `LEFT` after a loop."""
        tracker, category = self._tracker, self._accounting.ledger.category
        in_no_loop = category == OTHER and not tracker.explicit and not tracker.in_phase
        left = tracker.loop_left and category not in {EVALUATION, CHECKPOINT, DATA_WAIT}
        return LEFT if left or in_no_loop else category


# -- the job -----------------------------------------------------------------------------------------------------------


class JobHang:
    """One rank's part in finding out why the job hangs. Runs on the agent thread.

    Args:
        own: reads the state of this rank.
        event_log: gets the verdict.
        wall: dates the beginning of the hang.
        board: the board of this node; None without one.
        job: has the ranks of the other nodes; None without a board.
        mono_ns: the clock of the board.

    Attributes:
        state: what this rank does while the job hangs, to be published; else None.
        verdict: why the job hangs; None while nothing does, and on ranks that do not serve their node.
    """

    def __init__(
        self,
        own: OwnState,
        event_log: EventLog,
        wall: WallClock,
        board: Board | None,
        job: JobLink | None,
        *,
        mono_ns: Callable[[], int] = now_ns,
    ) -> None:
        self._own = own
        self._event_log = event_log
        self._wall = wall
        self._board = board
        self._job = job
        self._now = mono_ns
        self._began_ns: int | None = None
        self._written: object = None
        self._lines = 0
        self._since = ""
        self._steps = 0
        self._over: HangLine | None = None
        self.state: HangState | None = None
        self.verdict: HangVerdict | None = None

    def tick(self) -> None:
        """Publish the state of this rank while a rank of the job is stuck, and decide if this rank serves its node.

        It does nothing in a calm run.
        """
        job, world_size = self._job, self._own.identity.world_size
        if not (self._own.node_hangs or (job is not None and job.stuck_elsewhere)):
            self._end()
            return
        if self._began_ns is None:
            self._began_ns, self._steps, self._over = self._now(), self._own.steps, None
        passed = (self._now() - self._began_ns) / NS
        self.state = own = self._own.read()
        if world_size == 1 or (self._board is not None and self._board.leads):
            local = self._of_node(own, name_silent=passed > _PATIENCE_SECONDS)
            elsewhere: tuple[HangState, ...] = ()
            if job is not None:
                job.local, elsewhere = local, job.elsewhere
            self._decide((*local, *elsewhere), world_size, passed)

    @property
    def sentence(self) -> str:
        """Why the job hangs, on the rank that serves its node. Empty if it does not, or if no rank waits."""
        verdict = self.verdict
        return verdict.sentence(self._since) if verdict is not None and verdict.waiting else ""

    def _of_node(self, own: HangState, *, name_silent: bool) -> tuple[HangState, ...]:
        """The states of the ranks of this node. ``name_silent``: include living ranks that have published nothing."""
        found = [own]
        for head in [] if self._board is None else self._board.heads():
            state = self._state_of(head, own.node)
            if state is None and name_silent:
                state = HangState(head.rank, own.node, COMPUTE, state=SILENT)
            if state is not None and head.rank != own.rank:
                found.append(state)
        return tuple(found)

    def _state_of(self, head: RankHead, node: str) -> HangState | None:
        """The state of a process of this node; None for a living one that has published nothing of this hang yet."""
        letter = head.process_state
        if head.ended:
            return HangState(head.rank, node, ENDED)
        if not letter:
            return HangState(head.rank, node, COMPUTE, GONE)
        said = head.hang if self._now() - head.at_ns < _PATIENCE_SECONDS * NS else None
        if letter in "Tt":
            said = structs.replace(said or HangState(head.rank, node, COMPUTE), process=STOPPED, stuck=False)
        return said

    def _decide(self, states: tuple[HangState, ...], world_size: int, passed: float) -> None:
        found = decide([state for state in states if state.rank < max(world_size, 1)], world_size)
        if found is None:
            return
        if passed < (_PATIENCE_SECONDS if found.silent else _SETTLE_SECONDS if any(map(_may_go_on, states)) else 0.0):
            return
        ranks = tuple(suspect.rank for suspect in found.suspects)  # without their places: a computing rank has many
        key = (found.kind, ranks, tuple((w.ranks, w.collective, w.sequence) for w in found.waiting))
        if key == self._written:
            return
        self._since = self._since or self._wall.iso(self._now() - int(found.seconds * NS))
        self._written, self.verdict = key, found
        if self._lines < _MAX_LINES:
            self._lines += 1
            self._event_log.write(found.line(self._since, _RECORDER_OFF if self._own.recorder_is_off else ""))

    def _end(self) -> None:
        """End a hang. It is over if steps end again; otherwise the processes are about to end."""
        if self._began_ns is not None:
            if self._job is not None:
                self._job.local = ()
            if self.verdict is not None:
                self._over = self.verdict.over(self._since)
            self._began_ns = self.state = self._written = self.verdict = None
            self._lines, self._since = 0, ""
        if self._over is not None and self._own.steps > self._steps:
            self._event_log.write(self._over)
            self._over = None


def _may_go_on(state: HangState) -> bool:
    return state.process == ALIVE and not state.stuck and not state.waits and state.doing in {COMPUTE, DATA_WAIT}
