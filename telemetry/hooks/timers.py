"""Times what holds the training thread up inside ``next()``: garbage collections, the sampler, freeing a batch."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections import UserDict, deque
from functools import partial
from itertools import repeat, takewhile
from operator import attrgetter, itemgetter, methodcaller
from threading import get_ident, get_native_id
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.hooks.patching import forget_frame, unseen
from telemetry.hooks.ring import MASK, S_COMPUTE, S_DATA_WAIT, STRIDE
from telemetry.util.clock import NS, clock_gettime_ns, now_ns, thread_clock, thread_time_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from telemetry.hooks.patching import Patches
    from telemetry.hooks.ring import Ring
    from telemetry.hooks.state import StepState

    _Seen = tuple[int, int, int, tuple[int, int], tuple[CodeType, int]]
    """thread; monotonic ns; the ring's head; end and code of the entry after the batch's own; the statement"""


# -- times garbage collections that stop the training thread -----------------------------------------------------------
# The callback in ``gc.callbacks`` consists of C functions that only take stamps. A signal that arrives during a
# collection waits for the next bytecode. If our code had it, the exception of the signal's handler (Ctrl-C) would be
# raised in the callback, and Python drops what a callback raises.
#
# A batch of hundreds of tensors can mean several collections, nearly all of them young ones of 10 to 70 us. Inside a
# step, Python takes up to 6 us for each of the two calls of a callback. So if there are many, the callback is there for
# one reading in several. In between, Python only counts them (`gc.get_stats`), and each is taken to cost what the timed
# ones have cost on average, young and full ones apart.

_MAX_STAMPS: Final = 1 << 12
"""Each collection has two stamps. With one reading a second there is room for a collection every 0.5 ms."""

_MANY: Final = 250
"""Collections in a second, on average, that are timed."""

_LONG_NS: Final = NS // 2000
"""Collections that are longer on average are all timed: our two calls take little of them, and samplers of lines have
to know when such a collection ended."""

_MAX_IN_A_ROW: Final = 30
"""At most so many readings in a row are not timed. If a full collection was missed and none is known, as many are timed
until there is one."""

_MIN_READING_SECONDS: Final = 0.5
"""After a shorter time, the rate of collections is not known."""

_MAX_CALL_NS: Final = 20_000
"""If a call takes longer, the kernel has stopped the thread in it."""

_CALL_PARTS: Final = 2
"""A call of the callback takes twice as long as the part of it between the two readings of the clock. Beside steps with
500 small tensors (`benchmarks.small_steps`) it took 2.8 us for both calls of a collection, and that part 1.5 us."""

_STATE: Final = attrgetter("category", "waiting_since", "batch_seen", "thread")
_AT_BOUNDARY: Final = attrgetter("at_boundary")


class _Stamp(NamedTuple):
    """The start or the end of a collection.

    Attributes:
        begins: whether this is the start.
        at_ns: monotonic ns.
        thread: ident of the collecting thread.
        ran_ns: CPU time of the training thread if another thread collects; reading it takes 2 µs.
        state: what the training thread was doing, as `_STATE` reads it.
        at_boundary: whether an iteration had begun or ended since the newest batch.
        done_ns: monotonic ns, when the rest was read.
    """

    begins: bool
    at_ns: int
    thread: int
    ran_ns: int
    state: tuple[int, int, bool, int]
    at_boundary: bool
    done_ns: int


class _Collection(NamedTuple):
    """A collection that stopped the training thread. ``own``: that thread collected."""

    ended_ns: int
    lost_ns: int
    own: bool
    in_wait: bool
    at_boundary: bool


class _Lost(NamedTuple):
    """Collections: how many, the time lost by them, and the parts of it in waits and in waits at epoch boundaries."""

    collections: int = 0
    ns: float = 0.0
    wait_ns: float = 0.0
    boundary_wait_ns: float = 0.0

    def of(self, collections: int) -> _Lost:
        """What as many collections lose on average; nothing if that is not known."""
        factor = collections / self.collections if self.collections else 0.0
        return _Lost(collections, *(part * factor for part in self[1:]))


class GarbageTimer:
    """Sums over the collections that stopped the training thread. The agent thread reads them.

    A collection on another thread holds the GIL, so it stops the training thread, too. It does not count while the
    training thread ran code that needs no GIL, or waited for a batch of its workers. During startup and evaluations no
    step loses time.

    Attributes:
        ns: time lost.
        wait_ns: time lost in requests for batches, except at epoch boundaries.
        boundary_wait_ns: time lost in requests at epoch boundaries.
        cost_ns: what the callback itself has cost.
        timing: whether collections are timed at present.
    """

    def __init__(self, state: StepState, sampler: SamplerTimer) -> None:
        self._stamps: deque[_Stamp] = deque(maxlen=_MAX_STAMPS)
        self._state = state
        self._sampler = sampler
        self._attached = False
        self._callback: Callable[..., object] | None = None
        self._read_until_ns = 0
        self._left = 0  # how many readings in a row are still as the newest one, timed or not
        self._counted = _counted()
        self._rated = sum(self._counted), now_ns()
        self._young = self._full = _Lost()  # the newest timed ones
        self._mean_ns = 0.0  # of the newest timed ones
        self._full_missed = False  # whether there was a full one, and none was timed
        self._cost_until_ns = 0
        self.ns = self.wait_ns = self.boundary_wait_ns = 0
        self.cost_ns = 0
        self.timing = True

    def attach(self, patches: Patches) -> None:
        """Add the callback. ``patches`` removes it."""
        self._attached = True
        patches.on_undo(self.detach)
        self.follow_thread()

    def follow_thread(self) -> None:
        """Take the calling thread as the training thread from now on."""
        if not self._attached:
            return
        self._remove()
        self._callback = self._noting_in(self._stamps)
        gc.callbacks.append(self._callback)
        self.timing = True

    def detach(self) -> None:
        """Remove the callback for good."""
        self._attached = False
        self._remove()

    def _remove(self) -> None:
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    @property
    def collecting(self) -> bool:
        """Whether the calling thread collects. True while that is not known, because not all collections are timed."""
        newest = [*self._stamps][-1:]
        return not self.timing or [(stamp[0], stamp[2]) for stamp in newest] == [(True, get_ident())]

    @property
    def ended_ns(self) -> int:
        """When the newest collection ended, monotonic; 0 before the first, and while one goes on."""
        begins, at_ns, *_ = self._stamps[-1] if self._stamps else (True, 0)
        return 0 if begins else at_ns

    def read(self, *, workers: bool) -> None:
        """Add up the collections that ended since the last call. ``workers``: whether workers fetch the batches."""
        counted = _counted()
        young, full = (new - old for new, old in zip(counted, self._counted, strict=True))
        self._counted = counted
        if self.timing:
            self._add_timed([*self._collections(self._read_until_ns, workers=workers)], young, full)
            self._add_cost()
        else:
            if self._state.stepping:
                self._add(self._young.of(young))
                self._add(self._full.of(full))
            self._full_missed = self._full_missed or (full > 0 and not self._full.collections)
        rated, rated_ns = self._rated
        seconds = (now_ns() - rated_ns) / NS
        if self._attached and seconds >= _MIN_READING_SECONDS:
            self._rated = sum(counted), now_ns()
            self._time_some((sum(counted) - rated) / seconds)

    def _add_timed(self, found: list[_Collection], young: int, full: int) -> None:
        self._add(_sum_of(found))
        self._mean_ns = _sum_of(found).ns / (young + full) if young + full else 0.0
        if found:
            self._read_until_ns = found[-1].ended_ns
        found.sort(key=attrgetter("lost_ns"), reverse=True)  # the full ones take longest
        if young:
            self._young = _sum_of(found[full:])._replace(collections=young)
        if full:
            self._full = _sum_of(found[:full])._replace(collections=full)
            self._left, self._full_missed = 0, False

    def _time_some(self, rate: float) -> None:
        """Decide whether the collections until the next reading are timed, at this rate of them."""
        self._left -= 1
        callback = self._callback
        if self._left > 0 or callback is None:
            return
        if not self.timing:
            self._read_until_ns, self.timing = now_ns(), True
            self._left = _MAX_IN_A_ROW if self._full_missed else 0
            gc.callbacks.append(callback)
            if not self._attached:  # since `read` has looked
                self._remove()
        elif rate > _MANY and self._mean_ns < _LONG_NS and gc.callbacks[-1:] == [callback]:
            # Only from the end of the list: a collection that goes through the list would leave one of the user's out.
            self.timing = False
            self._left = min(_MAX_IN_A_ROW, int(rate / _MANY))
            self._remove()

    def _add(self, lost: _Lost) -> None:
        self.ns += int(lost.ns)
        self.wait_ns += int(lost.wait_ns)
        self.boundary_wait_ns += int(lost.boundary_wait_ns)

    def _add_cost(self) -> None:
        """Add what the callback has cost since the last call."""
        stamps, until = [*self._stamps], self._cost_until_ns
        calls = [min(stamp[-1] - stamp[1], _MAX_CALL_NS) for stamp in stamps if stamp[1] > until]
        self.cost_ns += _CALL_PARTS * sum(calls)
        self._cost_until_ns = stamps[-1][1] if stamps else until

    def within_wait(self, since_ns: int) -> tuple[int, int]:
        """Collections since a stamp, while the calling training thread requested a batch of workers.

        Returns:
            Their time, and this thread's own part of it, ns.
        """
        inside = [each for each in self._collections(since_ns, workers=True) if each.in_wait]
        return sum(each.lost_ns for each in inside), sum(each.lost_ns for each in inside if each.own)

    def _noting_in(self, stamps: deque[_Stamp]) -> Callable[..., object]:
        """Make a callback for garbage collections of the calling thread, which appends the stamps."""
        begins, ends = (self._noting(stamps.append, begins=begins) for begins in (True, False))
        clock = type("GarbageClock", (), {"start": property(begins), "stop": property(ends)})()
        # Python calls this with the phase, "start" or "stop", and details: getattr(clock, phase, details).
        return partial(getattr, clock)

    def _noting(self, append: Callable[[Any], None], *, begins: bool) -> Callable[[object], object]:
        """Make a C function that appends a `_Stamp`, and ignores its only argument."""
        call, native = methodcaller("__call__"), get_native_id()
        clock = {True: partial(clock_gettime_ns, thread_clock(native)), False: int}
        exists = map(os.access, repeat(f"/proc/self/task/{native}"), repeat(os.F_OK))
        ran = partial(next, map(call, map(clock.get, exists)))
        stamp = zip(
            repeat(begins),
            iter(now_ns, None),
            iter(get_ident, None),
            map(call, map({get_ident(): int}.get, iter(get_ident, None), repeat(ran))),  # int() is 0
            map(_STATE, repeat(self._state)),
            map(_AT_BOUNDARY, repeat(self._sampler)),
            iter(now_ns, None),
            strict=False,
        )
        return partial(next, map(append, stamp))  # next(..., argument): the argument is the default, unused

    def _collections(self, since_ns: int, *, workers: bool) -> Iterator[_Collection]:
        newer = takewhile(lambda stamp: stamp[1] >= since_ns, reversed([*self._stamps]))
        began: _Stamp | None = None
        for stamp in map(_Stamp._make, reversed([*newer])):
            if began is not None and not stamp.begins:
                category, waiting_since, batch_seen, training = began.state
                own, asking = began.thread == training, waiting_since > 0 and batch_seen
                if (category == S_COMPUTE or (own and asking)) and (own or not (waiting_since and workers)):
                    lost = stamp.at_ns - began.at_ns - (stamp.ran_ns - began.ran_ns)
                    yield _Collection(stamp.at_ns, max(0, lost), own, asking, began.at_boundary)
            began = stamp if stamp.begins else None


def _counted() -> tuple[int, int]:
    """How many young and how many full collections there were in this process."""
    *young, full = (int(each["collections"]) for each in gc.get_stats())
    return sum(young), full


def _sum_of(collections: list[_Collection]) -> _Lost:
    lost = wait = boundary = 0
    for each in collections:
        lost += each.lost_ns
        if each.in_wait and each.at_boundary:
            boundary += each.lost_ns
        elif each.in_wait:
            wait += each.lost_ns
    return _Lost(len(collections), lost, wait, boundary)


# -- times what the training thread itself does inside ``next()`` if workers fetch -------------------------------------
# Mostly it runs the sampler: a DataLoader with workers draws the next indices on the thread that requests batches,
# before it returns a batch. That time adds to every step, however many workers there are. The iterator does it in
# ``_next_index``. To time it, a callable of ours is put into the iterator's own ``__dict__`` during one call of
# ``next()``: for a few batches a second, and at the start of an epoch. All other steps run torch's own code.

_NAME: Final = "_next_index"


class SamplerTimer:
    """Sums over timed waits, nanoseconds. Written on the training thread.

    Attributes:
        wanted: how many of the next batches to time. Set on the agent thread, and at the start of an epoch.
        at_boundary: whether an iteration has begun or ended since the newest batch. False before the first batch.
        batches: how many batches of workers were timed, without the first of each epoch.
        sampler_ns, sampler_cpu_ns: the sampler's time for them without garbage collections, on the wall clock and on
            this thread's CPU clock.
        receiving_cpu_ns: this thread's CPU time for the rest of these waits: to receive and unpickle the batch.
        boundary_sampler_ns, boundary_sampler_cpu_ns: the sampler's time at the start of every epoch except the first.
    """

    def __init__(self) -> None:
        self.wanted = 0
        self.at_boundary = False
        self.batches = 0
        self.sampler_ns = self.sampler_cpu_ns = self.receiving_cpu_ns = 0
        self.boundary_sampler_ns = self.boundary_sampler_cpu_ns = 0

    def epoch_boundary(self) -> None:
        """Note that an iteration begins or has ended. The run's first one does not count."""
        self.at_boundary = True
        self.wanted = self.wanted or 1


class TimedWait:
    """A wait for a batch of workers, or the start of an epoch, whose parts are timed.

    During the wait it replaces the iterator's ``_next_index``. It does not keep the iterator alive, because the workers
    end with the iterator.
    """

    def __init__(self, timer: SamplerTimer, garbage: GarbageTimer, iterator: object) -> None:
        self._timer = timer
        self._garbage = garbage
        self._iterator = weakref.ref(iterator)
        self._thread = get_ident()
        self._sampler_ns = self._sampler_cpu_ns = 0
        vars(iterator)[_NAME] = self
        self._before = Clocks(garbage)

    @unseen
    def __call__(self) -> Any:
        """Draw the next indices, as the iterator's own method does."""
        iterator: Any = self._iterator()
        before = Clocks(self._garbage) if get_ident() == self._thread else None
        try:
            return type(iterator)._next_index(iterator)
        except BaseException as error:
            forget_frame(error)
            raise
        finally:
            if before is not None:
                ns, cpu_ns = before.passed()
                self._sampler_ns += ns
                self._sampler_cpu_ns += cpu_ns

    def end(self, iterator: object, *, batch: bool) -> None:
        """End the wait. ``batch``: whether it returned a batch."""
        timer = self._timer
        _, cpu = self._before.passed()
        if vars(iterator).get(_NAME) is self:
            del vars(iterator)[_NAME]
        if timer.at_boundary:
            timer.boundary_sampler_ns += self._sampler_ns
            timer.boundary_sampler_cpu_ns += self._sampler_cpu_ns
        elif batch:
            timer.batches += 1
            timer.sampler_ns += self._sampler_ns
            timer.sampler_cpu_ns += self._sampler_cpu_ns
            timer.receiving_cpu_ns += max(0, cpu - self._sampler_cpu_ns)


class Clocks:
    """The wall clock and this thread's CPU clock, without garbage collections."""

    def __init__(self, garbage: GarbageTimer) -> None:
        self._garbage = garbage
        self._cpu_ns = thread_time_ns()
        self._wall_ns = now_ns()

    def passed(self) -> tuple[int, int]:
        """Nanoseconds since the start without garbage collections: wall clock, and CPU clock."""
        wall, cpu = now_ns() - self._wall_ns, thread_time_ns() - self._cpu_ns
        collecting, collecting_cpu = self._garbage.within_wait(self._wall_ns)
        return max(0, wall - collecting), max(0, cpu - collecting_cpu)


class TimedFetch:
    """Times one fetch of the training thread on its CPU clock, and the collation in it. The rest is the data set's.

    During the fetch it replaces the ``collate_fn`` of the iterator's fetcher.

    Attributes:
        cpu_ns: CPU time of the fetch, after `end`. ``collate_ns``: time of its collation.
    """

    def __init__(self, iterator: object) -> None:
        self.collate_ns = 0
        fetcher: Any = getattr(iterator, "_dataset_fetcher", None)
        self._fetcher = fetcher
        self._collate = getattr(fetcher, "collate_fn", None)
        if self._collate is not None:
            fetcher.collate_fn = self
        self.cpu_ns = -thread_time_ns()

    @unseen
    def __call__(self, samples: Any) -> Any:
        """Collate samples, as the loader's own function does."""
        collate: Any = self._collate
        start = now_ns()
        try:
            return collate(samples)
        except BaseException as error:
            forget_frame(error)
            raise
        finally:
            self.collate_ns += now_ns() - start

    def end(self) -> None:
        """End the fetch."""
        self.cpu_ns += thread_time_ns()
        if self._collate is not None and self._fetcher.collate_fn is self:
            self._fetcher.collate_fn = self._collate


def timeable(iterator: object) -> bool:
    """Whether this iterator can get a callable of ours, because no other code has put one there."""
    own = getattr(iterator, "__dict__", None)
    return own is not None and hasattr(type(iterator), _NAME) and isinstance(own.get(_NAME), TimedWait | None)


# -- how long the training thread takes to free a batch ----------------------------------------------------------------
# ``for batch in loader`` frees a batch when the next one replaces it. That time is measured as compute, although the
# batch causes it: unmapping hundreds of small tensors takes 13 ms where the step itself takes 9 ms. So one batch a tick
# is followed with weak references, whose callbacks record when it is freed. A batch that is freed in another way (kept,
# moved to a GPU, taken apart) is not counted.
#
# The advice `batch_transfer` needs this. In the zoo, sending one large graph instead of hundreds of small tensors made
# steps 10.0 times faster. The prediction was 9.3 with this figure, and would be 4.1 without it.

_FRAMES: Final = 10
"""So many frames are searched for the statement that holds the batch: ours, tqdm's, a generator's, the loop's."""

_DEPTH: Final = 8
"""Nested containers are searched this deep."""

_MAX_FOLLOWED: Final = 8
"""So many followed batches are kept for the agent thread."""


class BatchRelease:
    """Follows one batch at a time: `follow` on the training thread, `read` on the agent thread.

    Attributes:
        wanted: whether to follow the next batch of workers. Set on the agent thread.
        freed: how many batches were seen to be freed.
        ns: how long that took, nanoseconds.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._followed: deque[_Followed] = deque(maxlen=_MAX_FOLLOWED)
        self.wanted = False
        self.freed = 0
        self.ns = 0

    def follow(self, batch: object) -> None:
        """Follow a batch that has just come."""
        self.wanted = False
        self._followed.append(_Followed(batch, self._ring))

    def forget(self) -> None:
        """Stop following. Call it before the interpreter exits, because then no statement frees the last batches."""
        self.wanted = False
        self._followed = deque(maxlen=_MAX_FOLLOWED)

    def read(self) -> None:
        """Add up what was seen. The newest batch is left out, because it may not be freed yet."""
        followed = self._followed  # `forget` may replace it
        while len(followed) > 1:
            took = followed.popleft().took_ns()
            if took is not None:
                self.freed += 1
                self.ns += took


class _Followed:
    def __init__(self, batch: object, ring: Ring) -> None:
        self._head = ring.head + STRIDE  # the head when the next batch, and nothing else, has come
        self._statements = _statements()
        self._seen: list[_Seen] = []
        note = _noting_release(self._seen, ring)
        self._references = [weakref.ref(tensor, note) for tensor in _ends_of(batch)]

    def took_ns(self) -> int | None:
        """Nanoseconds from the next batch's arrival until this one's last tensor was freed; None if freed otherwise."""
        return max((now - came for now, came in map(self._freed, self._seen) if came), default=None)

    def _freed(self, seen: _Seen) -> tuple[int, int]:
        """When a tensor was freed, and when the next batch came; 0 if that batch's arrival did not free it."""
        _, now, head, (came, entry), statement = seen
        replaced = head == self._head and entry & 7 == S_DATA_WAIT and statement in self._statements
        return now, came if replaced else 0


def _noting_release(seen: list[_Seen], ring: Ring) -> Callable[[object], object]:
    """Make a callback for weak references that appends what it sees on this thread, and does nothing on others.

    It consists of C functions. During a Python callback, the interpreter could run a pending signal handler, and an
    exception in a weak reference's callback (Ctrl-C) would be lost. A thread that Python did not start (autograd's) has
    no frame, so the thread is checked first: `zip` stops there.
    """
    slot = ring.head & MASK
    now = zip(
        takewhile(get_ident().__eq__, iter(get_ident, None)),
        iter(now_ns, None),
        iter(partial(getattr, ring, "head"), None),
        iter(partial(itemgetter(slot + 1, slot + 2), ring.words), None),
        map(attrgetter("f_code", "f_lineno"), iter(sys._getframe, None)),
        strict=False,
    )
    return partial(next, map(seen.append, now))  # next(..., reference): the reference is the default, unused


def _statements() -> list[tuple[CodeType, int]]:
    """The current lines of the innermost frames, one of which requests a batch."""
    frame: FrameType | None = sys._getframe(1)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _FRAMES:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


def _ends_of(batch: object) -> list[Any]:
    """The first and the last tensor, because containers are freed from either end."""
    return [end for index in (0, -1) if (end := _end_of(batch, index)) is not None]


def _end_of(batch: object, index: int) -> object | None:
    """The object at one end of nested containers, if it takes weak references. Runs none of its code."""
    for _ in range(_DEPTH):
        if isinstance(batch, UserDict):
            batch = batch.data
        if isinstance(batch, dict):
            values = dict.values(batch)
            batch = next(iter(values) if index == 0 else reversed(values), None)
        elif isinstance(batch, list):
            batch = list.__getitem__(batch, index) if list.__len__(batch) else None
        elif isinstance(batch, tuple):
            batch = tuple.__getitem__(batch, index) if tuple.__len__(batch) else None
        else:
            return batch if type(batch).__weakrefoffset__ else None
    return None
