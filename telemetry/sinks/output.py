"""Keeps the newest figures, and hands those of each window to the sinks on one thread, because a service may block."""

from __future__ import annotations

import os
from _thread import allocate_lock
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from telemetry.config import TRIAL_VARIABLE
from telemetry.safety.errors import kind_of
from telemetry.safety.threads import OwnThread, Wake
from telemetry.sinks.figures import figures
from telemetry.sinks.writers import NAMESPACE, SinkItem, SinkWaits, make_sink
from telemetry.util.clock import NS, now_ns, thread_time

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from telemetry.config import Config
    from telemetry.model.records import StallRecord
    from telemetry.model.totals import LogWindow
    from telemetry.node.metrics import RunView
    from telemetry.safety.errors import ErrorLog
    from telemetry.sinks.writers import Sink
    from telemetry.util.clock import WallClock
    from telemetry.util.identity import Identity

MAX_ITEMS: Final = 360
"""So many items wait for one sink: an hour, at one every 10 s."""

_SOURCE: Final = "sinks"
_MIN_SHARE: Final = 0.2
"""A run's last window goes to the sinks with its rates if it has at least this share of the usual length."""

_FIRST_PAUSE_SECONDS: Final = 5.0
_LONGEST_PAUSE_SECONDS: Final = 300.0
_LONG_SECONDS: Final = 3600.0


@dataclass(slots=True)
class _Queue:
    """The items of one sink, and when they are written. ``waits``: whether it has nothing to write into."""

    sink: Sink
    items: list[SinkItem] = field(default_factory=list)
    pause_seconds: float = 0.0
    due_ns: int = 0
    waits: bool = False


class FigureOutput:
    """Takes figures and stalls on the agent thread. A thread of its own, which the first ones start, writes them.

    A sink that fails is tried again after a time that doubles. Meanwhile its items wait, up to a limit; then the oldest
    are dropped and counted. While a sink blocks, the others wait, too.

    Attributes:
        newest: the newest figures. The dictionary is replaced, never changed, so that any thread may read it.
        said: the sinks, for the start line; empty without sinks.
        cpu_seconds: CPU time of the thread.
    """

    def __init__(
        self,
        config: Config,
        identity: Identity,
        errors: ErrorLog,
        wall: WallClock,
        *,
        mono_ns: Callable[[], int] = now_ns,
    ) -> None:
        self._identity = identity
        self._config = config
        self._steps_before = 0  # the step axis of the sinks continues after earlier attempts
        self._errors = errors
        self._wall = wall
        self._now = mono_ns
        self._written: LogWindow | None = None
        self._queues: list[_Queue] = []
        self._lock = allocate_lock()
        self._changed = Wake()
        self._ending = False
        self._thread: OwnThread | None = None
        self._news: deque[tuple[str, int]] = deque(maxlen=1000)  # with the number of failures
        self.newest: dict[str, float] = {}
        self.said = ""
        self.cpu_seconds = 0.0

    def start(self, run_dir: Path) -> None:
        """Make the sinks. Called on the training thread, because the agent's threads must not import anything.

        A rank that does not write has none, and a trial of ``telemetry tune`` neither: its figures are not a run's.
        """
        others = self._identity.rank > 0 and self._identity.rank_given and self._config.sink_ranks != "all"
        if not self._config.sinks or others or TRIAL_VARIABLE in os.environ:
            return
        with self._errors.contained(_SOURCE):
            missing = ""
            for name in self._config.sinks:
                try:
                    self._queues.append(_Queue(make_sink(name, run_dir)))
                except Exception as error:
                    why = str(error) if isinstance(error, SinkWaits) else kind_of(error)
                    self._errors.note(_SOURCE, f"{name}: {why}; no figures are written there")
                    missing += f", no {name} ({why})"
            names = ", ".join(queue.sink.name for queue in self._queues)
            self.said = (f", figures to {names}" if names else "") + missing

    def update(self, view: RunView, window: LogWindow | None) -> None:
        """Make the newest figures. ``window``: the newest window of the log."""
        with self._errors.contained("figures"):
            self._steps_before, self.newest = view.steps_before, figures(view, window)

    def are_due(self, window: LogWindow) -> bool:
        """Whether `write` has not had this window yet."""
        return window is not self._written

    def write(self, view: RunView, window: LogWindow) -> None:
        """Pass the figures of a new window on."""
        usual = window.added.wall_seconds >= _MIN_SHARE * self._config.log_interval_seconds
        # A run's short last window has totals, but its rates would mean nothing.
        self.update(view, window if usual or self._written is None else None)
        self._written = window
        self._offer(self.newest, "")

    def stall_opened(self, stall: StallRecord) -> None:
        """Give the sinks a stall in words: its cause, its size, and its first advice."""
        with self._errors.contained(_SOURCE):
            ratio = stall.exposed_wait_ratio
            size = "" if ratio is None else f", exposed wait {100 * ratio:.0f} %"
            action = "".join(f": {advice.action}" for advice in stall.advice[:1])
            self._offer({}, f"stall {stall.cause} at step {stall.first_step}{size}{action}")

    def note_news(self) -> None:
        """Log what the sinks have reported, and count their failures. Called once a tick."""
        for _ in range(len(self._news)):
            text, failures = self._news.popleft()
            if failures:
                self._errors.note(_SOURCE, text, count=failures)
            else:
                self._errors.tell(_SOURCE, text)

    def end(self) -> None:
        """Let the thread write what is left, once, and end. Returns at once."""
        self._ending = True
        self._changed.set()

    def wait(self, seconds: float) -> None:
        """Wait until everything is written, at most this many seconds."""
        if self._thread is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._errors.tell(_SOURCE, "the run has ended, and a sink has not written everything")
        self.note_news()

    def after_fork_in_child(self) -> None:
        """Make the copy in a forked child write nothing."""
        self.newest, self._queues = {}, []

    def _offer(self, newest: dict[str, float], stall: str) -> None:
        rank, several = self._identity.rank, self._config.sink_ranks == "all"
        if not self._queues or (rank and not several):
            return
        step = self._steps_before + int(self.newest.get("steps_total", 0))
        prefix = f"{NAMESPACE}/rank-{rank}" if several else NAMESPACE
        item = SinkItem(step, self._wall.unix_seconds(now_ns()), rank, prefix, newest, stall)
        for queue in self._queues:
            self._keep(queue, [], [item])
        self._changed.set()
        if self._thread is None:
            thread = OwnThread(self._run, name="telemetry-sinks")
            thread.start()  # if it cannot, it is tried again with the next item
            self._thread = thread

    def _keep(self, queue: _Queue, older: list[SinkItem], newer: list[SinkItem]) -> None:
        """Put items before and after those that wait, and drop the oldest ones that are too many."""
        with self._lock:
            queue.items = [*older, *queue.items, *newer]
            dropped = len(queue.items) - MAX_ITEMS
            del queue.items[: max(0, dropped)]
        if dropped > 0:
            self._news.append((f"{queue.sink.name}: the oldest figures are dropped", dropped))

    # -- on the sinks' thread

    def _run(self) -> None:
        last = False
        while not last:
            due = [queue.due_ns for queue in self._queues if queue.items]
            self._changed.wait((min(due) - self._now()) / NS if due else _LONG_SECONDS)
            self._changed.clear()
            last = self._ending
            for queue in self._queues:
                if queue.items and (last or queue.due_ns <= self._now()):
                    self._write(queue)
                self.cpu_seconds = thread_time()

    def _write(self, queue: _Queue) -> None:
        name = queue.sink.name
        with self._lock:
            items, queue.items = queue.items, []
        try:
            queue.sink.write(items)
        except SinkWaits as waits:  # the items belong to no run of the library
            if not queue.waits:
                self._news.append((f"{name}: {waits}", 0))
            queue.waits = True
        except BaseException as error:  # a library may raise anything, and Python would print it
            self._news.append((f"{name}: {kind_of(error)}", 1))
            queue.pause_seconds = min(_LONGEST_PAUSE_SECONDS, 2 * queue.pause_seconds or _FIRST_PAUSE_SECONDS)
            queue.due_ns = self._now() + int(queue.pause_seconds * NS)
            self._keep(queue, items, [])
        else:
            if queue.pause_seconds:
                self._news.append((f"{name}: works again", 0))
            queue.waits, queue.pause_seconds = False, 0.0
            queue.due_ns = self._now() + int(queue.sink.gather_seconds * NS)
