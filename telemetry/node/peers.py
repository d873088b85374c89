"""The nodes of a job tell each other the paces of their ranks and, during a hang, what each rank does.

    RUN_DIR/job/node-NAME.json     the ranks of one node, written by the rank that serves it

There is no collective and no port. Each node reads the files of all others, at most `_FILES_A_SECOND`: every five
seconds in a job of 64 nodes, and less often in a larger one. A job of more than `MAX_NODES` nodes has no exchange.

A shared file system may be slow or hang, so the rank that serves its node runs `JobExchange.cycle` on a thread. It puts
the results on the board, where every rank of the node reads them (`JobLink`).
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from heapq import nsmallest
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs

from telemetry.diagnosis.hangs import GONE, NODE_SILENT, HangState
from telemetry.diagnosis.stragglers import compute_seconds, sync_seconds
from telemetry.model.records import (
    COMPUTE,
    RankPace,  # msgspec reads the annotations
)
from telemetry.safety.files import read_small, remove_file, replace_file
from telemetry.safety.threads import OwnThread, Wake
from telemetry.util.clock import NS, now_ns, thread_time
from telemetry.util.identity import slug

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from telemetry.node.board import Board
    from telemetry.safety.errors import ErrorLog

# -- the numbers -------------------------------------------------------------------------------------------------------
# `benchmarks.job_exchange` measures what the exchange costs a node, in jobs of several sizes.

CYCLE_SECONDS: Final = 5.0
"""A node writes its file and reads the others' this often. A straggler is judged over a window of 30 s."""

_FILES_A_SECOND: Final = 16.0
"""A node reads at most so many files a second. In a job of 64 nodes, the file system opens 810 a second for all."""

MAX_NODES: Final = 256
"""With more nodes, the news of a rank would be older than `FAR_SECONDS`, in which a healthy evaluation is known."""

_SILENT_SECONDS: Final = 60.0
"""If a file has not changed for this long, its node has ended or is lost: NFS may show a change 30 s late. News on the
board that are as old are dropped: the exchange hangs, or the rank that ran it has ended."""

_STALE_SECONDS: Final = 3600.0
"""A file that has not changed since it was first read this long ago is removed: a killed attempt has left it."""

_ALONE_SECONDS: Final = 90.0
"""If no file of another node appears for this long, the run folder is assumed not to be shared."""

_SETTLE_SECONDS: Final = 10.0
"""A rank that has not appeared on this node after this time is assumed to be on another node."""

_MANY_RANKS: Final = 64
"""Of more ranks on other nodes, only the nodes of the most conspicuous ones are passed on: at every tick, each rank
looks for the one that it waits for, which takes 4 us for each other rank."""

_CONSPICUOUS: Final = 4
"""So many ranks of each kind are conspicuous, see `conspicuous`."""

MAX_BYTES: Final = 1 << 20
"""Size limit for the file of a node. A report of 8 ranks takes 3 KB."""

_NEWS: Final = "job.json"


class NodeReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a node reports of its own ranks.

    It has no time that another machine's clock is compared with. A reader takes its writer to be alive as long as
    ``sequence`` changes, by the reader's own clock.

    Attributes:
        node: name of the node.
        sequence: increases with each report of that node, from any start.
        ranks: the newest paces. Each has its node's name.
        hang: during a hang, the state of each rank.
    """

    node: str
    sequence: int
    ranks: tuple[RankPace, ...]
    hang: tuple[HangState, ...] = ()


class JobNews(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What the ranks of a node read about the other nodes, in a file on the board.

    Attributes:
        at_ns: when it was written, monotonic ns.
        ranks: the paces of ranks that others may wait for. Each has its node's name.
        stuck: whether a rank of another node is stuck.
    """

    at_ns: int
    ranks: tuple[RankPace, ...] = ()
    stuck: bool = False


_report_decoder: Final = msgspec.json.Decoder(NodeReport)
_news_decoder: Final = msgspec.json.Decoder(JobNews)


def read_report(path: str | os.PathLike[str]) -> NodeReport | None:
    """Read the report in a file; None if it cannot be read or makes no sense."""
    try:
        return _report_decoder.decode(read_small(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def conspicuous(paces: Iterable[RankPace]) -> tuple[RankPace, ...]:
    """The ranks of whole nodes, with those that others may wait for: all ranks of a job that is not very large.

    Others can only wait for a rank with an extreme value: the shortest compute, the least time in synchronisation, or
    the longest time without a step in which it does not wait for others, as in a phase.
    """
    known = list(paces)
    if len(known) <= _MANY_RANKS:
        return tuple(known)
    chosen = [
        *nsmallest(_CONSPICUOUS, known, lambda p: compute_seconds(p) if p.steps else inf),
        *nsmallest(_CONSPICUOUS, known, lambda p: sync_seconds(p) if p.steps and p.stack_samples else inf),
        *nsmallest(_CONSPICUOUS, known, lambda p: 0.0 if p.waits_for_ranks else -p.seconds_without_step),
    ]
    nodes = {pace.node for pace in chosen}
    return tuple(pace for pace in known if pace.node in nodes)


# -- files of nodes ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """The newest report in one file. ``at_ns``: when it was first read, or has ``changed`` since."""

    report: NodeReport
    at_ns: int
    changed: bool = False


class JobExchange:
    """This node's part in the exchange.

    Args:
        run_dir: the run folder.
        node: name of this node.
        board: name of the board, which distinguishes two containers of one machine with the same node name.
        mono_ns: the clock, monotonic nanoseconds.

    Attributes:
        file: name of this node's file.
        nodes: number of living nodes of the job at the last cycle, including this one.
        hang: during a hang, the states of the other nodes' ranks at the last cycle.
        seconds: time until the next cycle.
        trouble: why other nodes are not heard of, for the log; else empty.
    """

    def __init__(self, run_dir: Path, node: str, board: str = "", *, mono_ns: Callable[[], int] = now_ns) -> None:
        self._folder = run_dir / "job"
        self._node = node
        self.file: Final = f"node-{slug(node)}{f'-{zlib.crc32(board.encode()):08x}' if board else ''}.json"
        self._now = mono_ns
        self._seen: dict[str, _Seen] = {}
        self._began_ns = mono_ns()
        self._shared = False  # whether another node has been seen
        self._sequence = int.from_bytes(os.urandom(4), "big")  # random, so it differs from an earlier process's
        self.nodes = 1
        self.hang: tuple[HangState, ...] = ()
        self.seconds = CYCLE_SECONDS
        self.trouble = ""

    def cycle(self, ranks: Iterable[RankPace], hang: tuple[HangState, ...] = ()) -> tuple[RankPace, ...]:
        """Write the paces of this node's ranks, and read those of the others.

        Args:
            ranks: the paces of this node's ranks.
            hang: during a hang, their states.

        Returns:
            The ranks of other nodes that others may wait for. Each has its node's name.

        Raises:
            OSError: this node's file cannot be written.
        """
        own = tuple(structs.replace(pace, node=self._node) for pace in ranks)
        self._sequence += 1
        self._write(NodeReport(self._node, self._sequence, own, hang))
        self._read()
        known, here, now = [seen for seen in self._seen.values() if seen.changed], {p.rank for p in own}, self._now()
        living = [seen.report for seen in known if now - seen.at_ns <= _SILENT_SECONDS * NS]
        silent = [seen.report for seen in known if now - seen.at_ns > _SILENT_SECONDS * NS]
        states = [state for report in living for state in report.hang]
        if hang or states:  # a node that ends removes its file
            lost = [pace for report in silent for pace in report.ranks]
            states += [HangState(pace.rank, pace.node or "", COMPUTE, GONE, state=NODE_SILENT) for pace in lost]
        self.hang = tuple(state for state in states if state.rank not in here)
        self.nodes = 1 + len(living)
        self._shared = self._shared or self.nodes > 1
        if not self._shared and now - self._began_ns > _ALONE_SECONDS * NS:
            self.trouble = self.trouble or (
                "no other node of this job writes to the run folder, so stragglers are judged on this node alone: "
                "put run_dir on a file system that all nodes share"
            )
        return conspicuous(pace for report in living for pace in report.ranks if pace.rank not in here)

    def leave(self) -> None:
        """Remove this node's file, because the run has ended here."""
        remove_file(self._folder / self.file)

    def _write(self, report: NodeReport) -> None:
        content, path = msgspec.json.encode(report), str(self._folder / self.file)
        try:
            replace_file(path, content)
        except FileNotFoundError:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)

    def _read(self) -> None:
        """Read the files of the others. A node lives once its file was seen to change: it may be of an earlier run."""
        names = [name for name in os.listdir(self._folder) if name.startswith("node-") and name != self.file]  # noqa: PTH208
        self.seconds = max(CYCLE_SECONDS, len(names) / _FILES_A_SECOND)
        if len(names) >= MAX_NODES:
            self.trouble = f"the job has more than {MAX_NODES} nodes, so each compares its own ranks only"
            names = []
        seen, self._seen = self._seen, {}
        for name in names:
            report, before, now = read_report(f"{self._folder}/{name}"), seen.get(name), self._now()
            if report is not None and (before is None or report.sequence != before.report.sequence):
                self._seen[name] = _Seen(report, now, changed=before is not None)
            elif before is not None:
                self._seen[name] = before
                if not before.changed and now - before.at_ns > _STALE_SECONDS * NS:
                    remove_file(self._folder / name)


# -- one rank ----------------------------------------------------------------------------------------------------------


class JobLink:
    """What the agent of one rank has of the other ranks of the job.

    Args:
        run_dir: the run folder, which all nodes of the job must share.
        node_name: name of this node.
        node: the board of this node.
        errors: reports files that cannot be written, and a run folder that is not shared.
        mono_ns: the clock, monotonic nanoseconds.

    Attributes:
        cpu_seconds: CPU time of the exchange.
        local: during a hang, the states of this node's ranks for the other nodes.
        stuck_elsewhere: whether a rank of another node is stuck, as of `paces`.
        elsewhere: during a hang, the states of the ranks of other nodes, on the rank that serves its node.
    """

    def __init__(
        self,
        run_dir: Path,
        node_name: str,
        node: Board,
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
        self._trouble = self._told = ""
        self._near: dict[int, RankPace] = {}  # the last pace of each rank of this node, also of ended ones
        self._far: tuple[RankPace, ...] = ()
        self._elsewhere_ns = mono_ns()  # until this time other nodes may have had no ranks
        self._cpu_before = 0.0  # CPU time of threads that have ended
        self.cpu_seconds = 0.0
        self._states: tuple[HangState, ...] = ()  # of other nodes' ranks; the exchange's thread leaves them here
        self.local: tuple[HangState, ...] = ()
        self.elsewhere: tuple[HangState, ...] = ()
        self.stuck_elsewhere = False
        self._ranks = 0  # the most ranks of this node at one time, because ranks may end early

    def tick(self, world_size: int) -> None:
        """Run the exchange if it is this rank's turn. Called about once a second; never blocks."""
        if self._trouble not in {"", self._told}:
            self._told = self._trouble
            self._errors.tell("job", self._told)
        now = self._now()
        if not (self._node.leads and self.ranks_elsewhere(world_size)):
            self._elsewhere_ns = now
        # The ranks of a node start at different moments.
        wanted = now - self._elsewhere_ns >= _SETTLE_SECONDS * NS
        running = self._thread is not None and self._thread.is_alive()
        if wanted and not running:
            self._stop, self._cpu_before = Wake(), self.cpu_seconds
            thread = OwnThread(self._run, self._stop, name="telemetry-job")
            thread.start()
            self._thread = thread  # only now: a thread that cannot start need not be waited for at the end
        elif not wanted and running:
            self._stop.set()

    def ranks_elsewhere(self, world_size: int) -> bool:
        """Whether the job has ranks on other nodes, as of `paces`."""
        return world_size > self._ranks

    def paces(self, but: int) -> tuple[RankPace, ...]:
        """The ranks of this node without rank ``but``, and the ranks of other nodes that this one may wait for."""
        near = self._node.paces(but)
        self._ranks = max(self._ranks, 1 + len(near))
        self._near |= {pace.rank: pace for pace in near}
        news = self._news()
        self._far, self.stuck_elsewhere = (news.ranks, news.stuck) if news is not None else ((), False)
        self.elsewhere = self._states if news is not None and self._node.leads else ()
        return (*near, *self._far)

    @property
    def of_run(self) -> tuple[RankPace, ...]:
        """The newest paces, and the last ones of ranks of this node that have ended.

        When a job ends, its ranks leave the board one after the other, and the last line still has to cover all of
        them. Of other nodes only some ranks are known at any time, so it means nothing if one is no longer known.
        """
        return (*self._near.values(), *self._far)

    def _news(self) -> JobNews | None:
        """What the exchange has put on the board; None if nothing there is new enough."""
        try:
            news = _news_decoder.decode(self._node.get(_NEWS) or b"")
        except (ValueError, RecursionError):
            return None
        return news if self._now() - news.at_ns <= _SILENT_SECONDS * NS else None

    def close(self, seconds: float) -> None:
        """End the exchange and remove this node's file, unless the file system hangs.

        Args:
            seconds: the longest wait for that. If it is too short, this node's file stays. That does no harm, because
                the other nodes see that it no longer changes.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, stop: Wake) -> None:
        exchange = JobExchange(self._run_dir, self._node_name, self._node.name, mono_ns=self._now)
        while not stop.is_set():
            try:
                found = exchange.cycle(self._node.paces(), self.local)
                self._states, self._trouble = exchange.hang, exchange.trouble
                news = JobNews(self._now(), found, any(state.stuck for state in exchange.hang))
                self._node.put(_NEWS, msgspec.json.encode(news))
            except Exception as error:
                why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                self._trouble = f"the other nodes cannot be told of this one's ranks: {self._run_dir / 'job'}: {why}"
            self.cpu_seconds = thread_time() + self._cpu_before
            stop.wait(exchange.seconds)
        self._states = ()
        exchange.leave()
