"""Finds the asynchronous device that the training uses, and measures the exposed wait on its clock.

It never imports torch and never initialises a device.
"""

from __future__ import annotations

import sys
from collections import deque
from math import ceil
from random import Random
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.safety.errors import let_pass
from telemetry.seams.patching import WeakMap, keep
from telemetry.seams.ring import STRIDE
from telemetry.util.clock import NS, now_ns, sleep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from telemetry.seams.state import StepState

CUDA: Final = "cuda"

HOST: Final = frozenset({"cpu", "meta"})
_MODULES: Final = (CUDA, "xpu", "npu", "hpu", "mlu", "musa", "mtia", "maia")
"""Types of devices whose module in torch may report whether the device is initialised."""

_BATCHED: Final = frozenset({"xla", "hpu"})
"""These queue operations and run them later. Their events have the time of recording, not of execution."""


def device_in_use(trained_on: str | None) -> str | None:
    """The type of the asynchronous device that the training uses, such as ``cuda``; None if the host computes.

    ``trained_on``: the type of device that holds the optimizer's parameters; None until it is known.
    """
    if trained_on is not None and trained_on not in HOST:
        return trained_on
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    for name in _names(torch):
        if _says_yes(getattr(vars(torch).get(name), "is_initialized", None)):
            return name
    if trained_on is None:  # no torch optimizer has stepped yet
        xla = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
        if _says_yes(getattr(xla, "_xla_runtime_is_initialized", None)):
            return "xla"
    return None


def cuda() -> Any | None:
    """``torch.cuda`` if torch is loaded and CUDA initialised, else None."""
    torch = sys.modules.get("torch")
    module = getattr(torch, "cuda", None)
    try:
        return module if module is not None and module.is_initialized() else None
    except Exception:
        return None  # torch is being imported


def cuda_device(module: Any | None, state: StepState) -> int | None:
    """The index of the CUDA device that the training uses; None if it uses none, or that is not known yet.

    A process with one device uses that one. With several, the current device of the asking thread says nothing.
    ``module``: the result of `cuda`.
    """
    if module is None or state.accelerator not in {None, CUDA}:
        return None
    return 0 if state.device is None and module.device_count() == 1 else state.device


def _names(torch: ModuleType) -> Iterator[str]:
    yield from _MODULES
    try:
        yield str(torch._C._get_privateuse1_backend_name())  # a device that an extension adds to torch
    except Exception:
        return  # torch is half imported


def _says_yes(question: Callable[[], object] | None) -> bool:
    try:
        return question is not None and question() is True
    except Exception as error:
        let_pass(error)
        return False


# -- captures of CUDA graphs in progress in this process, on any thread ------------------------------------------------
# In torch's default capture mode, "global", a capture fails if any thread makes a call that CUDA considers unsafe, such
# as the query of an event. Torch only reports captures on the calling thread's own stream. So the start and the end of
# every capture are recorded here.

_MAX_NS: Final = NS
"""A capture waits at most this long for a call of the agent to return. Such a call takes microseconds."""


def stream_captures(module: Any, device: int | None) -> bool:
    """Whether a graph is being captured on the calling thread's stream of a device. ``module``: such as `torch.cuda`.

    Torch only tells it of the current device, and would begin to use that.
    """
    capturing = getattr(module, "is_current_stream_capturing", None)
    return capturing is not None and module.current_device() == device and bool(capturing())


class Captures:
    """Tracks the captures.

    Each side first announces what it is about to do and then checks the other side. So no event is used during a
    capture, even if both begin at the same moment.

    Attributes:
        graphs: the graphs that are being captured.
        touching: ident of the thread that uses the device for the agent right now; 0 for none.
    """

    def __init__(self) -> None:
        self.graphs: WeakMap[None] = WeakMap()
        self.touching = 0

    @property
    def under_way(self) -> bool:
        """Whether a graph is being captured."""
        return len(self.graphs) > 0

    def begin(self, graph: Any) -> None:
        """Announce a capture, and wait for a call of the agent to return."""
        self.graphs[graph] = None
        deadline = now_ns() + _MAX_NS
        while self.touching not in {0, get_ident()} and now_ns() < deadline:
            sleep(0.0001)


# -- timing events -----------------------------------------------------------------------------------------------------


class DeviceStream(NamedTuple):
    """The device (its index) and the stream (its number) that get a thread's work."""

    device: int
    stream: int


_BLOCKED: Final = 8
"""A call that takes so many times as long as the shortest one has waited in the queue of launches."""


class DeviceEvents:
    """Timing events of one type of device. Used only on the training thread.

    They are recorded in the current stream of the device that holds the optimizer's parameters, which need not be the
    current device: with ``model.to("cuda:3")`` alone, that stays device 0. Its stream is idle, and a first call to it
    would take about 500 MiB of its memory. The tracker has the index of the device, once it is known.
    """

    def __init__(self, torch: ModuleType, name: str, captures: Captures, tracker: StepState) -> None:
        self._module: Any = vars(torch).get(name)
        self._generic: Any = vars(torch).get("accelerator")
        self._torch, self._name = torch, name
        self._captures = captures
        self._tracker = tracker
        self._stream: Any = None
        self._usual_ns = 0  # of the shortest call of an event's ``record``
        self._blocked_ns = 0

    def event(self) -> Any:
        """Make an event with timing. Raises what torch raises if the device has no events."""
        if self._name == CUDA:
            return self._module.Event(enable_timing=True)
        return self._torch.Event(device=self._name, enable_timing=True)

    def begin(self) -> DeviceStream | None:
        """Announce calls; `end` must follow. Returns the stream of this thread's work.

        It is None if calls are forbidden, or while it is not known which device is in use.
        """
        self._captures.touching = get_ident()
        index = self._tracker.device
        if index is None or self._captures.under_way:
            return None
        module = self._module
        initialised = getattr(module, "is_initialized", None)
        if initialised is not None and not initialised():
            return None
        if stream_captures(module, index):
            return None
        self._stream = (module if hasattr(module, "current_stream") else self._generic).current_stream(index)
        return DeviceStream(self._stream.device_index, self._stream.stream_id)

    def record(self, event: Any) -> None:
        """Record an event in the stream that `begin` has returned."""
        began = now_ns()
        event.record(self._stream)
        took = now_ns() - began
        self._usual_ns = min(self._usual_ns or took, took)
        self._blocked_ns += max(0, took - _BLOCKED * self._usual_ns)

    def take_blocked(self) -> int:
        """Nanoseconds since the last call for which events waited in a full queue of launches.

        They cost nothing: the script's next launch would have waited instead.
        """
        blocked, self._blocked_ns = self._blocked_ns, 0
        return blocked

    def end(self) -> None:
        """Announce that the calls are over."""
        self._captures.touching = 0


def timed(torch: ModuleType, name: str) -> bool:
    """Whether torch reports events that can time the work of a type of device."""
    if name in _BATCHED:
        return False
    if name == CUDA:
        return True
    module, generic = vars(torch).get(name), vars(torch).get("accelerator")
    streams = hasattr(module, "current_stream") or hasattr(generic, "current_stream")
    return "Event" in vars(torch) and streams


# -- the clock ---------------------------------------------------------------------------------------------------------

BUDGET_RATIO: Final = 0.001
_BUDGET_NS: Final = 10_000
"""Timed waits may cost this share of the steps, but on average no more than 10 us a step. One took 20 to 80 us with the
slow path of the hooks (CUDA build of torch 2.13, host's part)."""

_MAX_GAP_NS: Final = NS
"""One wait in a second is timed in any case: steps may be long, or become longer than those that set the pace."""

_POOL: Final = 8
_SMOOTHING: Final = 0.1
_STOPPED: Final = 2.0
_MAX_RETRY: Final = 4
_LONGEST: Final = 8.0  # times the usual one: in a longer step there was an evaluation or a checkpoint
# A wait on the GPU can exceed the host's wait only by a launch's latency and the events' 0.5 us grain.
_TOLERANCE_SECONDS: Final = 0.001
_MAX_SKIPPED: Final = 20


class _Pair(NamedTuple):
    """Two events of one device, in its stream ``place``. An event belongs to the device that first records it."""

    before: Any
    after: Any
    place: DeviceStream
    at_boundary: bool


_CLASS_BITS: Final = 18


def wait_class(ns: int) -> int:
    """The class of a wait by its length: 0 below 0.26 ms, and one more for each doubling."""
    return (ns >> _CLASS_BITS).bit_length()


class GpuClock:
    """Times waits of the training thread with pairs of events. Only some waits are timed, see `BUDGET_RATIO`.

    The number of steps between two timed ones is random. Long waits come once in as many steps as there are workers:
    with a fixed number they could be timed always or never. In a simulation of four workers, 0.8 s of 72 s were seen.
    They are counted by the entries of the ring, because the fast path calls nothing here.

    Attributes:
        due: a request is timed from this place in the ring on.
        sampled: exposed wait and host wait, in ns, of the ordinary steps whose pairs were read, by `wait_class`.
        at_boundary: the same for epoch boundaries, where every wait is timed, unless epochs are very short.
        pairs: how many pairs were read.
        distrusted: pairs that were dropped because they contradict the host's clock.
        skipped: waits that were not timed, because they were on another stream than the step's work.
        failed: whether a call to the device raised. Then the clock is not used any more.
    """

    def __init__(self, device: DeviceEvents, state: StepState) -> None:
        self._device = device
        self._state = state
        self._free: dict[int, list[tuple[Any, Any]]] = {}  # unused pairs by device
        self._pending: deque[tuple[_Pair, int]] = deque()
        self._armed: _Pair | None = None
        self._begun: set[int] = set()  # ids of the iterators that gave a batch since an iteration began
        self._worked_in: DeviceStream | None = None
        self.due = 0
        self._random = Random()  # noqa: S311, a generator of its own: the script's may be seeded
        self._cost_ns = 20_000.0  # of a timed wait: an estimate until it is measured
        self._spent_ns = 0  # on the wait that is timed now
        self._step_ns = 0.0
        self._last_request = self._last_head = 0
        self._begun_ns = 0  # when a wait was to be timed last
        self._retry = 1  # so many steps later, if calls to the device are forbidden now
        self._boundaries: deque[int] = deque(maxlen=2)  # when the newest ones were timed
        self.sampled: dict[int, tuple[int, int]] = {}
        self.at_boundary: dict[int, tuple[int, int]] = {}
        self.pairs = 0
        self.distrusted = 0
        self.skipped = 0
        self.failed = False

    @property
    def on_another_stream(self) -> bool:
        """Whether no wait of an ordinary step could be timed, because all were on another stream."""
        return not self.sampled and self.skipped + self.distrusted >= _MAX_SKIPPED

    def is_overdue(self) -> bool:
        """Whether no wait was timed for long. Then the next one on the slow path is. The agent thread calls it."""
        if now_ns() - self._begun_ns < _MAX_GAP_NS:
            return False
        self.due = 0
        return True

    def worked(self) -> None:
        """Note this thread's stream as that of the training, because the optimizer has stepped.

        This holds for one request only: a graph that was captured before the agent came calls no optimizer, and may run
        in another stream than the one it was captured in.
        """
        if self._state.ring.head < self.due:
            return  # the next request is not timed
        start = now_ns()
        try:
            self._worked_in = self._device.begin()
        finally:
            self._device.end()
            self._spent_ns += self._account(start)

    def requested(self, iterator_id: int | None, began: int) -> None:
        """Mark a request for a batch of an iterator; None for the start or the end of an iteration.

        The first request of an iterator is like the start of its iteration. ``began``: when the hooks' slow path began
        with it, monotonic ns.
        """
        if iterator_id in self._begun:
            self.step_ended(began)
            return
        self.epoch_boundary(began)
        if iterator_id is None:
            self._begun.clear()
        else:
            self._begun.add(iterator_id)

    def step_ended(self, began: int) -> None:
        """Mark the end of the work so far if this wait is timed, before the batch is requested. See `requested`."""
        head = self._state.ring.head
        if head < self.due:
            return
        if not self._begin(began, at_boundary=False):
            self._last_request = 0
            self.due = head + STRIDE * self._retry
            self._retry = min(2 * self._retry, _MAX_RETRY)
            return
        if self._last_request:
            step_ns = (began - self._last_request) / max(1, (head - self._last_head) // STRIDE)
            known = self._step_ns or step_ns
            self._step_ns = known + _SMOOTHING * (min(step_ns, _LONGEST * known) - known)
        self._last_request, self._last_head, self._retry = began, head, 1
        self.due = head + STRIDE * (1 + self._random.randrange(2 * self._thinning() - 1))

    def epoch_boundary(self, began: int) -> None:
        """Mark the start of an iteration, or its first request. These are rare, so each is timed. See `requested`.

        If two of them came a moment ago, as in a loop of ``next(iter(loader))``, it is like the request of any step.
        """
        if len(self._boundaries) == 2 and began - self._boundaries[0] < 2 * self._cost_ns / BUDGET_RATIO:
            self.step_ended(began)
            return
        self._boundaries.append(began)
        self._last_request = 0
        self._begin(began, at_boundary=True)
        self._spent_ns = 0

    def batch_arrived(self, start: int, end: int) -> None:
        """Mark the end of a wait (its stamps are monotonic ns), when the GPU can have work again.

        It also accounts for what the hooks' slow path has done since then.
        """
        pair, self._armed = self._armed, None
        if pair is not None:
            try:
                place = self._device.begin()
                if place == pair.place:
                    self._device.record(pair.after)
                    self._pending.append((pair, end - start))
            finally:
                self._device.end()
            if place != pair.place:
                self.skipped += place is not None  # None: a capture began inside the loader
                self._give_back(pair)
        spent, self._spent_ns = self._spent_ns, 0
        took = self._account(end)
        if spent:
            # The kernel has stopped the thread in one that took much longer than usual.
            self._cost_ns += _SMOOTHING * (min(spent + took, _STOPPED * self._cost_ns) - self._cost_ns)

    def _account(self, since_ns: int) -> int:
        """Count the time since a stamp as overhead. Returns it, in ns."""
        took = max(0, now_ns() - since_ns - self._device.take_blocked())
        self._state.overhead_ns += took
        return took

    def _begin(self, began: int, *, at_boundary: bool) -> bool:
        """Begin to time the wait that comes now. Returns whether calls to the device are allowed."""
        self._begun_ns = began
        try:
            place = self._device.begin()
            if place is not None:
                self._arm(place, at_boundary=at_boundary)
        finally:
            self._device.end()
            self._spent_ns += self._account(began)
        return place is not None

    def _arm(self, place: DeviceStream, *, at_boundary: bool) -> None:
        worked_in, self._worked_in = self._worked_in, None
        if self._armed is not None:  # no batch came after the last mark
            self._give_back(self._armed)
            self._armed = None
        self._collect()
        if len(self._pending) >= _POOL:
            # The GPU is behind. Perhaps it catches up in the wait that begins now, so a short one gives up its pair.
            shortest = min(self._pending, key=lambda read: read[1])
            self._pending.remove(shortest)
            self._give_back(shortest[0])
        if worked_in is not None and worked_in != place:
            self.skipped += 1
            return
        free = self._free.setdefault(place.device, [])
        before, after = free.pop() if free else (self._new_event(), self._new_event())
        self._device.record(before)
        self._armed = _Pair(before, after, place, at_boundary)

    def _new_event(self) -> Any:
        event = self._device.event()
        keep(event)  # at once, because a fork may come at any moment
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
                length, sums = wait_class(host_wait), self.at_boundary if pair.at_boundary else self.sampled
                earlier = sums.get(length, (0, 0))
                sums[length] = (earlier[0] + min(int(exposed * NS), host_wait), earlier[1] + host_wait)
                self.pairs += 1
            else:
                self.distrusted += 1
            self._give_back(pair)

    def _thinning(self) -> int:
        """Time one of this many waits on average."""
        if self._step_ns <= 0:
            return 1
        budget = min(BUDGET_RATIO * self._step_ns, _BUDGET_NS)
        return max(1, ceil(self._cost_ns / budget))
