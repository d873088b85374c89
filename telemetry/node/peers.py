"""The nodes of a job tell each other the paces of their ranks and, during a hang, what each rank does.

    RUN_DIR/job/node-NAME.json     the ranks of one node, written by the rank that serves it
    RUN_DIR/job/digest.json        in a large job: what all nodes need of all ranks

There is no collective and no port. Each node reads the files of all others. From `_LARGE` nodes on, only the node with
the first name does so. It writes the digest, which the others read instead: a job of 1,250 nodes in which each reads
all would open 156,000 files a second. If the digest falls silent, all nodes read all files, until one writes it again.
The folder is listed once a minute; in the first two minutes, at each cycle.

A shared file system may be slow or hang, so the rank that serves its node runs `JobExchange.cycle` on a thread. It puts
the results on the board, where every rank of the node reads them (`JobLink`).
"""

from __future__ import annotations

import heapq
import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs

from telemetry.diagnosis.hangs import GONE, NODE_SILENT, HangState
from telemetry.records import (
    COMPUTE,
    RankPace,  # msgspec reads the annotations
)
from telemetry.util.clock import NS, now_ns, thread_time
from telemetry.util.files import read_small, remove_file, replace_file
from telemetry.util.processes import slug
from telemetry.util.threads import OwnThread, Wake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from telemetry.node.board import Board
    from telemetry.util.errors import ErrorLog

CYCLE_SECONDS: Final = 5.0
"""A node writes its file and reads the others' this often. A straggler is judged over a window of 30 s."""

LARGE_CYCLE_SECONDS: Final = 10.0
"""A cycle in a job of `_LARGE` nodes and more."""

_LARGE: Final = 64
"""From this many other nodes on, one node reads all files for all nodes."""

_LIST_SECONDS: Final = 60.0
"""The folder is listed this often."""

_YOUNG_SECONDS: Final = 120.0
"""At first the folder is listed at each cycle, because the nodes of a job start at different moments."""

_ALIVE_SECONDS: Final = 45.0
"""If a file has not changed for this long, its node has ended. NFS may show a change 30 s late."""

_DIGEST_SECONDS: Final = 150.0
"""If the digest has not changed for this long, its writer has ended. Reading all files for it may take long."""

_STALE_SECONDS: Final = 3600.0
"""A file that has not changed since it was first read this long ago is removed: a killed attempt has left it."""

_LOST_SECONDS: Final = 60.0
"""While the job hangs, a node whose file has not changed for this long counts as gone, with its ranks."""

_ALONE_SECONDS: Final = 90.0
"""If no file of another node appears for this long, the run folder is assumed not to be shared."""

_SETTLE_SECONDS: Final = 10.0
"""A rank that has not appeared on this node after this time is assumed to be on another node."""

_COUNT_SECONDS: Final = 60.0
"""A rank that does not serve its node counts the node's ranks this often."""

_NEWS_SECONDS: Final = 60.0
"""News this old is dropped: the exchange hangs, or the rank that ran it has ended."""

_DIGEST: Final = "digest.json"
_NEWS: Final = "job.json"
_SOURCE: Final = "job"

_EACH: Final = 8
"""This many ranks of each kind are passed on, see `candidates`."""

MAX_BYTES: Final = 1 << 20
"""Size limit for the file of a node. A report of 8 ranks takes 3 KB."""

_MAX_DIGEST_BYTES: Final = 1 << 23
"""Size limit for the digest. It takes 3 MB for 10,000 ranks that hang."""


class NodeReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a node reports of its own ranks; in the digest, of all ranks of the job.

    It has no time that another machine's clock is compared with. A reader takes its writer to be alive as long as
    ``sequence`` changes, by the reader's own clock.

    Attributes:
        node: name of the node that wrote it.
        sequence: increases with each report of that node, from any start.
        ranks: the newest paces. Each has its node's name. In the digest: the candidates among all ranks.
        hang: during a hang, the state of each rank.
        nodes: in the digest, the number of living nodes. ``file``: the file of the node that wrote the digest.
    """

    node: str
    sequence: int
    ranks: tuple[RankPace, ...]
    hang: tuple[HangState, ...] = ()
    nodes: int = 1
    file: str = ""


class JobNews(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What the ranks of a node read about the other nodes, in a file on the board.

    Attributes:
        ranks: the paces of ranks that others may wait for. Each has its node's name.
        stuck: whether a rank of another node is stuck.
    """

    ranks: tuple[RankPace, ...]
    stuck: bool = False


_report_decoder: Final = msgspec.json.Decoder(NodeReport)
_news_decoder: Final = msgspec.json.Decoder(JobNews)


def read_report(path: str | os.PathLike[str], most: int = MAX_BYTES) -> NodeReport | None:
    """Read the report in a file; None if it cannot be read or makes no sense."""
    try:
        return _report_decoder.decode(read_small(path, most))
    except (OSError, ValueError, RecursionError):
        return None


# -- who is slow, who waits --------------------------------------------------------------------------------------------


def candidates(paces: Iterable[RankPace]) -> tuple[RankPace, ...]:
    """Choose the few ranks that others may wait for, and the fastest ones to compare them with.

    A job may have thousands of ranks, and at every tick each rank looks for the one that it waits for. Only a rank with
    an extreme value can be that one: the shortest compute, the least time in collectives, the longest time without a
    step, or a phase. With a slow rank go the fastest ranks of its node. They show whether the rank is
    slow or the whole node. The extremes of a set are among the extremes of its parts.

    Returns at most four times `_EACH` ranks and the fastest ranks of the nodes of the slow ones, sorted by rank.
    """
    known = list(paces)
    stepping = [pace for pace in known if pace.steps]
    sampled = [pace for pace in stepping if pace.stack_samples]
    slow = [
        *heapq.nsmallest(_EACH, stepping, _compute),
        *heapq.nsmallest(_EACH, sampled, lambda pace: pace.in_sync_ratio),
    ]
    nodes = {pace.node for pace in slow}
    fastest = [pace for pace in stepping if pace.node_fastest and pace.node in nodes]
    still = [pace for pace in known if pace.seconds_without_step > 0 and not pace.waits_for_ranks]
    stopped = heapq.nlargest(_EACH, still, lambda pace: pace.seconds_without_step)
    in_phase = heapq.nsmallest(_EACH, [pace for pace in known if pace.phase is not None], lambda pace: pace.rank)
    chosen = {pace.rank: pace for pace in (*slow, *fastest, *stopped, *in_phase)}
    return tuple(chosen[rank] for rank in sorted(chosen))


def of_node(node: str, paces: Iterable[RankPace]) -> tuple[RankPace, ...]:
    """Add the node's name to the paces of its ranks for the other nodes, and mark the fastest ranks.

    Others wait least for the fastest, by each sign of a slow rank: the rank with the longest compute, the one that
    spends most of it in synchronisation, and the one whose GPU is busiest.
    """
    known = tuple(paces)
    stepping = [pace for pace in known if pace.steps]
    sampled = [pace for pace in stepping if pace.stack_samples]
    timed = [pace for pace in stepping if pace.gpu_busy_ratio is not None]
    fastest = {
        *(pace.rank for pace in heapq.nlargest(1, stepping, _compute)),
        *(pace.rank for pace in heapq.nlargest(1, sampled, lambda p: _compute(p) * p.in_sync_ratio)),
        *(pace.rank for pace in heapq.nlargest(1, timed, lambda p: p.gpu_busy_ratio or 0.0)),
    }
    return tuple(
        structs.replace(pace, node=node, node_ranks=len(known), node_fastest=pace.rank in fastest) for pace in known
    )


def _compute(pace: RankPace) -> float:
    return pace.compute_seconds / pace.steps


# -- files of nodes ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """The newest report in one file.

    Attributes:
        first_ns: when it was first read.
        changed_ns: when its sequence was seen to change; 0 before that.
        there: whether the last reading succeeded.
    """

    report: NodeReport
    first_ns: int
    changed_ns: int = 0
    there: bool = True


class JobExchange:
    """This node's part in the exchange.

    Args:
        run_dir: the run folder.
        node: name of this node.
        board: name of the board, which distinguishes two containers of one machine with the same node name.
        mono_ns: the clock, monotonic nanoseconds.

    Attributes:
        shared: whether another node's file has been seen; None while unknown.
        nodes: number of living nodes of the job at the last cycle, including this one.
        hang: during a hang, the states of the other nodes' ranks at the last cycle.
    """

    def __init__(self, run_dir: Path, node: str, board: str = "", *, mono_ns: Callable[[], int] = now_ns) -> None:
        self._folder = run_dir / "job"
        self._node = node
        self.file: Final = f"node-{slug(node)}{f'-{zlib.crc32(board.encode()):08x}' if board else ''}.json"
        self._now = mono_ns
        self._seen: dict[str, _Seen] = {}
        self._others: list[str] = []
        self._listed_ns = -(1 << 62)
        self._began_ns = mono_ns()
        self._knows_all = False  # whether the files of all nodes were read at the last cycle
        self._wrote_digest = False
        self._sequence = int.from_bytes(os.urandom(4), "big")  # random, so it differs from an earlier process's
        self.shared: bool | None = None
        self.nodes = 1
        self.hang: tuple[HangState, ...] = ()

    def cycle(self, ranks: Iterable[RankPace], hang: tuple[HangState, ...] = ()) -> tuple[RankPace, ...]:
        """Write the paces of this node's ranks, and read those of the others.

        Args:
            ranks: the paces of this node's ranks.
            hang: during a hang, their states.

        Returns:
            The candidates among the ranks of the other nodes. Each has its node's name.

        Raises:
            OSError: this node's file cannot be written.
        """
        own = of_node(self._node, ranks)
        self._sequence += 1
        self._write(self.file, NodeReport(self._node, self._sequence, own, hang))
        self._list()
        files, large = self._others, len(self._others) >= _LARGE
        digest = self._look(_DIGEST, _DIGEST_SECONDS, _MAX_DIGEST_BYTES) if large else None
        follows = digest is not None and digest.file < self.file
        if follows and digest is not None:
            self._look(digest.file)  # to notice when the writer of the digest is lost
            reports, files, self.nodes = [digest], [digest.file], digest.nodes
        else:
            living = {name: report for name in files if (report := self._look(name)) is not None}
            reports, self.nodes = [*living.values()], 1 + len(living)
        found = candidates(pace for report in reports for pace in report.ranks)
        states = [state for report in reports for state in report.hang]
        if hang or states:
            states += self._lost(files)
        # From the second cycle in which all files are read, it is known who is alive.
        self._wrote_digest = large and not follows and self._knows_all and self.file < min(living, default="~")
        if self._wrote_digest:
            everyone = candidates([*own, *found])
            self._write(
                _DIGEST, NodeReport(self._node, self._sequence, everyone, (*hang, *states), self.nodes, self.file)
            )
        self._knows_all = not follows
        here = {pace.rank for pace in own}
        self.hang = tuple(state for state in states if state.rank not in here)
        self._judge_sharing()
        return tuple(pace for pace in found if pace.rank not in here)

    def leave(self) -> None:
        """Remove this node's files, because the run has ended here. Another node writes the digest again."""
        remove_file(self._folder / self.file)
        if self._wrote_digest:
            remove_file(self._folder / _DIGEST)

    def _write(self, name: str, report: NodeReport) -> None:
        content, path = msgspec.json.encode(report), str(self._folder / name)
        try:
            replace_file(path, content)
        except FileNotFoundError:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)

    def _list(self) -> None:
        now = self._now()
        young = now - self._began_ns < _YOUNG_SECONDS * NS
        if not young and now - self._listed_ns < _LIST_SECONDS * NS:
            return
        self._listed_ns = now
        with os.scandir(self._folder) as entries:
            names = sorted(e.name for e in entries if e.name.startswith("node-") and e.name.endswith(".json"))
        for name, seen in self._seen.items():
            if not seen.changed_ns and now - seen.first_ns > _STALE_SECONDS * NS:
                remove_file(self._folder / name)
        there = {*names, _DIGEST}
        self._seen = {name: seen for name, seen in self._seen.items() if name in there}
        self._others = [name for name in names if name != self.file]

    def _look(self, name: str, alive_seconds: float = _ALIVE_SECONDS, most: int = MAX_BYTES) -> NodeReport | None:
        """The report in a file; None without one, or if its writer has ended or was not seen alive yet."""
        now, seen = self._now(), self._seen.get(name)
        report = read_report(f"{self._folder}/{name}", most)
        if seen is not None:
            seen.there = report is not None
        if report is not None:
            if seen is None:
                seen = self._seen[name] = _Seen(report, now)
            elif report.sequence != seen.report.sequence:
                seen.changed_ns = now
            seen.report = report
        if seen is None or not seen.changed_ns or now - seen.changed_ns > alive_seconds * NS:
            return None
        return seen.report

    def _lost(self, names: Iterable[str]) -> list[HangState]:
        """The states of ranks whose nodes' files have not changed for a minute.

        A node that ends removes its file. A file that was never seen to change belongs to an earlier attempt.
        """
        since = self._now() - int(_LOST_SECONDS * NS)
        silent = [
            seen.report
            for name in names
            if (seen := self._seen.get(name)) is not None and seen.there and 0 < seen.changed_ns <= since
        ]
        return [
            HangState(pace.rank, pace.node or report.node, COMPUTE, GONE, state=NODE_SILENT)
            for report in silent
            for pace in report.ranks
        ]

    def _judge_sharing(self) -> None:
        if self.nodes > 1:
            self.shared = True
        elif self.shared is None and self._now() - self._began_ns > _ALONE_SECONDS * NS:
            self.shared = False


# -- one rank ----------------------------------------------------------------------------------------------------------


class JobLink:
    """What the agent of one rank has of the other nodes.

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
        self._trouble: str | None = None
        self._told: set[str] = set()
        self._ranks = 0
        self._counted_ns = mono_ns()
        self._elsewhere_ns = mono_ns()  # until this time other nodes may have had no ranks
        self._cpu_before = 0.0  # CPU time of threads that have ended
        self.cpu_seconds = 0.0
        self._stamp = 0
        self._learned_ns = 0
        self._learned: tuple[RankPace, ...] = ()
        self._states: tuple[HangState, ...] = ()  # of other nodes' ranks; the exchange's thread leaves them here
        self.local: tuple[HangState, ...] = ()
        self.elsewhere: tuple[HangState, ...] = ()
        self.stuck_elsewhere = False

    def tick(self, world_size: int) -> None:
        """Run the exchange if it is this rank's turn. Called about once a second; never blocks."""
        trouble, self._trouble = self._trouble, None
        if trouble is not None and trouble not in self._told:
            self._told.add(trouble)
            self._errors.tell(_SOURCE, trouble)
        now = self._now()
        if self._node.leads or now - self._counted_ns >= _COUNT_SECONDS * NS:
            self._count_ranks(now)
        if not (self._node.leads and world_size > self._ranks):
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
        """Whether the job has ranks on other nodes."""
        self._count_ranks(self._now())
        return world_size > self._ranks

    def _count_ranks(self, now: int) -> None:
        """Count the ranks of this node. The largest number counts, because ranks may end early."""
        self._ranks, self._counted_ns = max(self._ranks, self._node.live_ranks()), now

    def paces(self) -> tuple[RankPace, ...]:
        """The ranks of other nodes that this rank may wait for; empty if no such rank is known."""
        stamp = self._node.stamp(_NEWS)
        if stamp != self._stamp:
            self._stamp, self._learned_ns = stamp, self._now()
            self._learn(self._node.get(_NEWS))
        elif self._now() - self._learned_ns > _NEWS_SECONDS * NS:
            self._learn(None)
        return self._learned

    def _learn(self, content: bytes | None) -> None:
        """Take what the exchange has put on the board; None if nothing there is new enough."""
        try:
            news = JobNews(()) if content is None else _news_decoder.decode(content)
        except (ValueError, RecursionError):
            content, news = None, JobNews(())
        self._learned, self.stuck_elsewhere = news.ranks, news.stuck
        self.elsewhere = self._states if content is not None and self._node.leads else ()

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
                self._states = exchange.hang
                news = JobNews(found, any(state.stuck for state in exchange.hang))
                self._node.put(_NEWS, msgspec.json.encode(news))
            except Exception as error:
                why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                self._trouble = f"the other nodes cannot be told of this one's ranks: {self._run_dir / 'job'}: {why}"
            if exchange.shared is False:
                self._trouble = (
                    "no other node of this job writes to the run folder, so stragglers are judged on this node alone: "
                    "put run_dir on a file system that all nodes share"
                )
            self.cpu_seconds = thread_time() + self._cpu_before
            stop.wait(CYCLE_SECONDS if exchange.nodes <= _LARGE else LARGE_CYCLE_SECONDS)
        self._states = ()
        exchange.leave()


class PeerPaces:
    """Gets the paces of the other ranks once a tick, and keeps the last pace of each rank of this node.

    When a job ends, its ranks leave the board one after the other, and rank 0's last line still has to cover all of
    them. Of other nodes only some ranks are known at any time, so a rank that is no longer among them means nothing.
    """

    def __init__(self) -> None:
        self._far: tuple[RankPace, ...] = ()
        self._near: dict[int, RankPace] = {}

    def take(self, paces: tuple[RankPace, ...]) -> tuple[RankPace, ...]:
        """Take and return the paces of the ranks that run now."""
        self._near |= {pace.rank: pace for pace in paces if pace.node is None}
        self._far = tuple(pace for pace in paces if pace.node is not None)
        return paces

    @property
    def of_run(self) -> tuple[RankPace, ...]:
        """The paces at the newest `take`, with the last ones of ranks that had ended before."""
        return (*self._near.values(), *self._far)
