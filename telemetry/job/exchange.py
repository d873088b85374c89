"""The nodes of a job tell one another how their ranks get on, through small files in the run folder.

    RUN_DIR/job/node-NAME.json       the ranks of one node, written by the rank that serves it
    RUN_DIR/job/group-NN.json        of a large job: the candidates among the ranks of one group of nodes

There is no collective and no port. A job of up to `_FLAT` nodes reads every node's file. In a larger one each node
belongs to one of `_GROUPS` groups, by a hash of its name: it reads the files of its group and one file for each
group, and the first living node of a group writes that one. So nobody reads more than some 80 files, whatever the
size of the job. The folder is listed once a minute, and at each cycle only in the first two minutes.

Files on a shared file system may take seconds, or hang: `JobExchange.cycle` runs on a thread of its own.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from telemetry.core.clock import NS, now_ns
from telemetry.core.filesystem import read_small, remove_file, replace_file
from telemetry.core.hang_records import GONE, NODE_SILENT, HangState
from telemetry.core.identity import slug
from telemetry.core.labels import COMPUTE
from telemetry.job.candidates import candidates
from telemetry.job.node_report import MAX_BYTES, NodeReport, decoded, encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from telemetry.core.interval import RankPace

_FLAT: Final = 64
"""Nodes up to which each one reads every other one's file."""

_GROUPS: Final = 40
"""1,250 nodes: 31 in a group, so 71 files a cycle."""

_LIST_SECONDS: Final = 60.0
"""How often the folder is listed."""

_YOUNG_SECONDS: Final = 120.0
"""How long it is listed at each cycle: the nodes of a job do not all start at the same moment."""

_ALIVE_SECONDS: Final = 45.0
"""A report that has not changed for so long is of a node that is gone. NFS may show a file 30 s late."""

_LOST_SECONDS: Final = 60.0
"""While the job hangs, the ranks of a node whose file has not changed for so long are taken to be gone."""

_ALONE_SECONDS: Final = 90.0
"""Without a file of another node for so long, the run folder is taken for one that is not shared."""


@dataclass(slots=True)
class _SeenReport:
    """The newest report in one file. ``changed_ns`` is 0 until its sequence has changed before our eyes.

    ``there``: whether the file could be read the last time.
    """

    report: NodeReport
    changed_ns: int = 0
    there: bool = True


class JobExchange:
    """This node's part in the exchange.

    Args:
        run_dir: the run folder.
        node: name of this node.
        board: tells apart two that have this name, as containers of one machine may.
        mono_ns: the clock.
        read, write: how a file is read and replaced; for measurements of a slow file system.

    Attributes:
        shared: whether another node's file has been seen; None while that cannot be told yet.
        nodes: living nodes of the job at the last cycle, this one included.
        hang: while the job hangs, what the ranks of the other nodes do, as of the last cycle.
    """

    def __init__(
        self,
        run_dir: Path,
        node: str,
        board: str = "",
        *,
        mono_ns: Callable[[], int] = now_ns,
        read: Callable[[str], bytes] = lambda path: read_small(path, MAX_BYTES),
        write: Callable[[str, bytes], object] = replace_file,
    ) -> None:
        self._folder = run_dir / "job"
        self._node = node
        self._mine = f"node-{slug(node)}{f'-{zlib.crc32(board.encode()):08x}' if board else ''}.json"
        self._now = mono_ns
        self._read = read
        self._write = write
        self._seen: dict[str, _SeenReport] = {}
        self._names: list[str] = []
        self._listed_ns = -(1 << 62)
        self._began_ns = mono_ns()
        self._sequence = int.from_bytes(os.urandom(4), "big")  # of an earlier life of this node it would not differ
        self.shared: bool | None = None
        self.nodes = 1
        self.hang: tuple[HangState, ...] = ()

    def cycle(self, ranks: Iterable[RankPace], hang: tuple[HangState, ...] = ()) -> tuple[RankPace, ...]:
        """Tell the others of this node's ranks, and learn of theirs.

        Args:
            ranks: of this node.
            hang: what they do, while the job hangs.

        Returns:
            The candidates among the ranks of the other nodes; each names its node.

        Raises:
            OSError: this node's file cannot be written.
        """
        own = tuple(replace(pace, node=self._node) for pace in ranks)
        self._sequence += 1
        self._put(self._mine, NodeReport(self._node, self._sequence, 1, own, hang))
        self._list()
        others = [name for name in self._names if name != self._mine]
        if len(others) < _FLAT:
            reports = self._living(others)
            self.nodes = 1 + len(reports)
            found = candidates(pace for report in reports for pace in report.ranks)
            self.hang = _states_of(reports)
        else:
            found = self._through_groups(own, others, hang)
        if hang or self.hang:
            self.hang += self._lost(others)
        self._judge_sharing()
        here = {pace.rank for pace in own}
        return tuple(pace for pace in found if pace.rank not in here)

    def leave(self) -> None:
        """Remove this node's file: the run has ended here."""
        remove_file(self._folder / self._mine)

    # -- a large job -------------------------------------------------------------------------------------------

    def _through_groups(
        self, own: tuple[RankPace, ...], others: list[str], hang: tuple[HangState, ...]
    ) -> tuple[RankPace, ...]:
        group = _group_of(self._mine)
        members = [name for name in others if _group_of(name) == group]
        living = {name: report for name in members if (report := self._look(name)) is not None}
        paces = candidates([*own, *(pace for report in living.values() for pace in report.ranks)])
        if self._mine < min(living, default="~"):  # the first living node of a group speaks for it
            states = hang + _states_of(living.values())
            states += self._lost(members) if states else ()
            self._put(_group_file(group), NodeReport(self._node, self._sequence, 1 + len(living), paces, states))
        reports = self._living(_group_file(number) for number in range(_GROUPS) if number != group)
        self.nodes = 1 + len(living) + sum(report.nodes for report in reports)
        self.hang = _states_of([*living.values(), *reports])
        return candidates([*paces, *(pace for report in reports for pace in report.ranks)])

    def _lost(self, names: Iterable[str]) -> tuple[HangState, ...]:
        """The ranks of nodes whose files have not changed for a minute. A node that ends removes its file."""
        now, lost = self._now(), []
        for name in names:
            seen = self._seen.get(name)
            if seen is None or not seen.changed_ns or now - seen.changed_ns < _LOST_SECONDS * NS or not seen.there:
                continue
            node = seen.report.writer
            lost += [HangState(p.rank, node, COMPUTE, GONE, state=NODE_SILENT) for p in seen.report.ranks]
        return tuple(lost)

    # -- files -------------------------------------------------------------------------------------------------

    def _put(self, name: str, report: NodeReport) -> None:
        content, path = encoded(report), str(self._folder / name)
        try:
            self._write(path, content)
        except FileNotFoundError:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(path, content)

    def _list(self) -> None:
        young = self._now() - self._began_ns < _YOUNG_SECONDS * NS
        if not young and self._now() - self._listed_ns < _LIST_SECONDS * NS:
            return
        self._listed_ns = self._now()
        with os.scandir(self._folder) as entries:
            self._names = sorted(e.name for e in entries if e.name.startswith("node-") and e.name.endswith(".json"))
        known = {*self._names, *map(_group_file, range(_GROUPS))}
        self._seen = {name: seen for name, seen in self._seen.items() if name in known}

    def _living(self, names: Iterable[str]) -> list[NodeReport]:
        return [report for name in names if (report := self._look(name)) is not None]

    def _look(self, name: str) -> NodeReport | None:
        """The report in a file; None where there is none, or its writer is gone or has not been seen to live yet."""
        now, seen = self._now(), self._seen.get(name)
        try:
            report = decoded(self._read(str(self._folder / name)))
        except OSError:
            report = None
        if seen is not None:
            seen.there = report is not None
        if report is not None:
            if seen is None:
                seen = self._seen[name] = _SeenReport(report)
            elif report.sequence != seen.report.sequence:
                seen.changed_ns = now
            seen.report = report
        if seen is None or not seen.changed_ns or now - seen.changed_ns > _ALIVE_SECONDS * NS:
            return None
        return seen.report

    def _judge_sharing(self) -> None:
        if self.nodes > 1:
            self.shared = True
        elif self.shared is None and self._now() - self._began_ns > _ALONE_SECONDS * NS:
            self.shared = False


def _states_of(reports: Iterable[NodeReport]) -> tuple[HangState, ...]:
    return tuple(state for report in reports for state in report.hang)


def _group_of(name: str) -> int:
    return zlib.crc32(name.encode()) % _GROUPS


def _group_file(number: int) -> str:
    return f"group-{number:02d}.json"
