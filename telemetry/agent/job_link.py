"""This node's link to the other nodes of its job: which rank runs the exchange, and what each rank learns from it.

The rank that serves the node runs `telemetry.job.exchange` on a thread of its own, because a shared file system may
take seconds or hang. What it learns it puts on the board, where every rank of the node reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.job.exchange import JobExchange
from telemetry.job.node_report import NodeReport, decoded, encoded
from telemetry.util.clock import NS, now_ns, thread_time
from telemetry.util.threads import OwnThread, Wake

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from telemetry.core.hang_records import HangState
    from telemetry.publish.node import NodeService
    from telemetry.records import RankPace
    from telemetry.util.errors import ErrorLog

CYCLE_SECONDS: Final = 5.0
"""How often a node writes its report for the other nodes. A straggler is judged over a window of 30 s."""

LARGE_CYCLE_SECONDS: Final = 10.0
"""The same for a job of more than `LARGE_NODES` nodes. One cycle of such a job reads about 70 files."""

LARGE_NODES: Final = 64

_SETTLE_SECONDS: Final = 10.0
"""A rank that has not appeared on this node after this time is assumed to be on another node."""

_COUNT_SECONDS: Final = 60.0
"""How often a rank that does not serve its node counts the ranks there."""

_STALE_SECONDS: Final = 60.0
"""Reports that are older than this are dropped: the exchange hangs, or the rank that ran it has ended."""

_FILE: Final = "job.json"

_SOURCE: Final = "job"


class JobLink:
    """What the agent of one rank knows about the other nodes.

    Args:
        run_dir: the run folder, which all nodes of the job must share.
        node_name: name of this node.
        node: the board of this node.
        errors: reports files that cannot be written, and a run folder that is not shared.
        mono_ns: the clock, monotonic nanoseconds.

    Attributes:
        cpu_seconds: CPU time of the exchange.
        local: during a hang, the states of this node's ranks. ``elsewhere``: those of other nodes, as of `paces`.
    """

    def __init__(
        self,
        run_dir: Path,
        node_name: str,
        node: NodeService,
        errors: ErrorLog,
        *,
        mono_ns: Callable[[], int] = now_ns,
    ) -> None:
        self._run_dir = run_dir
        self._node_name = node_name
        self._node = node
        self._errors = errors
        self._now = mono_ns
        self._thread: OwnThread | None = None
        self._stop = Wake()
        self._trouble: str | None = None
        self._told: set[str] = set()
        self._ranks = 0
        self._counted_ns = mono_ns()
        self._elsewhere_ns = mono_ns()  # until this time there may have been no ranks on other nodes
        self._cpu_before = 0.0  # CPU time of threads that have ended
        self.cpu_seconds = 0.0
        self._stamp = 0
        self._learned_ns = 0
        self._learned: tuple[RankPace, ...] = ()
        self.local: tuple[HangState, ...] = ()
        self.elsewhere: tuple[HangState, ...] = ()

    def tick(self, world_size: int) -> None:
        """Run the exchange if it is this rank's turn. Called about once a second; never blocks."""
        trouble, self._trouble = self._trouble, None
        if trouble is not None and trouble not in self._told:
            self._told.add(trouble)
            self._errors.tell(_SOURCE, trouble)
        now = self._now()
        if self._node.leads or now - self._counted_ns >= _COUNT_SECONDS * NS:
            self._count_ranks(now)
        elsewhere = self._node.leads and world_size > self._ranks
        if not elsewhere:
            self._elsewhere_ns = now
        # The ranks of a node start at different moments.
        wanted = elsewhere and self._now() - self._elsewhere_ns >= _SETTLE_SECONDS * NS
        running = self._thread is not None and self._thread.is_alive()
        if wanted and not running:
            self._stop, self._cpu_before = Wake(), self.cpu_seconds
            thread = OwnThread(self._run, self._stop, name="telemetry-job")
            thread.start()
            self._thread = thread  # only now: if it cannot start, nothing has to be waited for at the end
        elif not wanted and running:
            self._stop.set()

    def ranks_elsewhere(self, world_size: int) -> bool:
        """Whether the job has ranks on other nodes."""
        self._count_ranks(self._now())
        return world_size > self._ranks

    def _count_ranks(self, now: int) -> None:
        """Ranks of this node may end early. So the largest number seen counts."""
        self._ranks, self._counted_ns = max(self._ranks, self._node.live_ranks()), now

    def paces(self) -> tuple[RankPace, ...]:
        """The ranks of other nodes that this rank may wait for; empty if no such rank is known."""
        stamp = self._node.stamp(_FILE)
        if stamp != self._stamp:
            content = self._node.get(_FILE)
            report = decoded(content) if content is not None else None
            self._learned, self.elsewhere = (report.ranks, report.hang) if report is not None else ((), ())
            self._stamp, self._learned_ns = stamp, self._now()
        elif self._learned and self._now() - self._learned_ns > _STALE_SECONDS * NS:
            self._learned, self.elsewhere = (), ()
        return self._learned

    def close(self, seconds: float) -> None:
        """End the exchange and remove this node's file, unless the file system hangs.

        Args:
            seconds: how long to wait for it at most. If that is too short, this node's file stays. That is harmless:
                the other nodes see that the file no longer changes.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def after_fork_in_child(self) -> None:
        """Forget the thread, which does not exist in the child."""
        self._thread = None

    def _run(self, stop: Wake) -> None:
        exchange = JobExchange(self._run_dir, self._node_name, self._node.board_name, mono_ns=self._now)
        while not stop.is_set():
            try:
                found = exchange.cycle(self._node.paces(), self.local)
                content = encoded(NodeReport(self._node_name, self._now(), exchange.nodes, found, exchange.hang))
                self._node.put(_FILE, content)
            except Exception as error:
                why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                self._trouble = f"the other nodes cannot be told of this one's ranks: {self._run_dir / 'job'}: {why}"
            if exchange.shared is False:
                self._trouble = (
                    "no other node of this job writes to the run folder, so stragglers are judged on this node alone: "
                    "put run_dir on a file system that all nodes share"
                )
            self.cpu_seconds = thread_time() + self._cpu_before
            stop.wait(CYCLE_SECONDS if exchange.nodes <= LARGE_NODES else LARGE_CYCLE_SECONDS)
        exchange.leave()
