"""The board: a node-local folder in which each rank publishes its newest state, and the lock of the serving rank.

It is in /dev/shm if possible. It belongs to one user and one run. Each rank has one small file, replaced as a whole: a
line of JSON about the rank (`RankHead`), then its numbers (`Numbers`) as MessagePack.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from telemetry.node.server_lock import ServerLock
from telemetry.records import Histogram, RankPace
from telemetry.util.clock import monotonic_ns, unix_time
from telemetry.util.files import read_small, remove_file, replace_file
from telemetry.util.processes import outer_uid, pid_namespace, slug, start_ticks

_STALE_SECONDS: Final = 3600.0
_PREFIX: Final = "torch-telemetry"
_MAX_FILE_BYTES: Final = 4 << 20
_MAX_HEAD_BYTES: Final = 4096

_ROOTS: Final = 8
"""The folder of all boards may have this many names. Others can take a name in a folder that is open to everyone."""

_ENDPOINT: Final = "endpoint.json"
GONE: Final = "gone-"
"""How the name of a dead process's file begins. Nothing else shows that the process was there."""

_LASTING: Final = "training_run_info"
"""The metric that a rank still shows while it cannot publish: it is true as long as the rank is there."""


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """The readings of the metrics of a rank, or of its machine, by the name of the metric.

    Attributes:
        values: a number, or for a metric with a label a number for each of its values.
        labels: the labels that all metrics of a group carry, by the name of the group.
        started: Unix time from which the counters count.
    """

    values: dict[str, float | dict[str, float]] = {}
    histograms: dict[str, Histogram] = {}
    labels: dict[str, dict[str, str]] = {}
    started: float = 0.0


class RankHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who has published a file.

    Attributes:
        ticks: start of the process, see `start_ticks`. With the pid it identifies the process.
        ended: whether the agent has ended by itself.
        rank_given: whether a launcher gave this process its rank.
        since: when it took the rank, monotonic ns.
        pace: for the other ranks; None in a job of one rank.
    """

    rank: int
    pid: int
    ticks: int | None
    ended: bool = False
    rank_given: bool = False
    since: int = 0
    pace: RankPace | None = None

    @property
    def order(self) -> tuple[bool, int, int]:
        """A sort key for processes that claim the same rank. The one with the smallest key keeps it."""
        return (not self.rank_given, self.since, self.pid)

    @property
    def lives(self) -> bool:
        """Whether the process is alive and has not ended its part."""
        return not self.ended and start_ticks(self.pid) == self.ticks


class RankState(msgspec.Struct, frozen=True):
    """What one rank has published."""

    head: RankHead
    numbers: Numbers


class Announcement(msgspec.Struct, frozen=True):
    """Where the node is served: the current port, and the first one."""

    port: int
    first: int


_encode_head: Final = msgspec.json.Encoder().encode
_decode_head: Final = msgspec.json.Decoder(RankHead).decode
_encode_numbers: Final = msgspec.msgpack.Encoder().encode
_decode_numbers: Final = msgspec.msgpack.Decoder(Numbers).decode


def _content(head: RankHead, numbers: Numbers) -> bytes:
    return _encode_head(head) + b"\n" + _encode_numbers(numbers)


def read_head(path: str | os.PathLike[str]) -> RankHead | None:
    """Read who has published a file; None if it is no such file."""
    try:
        return _decode_head(read_small(path, _MAX_HEAD_BYTES).partition(b"\n")[0])
    except (OSError, msgspec.MsgspecError):
        return None


def _state(path: str) -> RankState | None:
    """Read what a rank has published; None if it is gone, or of another version."""
    try:
        head, _, numbers = read_small(path, _MAX_FILE_BYTES).partition(b"\n")
        return RankState(_decode_head(head), _decode_numbers(numbers))
    except (OSError, msgspec.MsgspecError):
        return None


def _entries(folder: str | Path) -> list[str]:
    """The files of the ranks on a board."""
    try:
        with os.scandir(folder) as entries:
            return [e.path for e in entries if e.name.startswith("rank-")]
    except OSError:
        return []


def _living(folder: str | Path) -> list[tuple[str, RankHead]]:
    """The files of the living ranks on a board, and who has published them."""
    heads = ((entry, read_head(entry)) for entry in _entries(folder))
    return [(entry, head) for entry, head in heads if head is not None and head.lives]


def board_root() -> Path:
    """The folder of all boards of this user on this machine: the first name that is ours, else the first free one.

    All ranks of a user find the same folder, also in a container without privileges, where the user has another uid,
    such as 0. So the name has the uid outside of the container.
    """
    roots = _possible_roots()
    return next((root for root in roots if _is_ours(root)), None) or next(
        (root for root in roots if not os.path.lexists(root)), roots[0]
    )


def _possible_roots() -> list[Path]:
    shared = Path("/dev/shm")  # noqa: S108 - a folder of our own, mode 0700, is made below it
    base = shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    name = f"{_PREFIX}-{outer_uid()}"
    return [base / name, *(base / f"{name}-{number}" for number in range(2, _ROOTS + 1))]


def _own_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    if not _is_ours(path):
        raise OSError(f"{path} is not a folder of this user alone; remove it")


def _is_ours(path: Path) -> bool:
    """Whether this user has made a folder, and nobody else may use it.

    In a user namespace, all unknown users have the same uid. So the right to write is tested, too.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    alone = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return alone and os.access(path, os.W_OK | os.X_OK)


class Board:
    """The board of one run on this node.

    Args:
        run: name of the run.
        scope: the run folder, which distinguishes runs of the same name. It is the same on all ranks.
        node: this machine's name according to the launcher. One machine may stand for several nodes.
        root: folder of all boards; `board_root` by default.

    Attributes:
        path: the folder. ``name``: its name. It distinguishes two containers of one machine with the same node name.
        notice: a log message if the folder of all boards has an unusual name; else empty.
        server_lock: decides which rank serves the node.
        leads: whether this rank acts for its node now, with or without an endpoint.

    Raises:
        OSError: the folder cannot be made, or does not belong to this user alone.
    """

    def __init__(self, run: str, scope: str, node: str, root: Path | None = None) -> None:
        self._root = root or board_root()
        # Containers started with --ipc=host share /dev/shm but not their process ids. Each gets its own boards.
        where = f"{run}\0{scope}\0{node}\0{pid_namespace()}"
        digest = hashlib.sha256(where.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        self.path = self._root / f"{slug(run)[:48]}-{digest}"
        self.name = self.path.name
        self._make()
        usual = _possible_roots()[0]
        taken = root is None and self._root != usual
        self.notice = f"{usual} is not a folder of this user alone; the board is in {self._root}" if taken else ""
        self.server_lock = ServerLock(self.path / "endpoint.lock")
        self.leads = False
        self._number: int | None = None  # the rank that this process is shown under
        self._since = 0  # when it took that number
        self._rank_given = False  # whether a launcher gave it that number
        self._ticks = start_ticks(os.getpid())
        self._mine: Path | None = None
        self._own: RankState | None = None  # the newest state of this process, even if it could not be written

    def _make(self) -> None:
        _own_folder(self._root)
        _own_folder(self.path)

    # -- a rank's state ----------------------------------------------------------------------------------------

    def publish(self, rank: int, numbers: Numbers, *, pace: RankPace | None = None, ended: bool = False) -> None:
        """Replace this rank's state. A rank that has ended is still shown as long as others of the run are there.

        If the write fails, the old state is removed, because it would look like a new one. The rank still shows that it
        is there.

        Raises:
            OSError: the state cannot be written.
        """
        pid = os.getpid()
        head = RankHead(
            rank=rank,
            pid=pid,
            ticks=self._ticks,
            ended=ended,
            rank_given=self._rank_given,
            since=self._since,
            pace=pace,
        )
        path = self.path / f"rank-{rank}.{pid}"
        self._mine, self._own = path, RankState(head, numbers)
        try:
            self.put(path.name, _content(head, numbers))
        except OSError:
            remove_file(path)  # makes room for the rest
            values = {name: value for name, value in numbers.values.items() if name == _LASTING}
            lasting = msgspec.structs.replace(numbers, values=values, histograms={})
            try:
                replace_file(path, _content(msgspec.structs.replace(head, pace=None), lasting))
            except OSError:
                pass
            raise

    def states(self) -> list[RankState]:
        """The state of every living rank, sorted by rank. Removes the file of a dead rank.

        Until their next publication, two processes may have the same rank. Then only the one that will keep it is
        shown, because duplicate series would fail the scrape. See `rank_for`.
        """
        found: dict[int, RankState] = {}
        entries, mine = _entries(self.path), str(self._mine)
        if self._own is not None and mine not in entries:
            entries.append(mine)
        for entry in entries:
            own = self._own if entry == mine else None
            state = own or _state(entry)
            if state is None:
                continue
            head = state.head
            if own is None and not head.ended and not head.lives:
                self._mark_gone(entry, head.rank)
                continue
            other = found.get(head.rank)
            if other is None or (head.ended, *head.order) < (other.head.ended, *other.head.order):
                found[head.rank] = state
        return [found[rank] for rank in sorted(found)]

    def rank_for(self, claimed: int, *, rank_given: bool, world_size: int) -> int:
        """Choose the rank under which this process is shown: a number that no other living process of this board has.

        It is the claimed rank, unless another process has priority. A process whose rank was given by a launcher has
        priority over one without. Of two equal processes, the one that has had the number for longer has priority. The
        other one takes a free number above the ranks of the job. Call this before each publication. No lock is needed:
        if two processes take the same number at once, one of them gives way at its next publication.

        Args:
            claimed: the rank that this process claims.
            rank_given: whether a launcher or torch.distributed has given it.
            world_size: number of ranks of the job.
        """
        wanted = claimed if rank_given or self._number is None else self._number
        if self._is_claimed(wanted, rank_given=rank_given and wanted == claimed):
            kept = self._number
            if kept is None or kept == wanted or self._is_claimed(kept, rank_given=False):
                wanted = self._free_number(wanted, max(world_size, 1))
            else:
                wanted = kept
        if wanted != self._number:
            self._since = monotonic_ns()
        self._number, self._rank_given = wanted, rank_given and wanted == claimed
        return wanted

    def move(self, before: int, rank: int) -> None:
        """Show this process under another rank from now on. Its file is renamed, so it never exists twice."""
        pid = os.getpid()
        old, new = self.path / f"rank-{before}.{pid}", self.path / f"rank-{rank}.{pid}"
        try:
            old.replace(new)
        except FileNotFoundError:
            return  # nothing has been published yet
        self._mine, self._own = new, None

    def _is_claimed(self, number: int, *, rank_given: bool) -> bool:
        """Whether a living process claims a number and has priority over this one."""
        since = self._since if number == self._number else monotonic_ns()
        mine = (not rank_given, since, os.getpid())
        start = f"{self.path}/rank-{number}."
        return any(entry.startswith(start) and head.order < mine for entry, head in self._others())

    def _free_number(self, wanted: int, first: int) -> int:
        taken = {head.rank for _, head in self._others()} | {wanted}
        return next(number for number in itertools.count(first) if number not in taken)

    def _others(self) -> list[tuple[str, RankHead]]:
        own = f".{os.getpid()}"
        return [(entry, head) for entry, head in _living(self.path) if not entry.endswith(own)]

    def paces(self, but: int | None = None) -> tuple[RankPace, ...]:
        """The paces of the living ranks, without rank ``but``."""
        paces = [head.pace for _, head in _living(self.path)]
        return tuple(pace for pace in paces if pace is not None and pace.rank != but)

    def live_ranks(self, but: Path | None = None) -> int:
        """How many living processes publish here. The file ``but`` does not count."""
        return sum(1 for entry, _ in _living(self.path) if entry != str(but))

    def _mark_gone(self, entry: str, rank: int) -> None:
        try:
            Path(entry).replace(self.path / f"{GONE}{rank}")
        except OSError:
            remove_file(entry)

    # -- files for the other ranks -------------------------------------------------------------------------------------

    def put(self, name: str, content: bytes) -> None:
        """Write a file for the other ranks of this node.

        Raises:
            OSError: the file cannot be written.
        """
        try:
            replace_file(self.path / name, content)
        except FileNotFoundError:  # the folder was removed, as systemd's RemoveIPC does at a logout
            self._make()
            replace_file(self.path / name, content)

    def get(self, name: str) -> bytes | None:
        """Read a file that a rank of this node has written; None without one."""
        try:
            return read_small(self.path / name, _MAX_FILE_BYTES)
        except OSError:
            return None

    def stamp(self, name: str) -> int:
        """A number that changes with a file; 0 without one."""
        try:
            return (self.path / name).stat(follow_symlinks=False).st_mtime_ns
        except OSError:
            return 0

    # -- who serves --------------------------------------------------------------------------------------------

    def lead(self) -> bool:
        """Take or keep the lock, see `ServerLock.take`. Returns whether this rank serves the node from now on.

        Raises:
            OSError: the lock file cannot be made.
        """
        try:
            self.leads = self.server_lock.take()
        except FileNotFoundError:  # the folder was removed
            self._make()
            self.leads = self.server_lock.take()
        return self.leads

    def announce(self, port: int, first: int) -> None:
        """Publish where the node is served, see `Announcement`.

        Raises:
            OSError: the board cannot be written.
        """
        content = msgspec.json.encode(Announcement(port, first))
        if self.get(_ENDPOINT) != content:
            self.put(_ENDPOINT, content)

    def announced(self) -> Announcement | None:
        """The announcement of the rank that serves, or served last, if there is one."""
        content = self.get(_ENDPOINT)
        try:
            return None if content is None else msgspec.json.decode(content, type=Announcement)
        except msgspec.MsgspecError:
            return None

    # -- the end -----------------------------------------------------------------------------------------------

    def leave(self) -> bool:
        """Close the lock. The last rank removes the board and returns True."""
        last = self.live_ranks(but=self._mine) == 0
        if last:
            shutil.rmtree(self.path, ignore_errors=True)
        self.forget()
        return last

    def forget(self) -> None:
        """Close the lock file, in ``leave`` and in a forked child, which has a copy."""
        self.server_lock.close()

    def sweep(self) -> None:
        """Remove boards of this user that no living process has written to for an hour."""
        with os.scandir(self._root) as boards:
            for board in boards:
                try:
                    if board.path == str(self.path) or not board.is_dir(follow_symlinks=False):
                        continue
                    old = unix_time() - board.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS
                    if old and not _living(board.path):
                        shutil.rmtree(board.path, ignore_errors=True)
                except OSError:
                    continue
