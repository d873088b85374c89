"""What the training thread of this rank does while the job hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from telemetry.collect.flight_recorder import FlightRecorder
from telemetry.collect.stuck_place import collective_in, in_backward, place_of, stack_hash
from telemetry.core.hang_records import ALIVE, LEFT, Collective, HangState
from telemetry.records import DATA_WAIT, OTHER
from telemetry.sources.proc import thread_state
from telemetry.util.stacks import stack_of

if TYPE_CHECKING:
    from telemetry.agent.accounting import Accounting
    from telemetry.agent.hang_monitor import Hang
    from telemetry.collect.stuck_place import StuckPlace
    from telemetry.hooks.tracker import StepTracker
    from telemetry.util.processes import Identity


class RankStateReader:
    """Reads it on the agent thread, in about a tenth of a millisecond.

    Args:
        tracker: knows the training thread.
        accounting: knows what it does, in the words of the ledger.

    Attributes:
        recorder: of torch's flight recorder: ``on``, ``off`` or ``absent``; None where torch.distributed is not in use.
    """

    def __init__(self, tracker: StepTracker, accounting: Accounting) -> None:
        self._tracker = tracker
        self._accounting = accounting
        self._flight_recorder = FlightRecorder()
        self.recorder: str | None = None

    def read(self, identity: Identity, hang: Hang | None, fetch: StuckPlace | None, still_seconds: float) -> HangState:
        """The state of this moment.

        Args:
            identity: of this rank.
            hang: of this rank; None without one.
            fetch: where a worker stands that has been in a fetch since then.
            still_seconds: since the training thread last went on.
        """
        tracker = self._tracker
        stack = stack_of(tracker.thread)
        recorded = self._flight_recorder.read()
        self.recorder = recorded.recorder if recorded is not None else None
        called = collective_in(stack)
        waits, newest = called is not None, recorded.newest if recorded is not None else None
        pending = recorded.pending if recorded is not None else None
        state = thread_state("self", tracker.native_thread)
        if in_backward(stack):  # it computes, unless a collective has not ended or the thread is off the CPU
            waits = pending if pending is not None else not state.startswith("running")
        elif pending and called is None and self._accounting.ledger.category != DATA_WAIT:
            waits = True  # a GPU's collective: the thread itself may be anywhere
        if waits and called and (newest is None or not newest.name):
            newest = Collective(called, newest.sequence if newest is not None else None, newest.group if newest else "")
        doing = self._doing()
        place = fetch if fetch is not None and doing == DATA_WAIT else place_of(stack)
        return HangState(
            rank=identity.rank,
            node=identity.node,
            doing=doing,
            process=ALIVE,
            stuck=hang is not None,
            seconds=round(max(still_seconds, hang.seconds if hang is not None else 0.0), 1),
            waits=waits,
            where=place.where,
            call=place.call,
            state=place.state or state,
            stack=stack_hash(stack),
            steps=self._accounting.steps_total,
            collective=newest if waits else None,
        )

    def _doing(self) -> str:
        """What it does, in the words of the ledger; `LEFT` after a loop."""
        tracker, category = self._tracker, self._accounting.ledger.category
        in_no_loop = category == OTHER and not tracker.explicit and not tracker.in_phase
        left = tracker.loop_left and category not in {"evaluation", "checkpoint", DATA_WAIT}
        return LEFT if left or in_no_loop else category
