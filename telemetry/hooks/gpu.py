"""Exposed wait, on the GPU's own clock."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple, Protocol

from telemetry.hooks.patching import keep, release
from telemetry.util.clock import NS, now_ns

BUDGET_RATIO: Final = 0.001
"""The share of a step that timing it may cost."""

_POOL: Final = 8
_SMOOTHING: Final = 0.1
_MAX_THINNING: Final = 1000
_BOTH_HALVES: Final = 1.5  # the measured half also reads an old pair; the other half only records
# A wait on the GPU cannot be longer than the host's wait, except for a launch's latency and the events' 0.5 us grain.
_TOLERANCE_SECONDS: Final = 0.001
_MAX_SKIPPED: Final = 20


class DeviceStream(NamedTuple):
    """Where the work of a thread goes: index of the device, and number of the stream."""

    device: int
    stream: int


class ClockedDevice(Protocol):
    """What a clock needs from a device."""

    def event(self) -> Any:
        """A new timing event."""

    def begin(self) -> DeviceStream | None:
        """Announce calls. Returns the stream of this thread's work; None if no call may be made now."""

    def end(self) -> None:
        """End the calls. Follows every `begin`."""


class _Pair(NamedTuple):
    """Two events of one device, in its stream ``place``. An event belongs to the device it was first recorded on."""

    before: Any
    after: Any
    place: DeviceStream
    at_boundary: bool


class GpuClock:
    """Times waits of the training thread with pairs of events. Only some steps are timed, see `BUDGET_RATIO`.

    Args:
        device: the device whose events are used.

    Attributes:
        sampled_ns: exposed wait and host wait of the pairs of ordinary steps that were read.
        boundary_ns: the same at epoch boundaries, where every wait is timed.
        pairs: how many pairs were read.
        distrusted: pairs that were dropped because they contradict the host's clock.
        skipped: waits that should have been timed, but were on another stream than the step's work.
        failed: whether a call to the device raised. The clock is not used any more.
    """

    __slots__ = (
        "_armed",
        "_cost_ns",
        "_device",
        "_events",
        "_free",
        "_last_request",
        "_pending",
        "_skip",
        "_step_ns",
        "_worked_in",
        "boundary_ns",
        "distrusted",
        "failed",
        "pairs",
        "sampled_ns",
        "skipped",
    )

    def __init__(self, device: ClockedDevice) -> None:
        self._device = device
        self._events: list[Any] = []  # all events
        self._free: dict[int, list[tuple[Any, Any]]] = {}  # unused pairs by device
        self._pending: deque[tuple[_Pair, int]] = deque()
        self._armed: _Pair | None = None
        self._worked_in: DeviceStream | None = None
        self._skip = 0
        self._cost_ns = 20_000.0  # an estimate until it is measured
        self._step_ns = 0.0
        self._last_request = 0
        self.sampled_ns = (0, 0)
        self.boundary_ns = (0, 0)
        self.pairs = 0
        self.distrusted = 0
        self.skipped = 0
        self.failed = False

    @property
    def on_another_stream(self) -> bool:
        """Whether no wait of an ordinary step could be timed, because all of them were on another stream."""
        return not self.sampled_ns[1] and self.skipped + self.distrusted >= _MAX_SKIPPED

    def worked(self) -> None:
        """Note the stream of this thread's work as that of the training: the optimizer has stepped.

        It holds for one request only: a graph that was captured before the agent came calls no optimizer, and may run
        in another stream than the one it was captured in.
        """
        if self._skip > 0:
            return  # the next request is not timed
        try:
            self._worked_in = self._device.begin()
        finally:
            self._device.end()

    def step_ended(self) -> None:
        """Mark the end of the step's work if this step is to be timed. The next batch is about to be requested."""
        if self._skip > 0:
            self._skip -= 1
            return
        start = now_ns()
        try:
            place = self._device.begin()
            if place is None:
                self._last_request = 0
                return
            thinning = self._thinning()
            if self._last_request:
                self._step_ns += _SMOOTHING * ((start - self._last_request) / thinning - self._step_ns)
            self._last_request = start
            self._arm(place, at_boundary=False)
        finally:
            self._device.end()
        self._skip = self._thinning() - 1
        self._cost_ns += _SMOOTHING * (_BOTH_HALVES * (now_ns() - start) - self._cost_ns)

    def epoch_boundary(self) -> None:
        """Mark the start of an iteration, or a request outside of ordinary steps. These are rare, so each is timed."""
        self._last_request = 0
        try:
            place = self._device.begin()
            if place is not None:
                self._arm(place, at_boundary=True)
        finally:
            self._device.end()

    def batch_arrived(self, start: int, end: int) -> None:
        """Mark the moment from which the GPU can have work again: the wait is over.

        Args:
            start: start of the wait, monotonic ns.
            end: end of the wait, monotonic ns.
        """
        pair, self._armed = self._armed, None
        if pair is None:
            return
        try:
            place = self._device.begin()
            if place == pair.place:
                pair.after.record()
                self._pending.append((pair, end - start))
                return
        finally:
            self._device.end()
        self.skipped += place is not None  # None: a capture began inside the loader
        self._give_back(pair)

    def release(self) -> None:
        """Release every event. Must not be called in a forked child."""
        events, self._events = self._events, []
        self._free, self._pending, self._armed = {}, deque(), None
        for event in events:
            release(event)

    def _arm(self, place: DeviceStream, *, at_boundary: bool) -> None:
        worked_in, self._worked_in = self._worked_in, None
        if self._armed is not None:  # no batch came after the last mark
            self._give_back(self._armed)
            self._armed = None
        self._collect()
        if len(self._pending) >= _POOL:
            return  # the GPU is far behind, so it does not wait for data
        if worked_in is not None and worked_in != place:
            self.skipped += 1
            return
        free = self._free.setdefault(place.device, [])
        before, after = free.pop() if free else (self._new_event(), self._new_event())
        before.record()
        self._armed = _Pair(before, after, place, at_boundary)

    def _new_event(self) -> Any:
        event = self._device.event()
        keep(event)  # first, because a fork may come at any moment
        self._events.append(event)
        return event

    def _give_back(self, pair: _Pair) -> None:
        self._free.setdefault(pair.place.device, []).append((pair.before, pair.after))

    def _collect(self) -> None:
        while self._pending:
            pair, host_wait = self._pending[0]
            if not pair.after.query():
                return
            self._pending.popleft()
            exposed = pair.before.elapsed_time(pair.after) / 1e3
            if 0.0 <= exposed <= host_wait / NS + _TOLERANCE_SECONDS:
                read = (min(int(exposed * NS), host_wait), host_wait)
                if pair.at_boundary:
                    self.boundary_ns = (self.boundary_ns[0] + read[0], self.boundary_ns[1] + read[1])
                else:
                    self.sampled_ns = (self.sampled_ns[0] + read[0], self.sampled_ns[1] + read[1])
                self.pairs += 1
            else:
                self.distrusted += 1
            self._give_back(pair)

    def _thinning(self) -> int:
        """The number of steps of which one is timed."""
        if self._step_ns <= 0:
            return 1
        return min(_MAX_THINNING, max(1, round(self._cost_ns / (BUDGET_RATIO * self._step_ns))))
