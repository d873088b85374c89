"""Exposed wait, on the GPU's own clock.

At the request for a batch one event goes into the stream, behind all the work of the step; when the batch has come,
another. The GPU reaches the first when it has finished the step and the second when the next work may begin: the
time between the two is what it had nothing to do, however long the host waited. No synchronise is needed; a pair is
read some steps later, when it has long passed.

Events are touched on the training thread only: a query from another thread invalidates a graph capture in progress.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from telemetry.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGET_RATIO: Final = 0.001
"""Share of the step that timing it may cost."""

_POOL: Final = 8
_SMOOTHING: Final = 0.1
_MAX_THINNING: Final = 1000
_BOTH_HALVES: Final = 1.5  # the half that is measured also reads an old pair; the other only records
# A wait on the GPU cannot be longer than the host's, but for the latency of one launch and the events' 0.5 us grain.
_TOLERANCE_SECONDS: Final = 0.001


class GpuClock:
    """Pairs of events around the waits of the training thread, thinned out to stay within `BUDGET_RATIO`.

    Args:
        new_event: makes a timing event (``torch.cuda.Event(enable_timing=True)``).
        usable: whether events may be recorded right now: CUDA is initialised and no stream is capturing.

    Attributes:
        sampled_ns: exposed wait and host wait of the thinned-out pairs that were read.
        edge_ns: the same of the pairs around an iteration's start and end, each of which is timed.
        pairs: how many pairs were read.
        distrusted: pairs that were thrown away because they contradict the host's clock.
    """

    __slots__ = (
        "_armed",
        "_cost_ns",
        "_free",
        "_last_request",
        "_new_event",
        "_pending",
        "_skip",
        "_step_ns",
        "_usable",
        "distrusted",
        "edge_ns",
        "pairs",
        "sampled_ns",
    )

    def __init__(self, new_event: Callable[[], Any], usable: Callable[[], bool]) -> None:
        self._new_event = new_event
        self._usable = usable
        self._free: list[tuple[Any, Any]] = []
        self._pending: deque[tuple[Any, Any, int, bool]] = deque()
        self._armed: tuple[Any, Any, bool] | None = None
        self._skip = 0
        self._cost_ns = 20_000.0  # until it has been measured
        self._step_ns = 0.0
        self._last_request = 0
        self.sampled_ns = (0, 0)
        self.edge_ns = (0, 0)
        self.pairs = 0
        self.distrusted = 0

    def step_ended(self) -> None:
        """The next batch is about to be requested: mark the end of the step's work, if it is this step's turn."""
        if self._skip > 0:
            self._skip -= 1
            return
        start = now_ns()
        if not self._usable():
            self._last_request = 0
            return
        thinning = self._thinning()
        if self._last_request:
            self._step_ns += _SMOOTHING * ((start - self._last_request) / thinning - self._step_ns)
        self._last_request = start
        self._arm(edge=False)
        self._skip = self._thinning() - 1
        self._cost_ns += _SMOOTHING * (_BOTH_HALVES * (now_ns() - start) - self._cost_ns)

    def edge(self) -> None:
        """An iteration begins, or a request that is no ordinary step's: rare, so each is timed."""
        self._last_request = 0
        if self._usable():
            self._arm(edge=True)

    def batch_arrived(self, start: int, end: int) -> None:
        """The wait is over: mark the moment from which the GPU can have work again. Stamps are the host's."""
        armed = self._armed
        if armed is None:
            return
        self._armed = None
        if not self._usable():
            return  # a capture began inside the loader: this pair is not comparable
        before, after, edge = armed
        after.record()
        self._pending.append((before, after, end - start, edge))

    def _arm(self, *, edge: bool) -> None:
        self._collect()
        if len(self._pending) >= _POOL:
            return  # the GPU is that far behind: nothing waits for data
        before, after = self._free.pop() if self._free else (self._new_event(), self._new_event())
        before.record()
        self._armed = (before, after, edge)

    def _collect(self) -> None:
        while self._pending:
            before, after, host_wait, edge = self._pending[0]
            if not after.query():
                return
            self._pending.popleft()
            exposed = before.elapsed_time(after) / 1e3
            if 0.0 <= exposed <= host_wait / 1e9 + _TOLERANCE_SECONDS:
                read = (min(int(exposed * 1e9), host_wait), host_wait)
                if edge:
                    self.edge_ns = (self.edge_ns[0] + read[0], self.edge_ns[1] + read[1])
                else:
                    self.sampled_ns = (self.sampled_ns[0] + read[0], self.sampled_ns[1] + read[1])
                self.pairs += 1
            else:
                self.distrusted += 1
            if len(self._free) < _POOL:
                self._free.append((before, after))

    def _thinning(self) -> int:
        """Every how many steps one is timed."""
        if self._step_ns <= 0:
            return 1
        return min(_MAX_THINNING, max(1, round(self._cost_ns / (BUDGET_RATIO * self._step_ns))))
