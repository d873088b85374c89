"""The nodes of a job exchange the paces of their ranks through small files in the run folder.

    RUN_DIR/job/node-NAME.json       the ranks of one node, written by the rank that serves it
    RUN_DIR/job/group-NN.json        of a large job: the candidates among the ranks of one group of nodes, and the
                                     numbers of all its ranks

There is no collective and no port. In a job of up to `_FLAT` nodes, each node reads the files of all others. In a
larger job each node belongs to one of `_GROUPS` groups, by a hash of its name. It reads the files of its group and one
file for each other group. The first living node of a group writes that file. So no node reads more than about 80 files.
The folder is listed once a minute; in the first two minutes, at each cycle.

A shared file system may be slow or hang, so `JobExchange.cycle` runs on its own thread.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from telemetry.core.hang_records import GONE, NODE_SILENT, HangState
from telemetry.job.candidates import candidates, of_node
from telemetry.job.hang_states import from_rows, to_rows
from telemetry.job.node_report import MAX_BYTES, NodeReport, decoded, encoded
from telemetry.records import COMPUTE
from telemetry.util.clock import NS, now_ns
from telemetry.util.files import read_small, remove_file, replace_file
from telemetry.util.processes import slug

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from telemetry.records import RankPace

_FLAT: Final = 64
"""Up to this many nodes, each node reads the files of all others."""

_GROUPS: Final = 40
"""With 1,250 nodes a group has 31 nodes, and a node reads 71 files a cycle."""

_LIST_SECONDS: Final = 60.0
"""How often the folder is listed."""

_YOUNG_SECONDS: Final = 120.0
"""For this time it is listed at each cycle, because the nodes of a job start at different moments."""

_ALIVE_SECONDS: Final = 45.0
"""If a report has not changed for this long, its node has ended. NFS may show a change 30 s late."""

_STALE_SECONDS: Final = 3600.0
"""A file that was first read this long ago and never changed is of an attempt that was killed. It is removed."""

_LOST_SECONDS: Final = 60.0
"""While the job hangs, the ranks of a node whose file has not changed for this time are taken to be gone."""

_GROUP_LOST_SECONDS: Final = 150.0
"""The same of the file of a group of several nodes. If its writer is lost, another writes it, after `_ALIVE_SECONDS`,
some cycles and, on NFS, twice 30 s."""

_ALONE_SECONDS: Final = 90.0
"""If no file of another node appears for this long, the run folder is assumed not to be shared."""


@dataclass(slots=True)
class _SeenReport:
    """The newest report in one file.

    Attributes:
        changed_ns: when a change of its sequence was seen; 0 before the first.
        there: whether the file could be read the last time.
        first_ns: when it was first read.
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
        read, write: functions that read and replace a file. Measurements of a slow file system replace them.

    Attributes:
        shared: whether another node's file has been seen; None while that is not known yet.
        nodes: number of living nodes of the job at the last cycle, including this one.
        hang: during a hang, the states of the other nodes' ranks at the last cycle.
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
        self._speaks = False  # for its group
        self._sequence = int.from_bytes(os.urandom(4), "big")  # random, so it differs from that of an earlier process
        self.shared: bool | None = None
        self.nodes = 1
        self.hang: tuple[HangState, ...] = ()

    def cycle(self, ranks: Iterable[RankPace], hang: tuple[HangState, ...] = ()) -> tuple[RankPace, ...]:
        """Write the paces of this node's ranks, and read those of the others.

        Args:
            ranks: the paces of this node's ranks.
            hang: during a hang, their states.

        Returns:
            The candidates among the ranks of the other nodes. Each names its node.

        Raises:
            OSError: this node's file cannot be written.
        """
        own = of_node(self._node, ranks)
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
            # Files of other groups were read when fewer nodes were there, and not since.
            others = [name for name in others if _group_of(name) == _group_of(self._mine)]
        if hang or self.hang:
            self.hang += self._lost(others)
        self._judge_sharing()
        ranks_here = {pace.rank for pace in own}
        return tuple(pace for pace in found if pace.rank not in ranks_here)

    def leave(self) -> None:
        """Remove this node's files, because the run has ended here. Another node writes the group's file again."""
        remove_file(self._folder / self._mine)
        if self._speaks:
            remove_file(self._folder / _group_file(_group_of(self._mine)))

    # -- a large job -------------------------------------------------------------------------------------------

    def _through_groups(
        self, own: tuple[RankPace, ...], others: list[str], hang: tuple[HangState, ...]
    ) -> tuple[RankPace, ...]:
        group = _group_of(self._mine)
        members = [name for name in others if _group_of(name) == group]
        living = {name: report for name in members if (report := self._look(name)) is not None}
        paces = candidates([*own, *(pace for report in living.values() for pace in report.ranks)])
        self._speaks = self._mine < min(living, default="~")  # the first living node of a group writes the group's file
        if self._speaks:
            states = hang + _states_of(living.values())
            states += self._lost(members) if states else ()
            all_ranks = to_rows(gone([*own, *(pace for report in living.values() for pace in report.ranks)]))
            report = NodeReport(self._node, self._sequence, 1 + len(living), paces, states, all_ranks)
            self._put(_group_file(group), report)
        others_files = [_group_file(number) for number in range(_GROUPS) if number != group]
        reports = self._living(others_files)
        self.nodes = 1 + len(living) + sum(report.nodes for report in reports)
        self.hang = _states_of([*living.values(), *reports])
        if hang or self.hang:
            self.hang += self._lost_groups(others_files)
        return candidates([*paces, *(pace for report in reports for pace in report.ranks)])

    def _lost(self, names: Iterable[str]) -> tuple[HangState, ...]:
        """The ranks of nodes whose files have not changed for a minute. A node that ends removes its file."""
        reports = (seen.report for name in names if (seen := self._silent(name, _LOST_SECONDS)) is not None)
        return tuple(state for report in reports for state in gone(report.ranks))

    def _lost_groups(self, files: Iterable[str]) -> tuple[HangState, ...]:
        """The ranks of all nodes of the groups in which no node writes the group's file any more."""
        lost: list[HangState] = []
        for name in files:
            seen = self._silent(name, _LOST_SECONDS)
            if seen is None or (seen.report.nodes > 1 and self._silent(name, _GROUP_LOST_SECONDS) is None):
                continue
            try:
                lost += from_rows(seen.report.members)
            except (TypeError, ValueError, KeyError, AttributeError):
                continue
        return tuple(lost)

    def _silent(self, name: str, seconds: float) -> _SeenReport | None:
        """The report in a file that is there, and was seen to change, but not for this time; else None."""
        seen = self._seen.get(name)
        if seen is None or not seen.changed_ns or not seen.there or self._now() - seen.changed_ns < seconds * NS:
            return None
        return seen

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
        for name, seen in self._seen.items():
            if not seen.changed_ns and self._now() - seen.first_ns > _STALE_SECONDS * NS:
                remove_file(self._folder / name)
        known = {*self._names, *map(_group_file, range(_GROUPS))}
        self._seen = {name: seen for name, seen in self._seen.items() if name in known}

    def _living(self, names: Iterable[str]) -> list[NodeReport]:
        return [report for name in names if (report := self._look(name)) is not None]

    def _look(self, name: str) -> NodeReport | None:
        """The report in a file; None without a report, or if its writer has ended or was not seen alive yet."""
        now, seen = self._now(), self._seen.get(name)
        try:
            report = decoded(self._read(str(self._folder / name)))
        except OSError:
            report = None
        if seen is not None:
            seen.there = report is not None
        if report is not None:
            if seen is None:
                seen = self._seen[name] = _SeenReport(report, now)
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


def gone(paces: Iterable[RankPace]) -> tuple[HangState, ...]:
    """What is true of ranks whose nodes are lost. Their paces name their nodes."""
    return tuple(HangState(p.rank, p.node or "", COMPUTE, GONE, state=NODE_SILENT) for p in paces)


@lru_cache(maxsize=1 << 12)  # each cycle asks for the same names twice
def _group_of(name: str) -> int:
    return zlib.crc32(os.fsencode(name)) % _GROUPS  # the folder may have names that are no UTF-8


def _group_file(number: int) -> str:
    return f"group-{number:02d}.json"
