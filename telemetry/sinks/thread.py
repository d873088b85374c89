"""Hands the figures to the sinks on one thread, because a service may block."""

from __future__ import annotations

from _thread import allocate_lock
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from telemetry.util.clock import NS, now_ns, thread_time
from telemetry.util.errors import kind_of
from telemetry.util.threads import OwnThread, Wake

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NAMESPACE: Final = "telemetry"
"""Every key begins with it, so that it cannot be one of the user's."""


@dataclass(frozen=True, slots=True)
class SinkItem:
    """An item for the sinks: the figures of a rank at the end of one window, or a stall that has opened, in words.

    Attributes:
        step: number of training steps so far, over all attempts of the run.
        several: whether other ranks write as well.
        figures: the values by name, see `telemetry.agent.figures`; empty for a stall.
        stall: the stall; empty for figures.
    """

    step: int
    unix_seconds: float
    rank: int
    several: bool
    figures: dict[str, float] = field(default_factory=dict)
    stall: str = ""

    def key(self, name: str) -> str:
        """The key of a figure. It contains the rank if several ranks may write into the same run."""
        return f"{NAMESPACE}/rank-{self.rank}/{name}" if self.several else f"{NAMESPACE}/{name}"


class SinkWaits(Exception):  # noqa: N818 - no error: the sink has nothing to write into yet
    """There is nothing to write into yet, such as no active run. The text names what is missing."""


class Sink:
    """One library. All methods but `forget` are called on the sinks' thread.

    Attributes:
        name: its name in the setting ``sinks``.
        gather_seconds: items are gathered for this long and then written together; 0 for not at all.
    """

    name: str
    gather_seconds = 0.0

    def write(self, items: Sequence[SinkItem]) -> None:
        """Write some items, oldest first. If it raises, all of them are written again later.

        Raises:
            SinkWaits: there is nothing to write into yet. The items are dropped.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Write what the library still holds, and close our files."""

    def forget(self) -> None:
        """Close descriptors and write nothing, in a forked child."""


MAX_ITEMS: Final = 360
"""So many items wait for one sink: an hour, at one every 10 s."""

_ITEMS_AT_ONCE: Final = 10

_FIRST_PAUSE_SECONDS: Final = 5.0
_LONGEST_PAUSE_SECONDS: Final = 300.0

_LONG_SECONDS: Final = 3600.0


@dataclass(slots=True)
class _Queue:
    """The items of one sink, and the time of its next try. ``told``: what it waits for, once that is in the log."""

    sink: Sink
    items: deque[SinkItem] = field(default_factory=deque)
    pause_seconds: float = 0.0
    due_ns: int = 0
    told: str | None = None


class SinkThread:
    """Takes items on the agent thread and writes them on its own thread, which the first item starts.

    A sink that fails is tried again after a time that doubles. Meanwhile its items wait, up to a limit; then the oldest
    are dropped and counted.

    Args:
        sinks: the sinks, in the order in which they are written.
        mono_ns: the clock, monotonic nanoseconds.

    Attributes:
        cpu_seconds: CPU time of the thread.
    """

    def __init__(self, sinks: Sequence[Sink], mono_ns: Callable[[], int] = now_ns) -> None:
        self._queues = [_Queue(sink) for sink in sinks]
        self._now = mono_ns
        self._lock = allocate_lock()
        self._changed = Wake()
        self._ending = False
        self._thread: OwnThread | None = None
        self._news: deque[tuple[str, int]] = deque(maxlen=1000)
        self.cpu_seconds = 0.0

    def offer(self, item: SinkItem) -> None:
        """Add an item for every sink. Never waits for a sink.

        Raises:
            RuntimeError: the thread cannot be started. It is tried again with the next item.
        """
        with self._lock:
            for queue in self._queues:
                if not queue.items and not queue.pause_seconds:
                    queue.due_ns = self._now() + int(queue.sink.gather_seconds * NS)
                queue.items.append(item)
                self._drop_oldest(queue)
        self._changed.set()
        if self._thread is None:
            thread = OwnThread(self._run, name="telemetry-sinks", others_code=True)
            thread.start()
            self._thread = thread

    def take_news(self) -> list[tuple[str, int]]:
        """Messages since the last call, each with its number of failures, which may be 0."""
        news = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def end(self) -> None:
        """Let the thread write what is left, once, and end."""
        self._ending = True
        self._changed.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the thread, at most this many seconds. Returns whether it has ended."""
        if self._thread is not None:
            self._thread.join(max(0.0, seconds))
        return self._thread is None or not self._thread.is_alive()

    def after_fork_in_child(self) -> None:
        """Close the descriptors. Takes no lock, and writes nothing."""
        for queue in self._queues:
            queue.sink.forget()

    def _run(self) -> None:
        last = False
        while not last:
            due = [queue.due_ns for queue in self._queues if queue.items]
            self._changed.wait((min(due) - self._now()) / NS if due else _LONG_SECONDS)
            self._changed.clear()
            last = self._ending
            for queue in self._queues:
                if last or queue.due_ns <= self._now():
                    self._empty(queue)
                if last:
                    try:
                        queue.sink.close()
                    except BaseException as error:
                        self._news.append((f"{queue.sink.name}: {kind_of(error)}", 1))
                self.cpu_seconds = thread_time()

    def _empty(self, queue: _Queue) -> None:
        """Write the items of a sink, some at a time, until all are written or it fails."""
        name = queue.sink.name
        while True:
            with self._lock:
                items = [queue.items.popleft() for _ in range(min(len(queue.items), _ITEMS_AT_ONCE))]
            if not items:
                return
            try:
                queue.sink.write(items)
            except SinkWaits as waits:
                with self._lock:
                    queue.items.clear()  # they belong to no run of the library
                    queue.pause_seconds, queue.due_ns = 0.0, 0
                if queue.told != str(waits):
                    queue.told = str(waits)
                    self._news.append((f"{name}: {waits}", 0))
                return
            except BaseException as error:  # a library may raise anything, and Python would print it
                self._news.append((f"{name}: {kind_of(error)}", 1))
                with self._lock:
                    queue.pause_seconds = min(_LONGEST_PAUSE_SECONDS, 2 * queue.pause_seconds or _FIRST_PAUSE_SECONDS)
                    queue.due_ns = self._now() + int(queue.pause_seconds * NS)
                    queue.items.extendleft(reversed(items))
                    self._drop_oldest(queue)
                return
            if queue.pause_seconds:
                self._news.append((f"{name}: works again", 0))
            queue.pause_seconds, queue.due_ns = 0.0, 0

    def _drop_oldest(self, queue: _Queue) -> None:
        while len(queue.items) > MAX_ITEMS:
            queue.items.popleft()
            self._news.append((f"{queue.sink.name}: the oldest figures are dropped", 1))
