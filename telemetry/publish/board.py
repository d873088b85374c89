"""The board: a node-local folder in which each rank publishes its newest state, with the lock of the serving rank.

It is in /dev/shm if possible. It belongs to one user and one run. Each rank has one small file, replaced as a whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from telemetry.publish.hang_board import mark_gone
from telemetry.publish.server_lock import ServerLock
from telemetry.records import RankPace, pace_fields, pace_from
from telemetry.util.clock import monotonic_ns, unix_time
from telemetry.util.files import read_small, remove_file, replace_file
from telemetry.util.processes import outer_uid, pid_namespace, slug, start_ticks

_SEPARATOR: Final = b"\0"
_STALE_SECONDS: Final = 3600.0
_PREFIX: Final = "torch-telemetry"
_MAX_FILE_BYTES: Final = 4 << 20
_MAX_HEAD_BYTES: Final = 4096
"""Maximum size of what precedes the families: the identity of the rank, and its pace."""

_ROOTS: Final = 8
"""How many names the folder of all boards may have. Others can take a name in a folder that is open to everyone."""

_ENDPOINT: Final = "endpoint.json"
_LASTING: Final = b"# HELP training_run_info "
"""The family that stays true while a rank cannot publish: it says that the rank is there, and counts nothing."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank has published: its identity, and its families as (header, samples)."""

    rank: int
    pid: int
    families: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class _File:
    """A rank's file as it was read. ``version``: inode and modification time, which change when it is replaced."""

    version: tuple[int, int]
    head: dict[str, Any]
    state: RankState


def board_root() -> Path:
    """The folder of all boards of this user on this machine: the first name that is ours, else the first free one.

    All ranks of a user come to the same folder, in a container without privileges too: there the user has another uid,
    such as 0. So the name has the uid outside of it.
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


class Board:
    """The board of one run on this node.

    Args:
        run: name of the run.
        scope: distinguishes two runs of the same name: the run folder. It is the same on all ranks.
        node: this machine's name according to the launcher. One machine may stand for several nodes.
        root: folder of all boards; `board_root` by default.

    Attributes:
        path: the folder.
        notice: for the log, if the folder of all boards could not have its usual name; else empty.

    Raises:
        OSError: the folder cannot be made, or does not belong to this user alone.
    """

    def __init__(self, run: str, scope: str, node: str, root: Path | None = None) -> None:
        self._root = root or board_root()
        # Containers started with --ipc=host share /dev/shm but not their process ids. Each gets its own boards.
        where = f"{run}\0{scope}\0{node}\0{pid_namespace()}"
        digest = hashlib.sha256(where.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        self.path = self._root / f"{slug(run)[:48]}-{digest}"
        self._make()
        usual = _possible_roots()[0]
        taken = root is None and self._root != usual
        self.notice = f"{usual} is not a folder of this user alone; the board is in {self._root}" if taken else ""
        self.server_lock = ServerLock(self.path / "endpoint.lock")
        self._mine: Path | None = None
        self._number: int | None = None  # the rank that this process is shown under
        self._since = 0  # when it took that number
        self._rank_given = False  # whether a launcher gave it that number
        self._ticks = start_ticks(os.getpid())
        self._known: dict[str, _File] = {}
        self._own: _File | None = None  # the newest state of this process, even if it could not be written

    def _make(self) -> None:
        _own_folder(self._root)
        _own_folder(self.path)

    def _replace(self, path: Path, content: bytes) -> None:
        try:
            replace_file(path, content)
        except FileNotFoundError:  # the folder was removed, as systemd's RemoveIPC does at a logout
            self._make()
            replace_file(path, content)

    # -- a rank's state ----------------------------------------------------------------------------------------

    def publish(
        self, rank: int, families: list[tuple[bytes, bytes]], *, pace: RankPace | None = None, ended: bool = False
    ) -> None:
        """Replace this rank's state. A rank that has ended is still shown as long as others of the run are there.

        If it cannot be written, the old state is taken back, because nobody could tell it from a new one. What is left
        says that the rank is there.

        Raises:
            OSError: it cannot be written.
        """
        pid = os.getpid()
        meta: dict[str, Any] = {"rank": rank, "pid": pid, "ticks": self._ticks, "ended": ended}
        meta |= {"told": self._rank_given, "since": self._since}
        if pace is not None:
            meta["pace"] = pace_fields(pace)
        path = self.path / f"rank-{rank}.{pid}"
        self._mine, self._own = path, _File((0, 0), meta, RankState(rank, pid, tuple(families)))
        try:
            self._replace(path, _content(meta, families))
        except OSError:
            remove_file(path)  # makes the room that is needed now
            meta.pop("pace", None)
            lasting = [family for family in families if family[0].startswith(_LASTING)]
            try:
                replace_file(path, _content(meta, lasting))
            except OSError:
                pass
            raise

    def states(self) -> list[RankState]:
        """The state of every living rank, sorted by rank. Removes the file of a dead rank.

        Until their next publication, two processes may have the same rank. Then only the one that will keep it is
        shown, because duplicate series would fail the scrape. See `rank_for`.
        """
        states: dict[int, tuple[tuple[bool, bool, int, int], RankState]] = {}
        known, self._known = self._known, {}
        entries, mine = self._entries(), str(self._mine)
        if self._own is not None and mine not in entries:
            entries.append(mine)
        for entry in entries:
            try:
                own = self._own if entry == mine else None
                file = own or _newest(entry, known.get(entry))
                ended, state, ticks = bool(file.head.get("ended")), file.state, file.head["ticks"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if own is None and not ended and start_ticks(state.pid) != ticks:
                mark_gone(entry, state.rank)
                continue
            self._known[entry] = file
            order = (ended, *_order_of(file.head, state.pid))
            if state.rank not in states or order < states[state.rank][0]:
                states[state.rank] = (order, state)
        return [states[rank][1] for rank in sorted(states)]

    def rank_for(self, claimed: int, *, rank_given: bool, world_size: int) -> int:
        """The rank under which this process is shown: a number that no other living process of this board has.

        It is the claimed rank, unless another process has priority. A process whose rank was given by a launcher has
        priority over one without. Of two equal processes, the one that has had the number for longer has priority. The
        other one takes a free number above the ranks of the job. Must be called before each publication. No lock is
        needed: if two processes take the same number at once, one of them gives way at its next publication.

        Args:
            claimed: the rank that this process claims.
            rank_given: whether a launcher or torch.distributed has given it.
            world_size: number of ranks of the job.
        """
        wanted = claimed if rank_given or self._number is None else self._number
        if self._claimants_before(wanted, rank_given=rank_given and wanted == claimed):
            kept = self._number
            if kept is None or kept == wanted or self._claimants_before(kept, rank_given=False):
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

    def _claimants_before(self, number: int, *, rank_given: bool) -> int:
        """How many living processes claim a number and have priority over this one."""
        since = self._since if number == self._number else monotonic_ns()
        mine = (not rank_given, since, os.getpid())
        return sum(1 for order in self._claimants(number) if order < mine)

    def _claimants(self, number: int) -> list[tuple[bool, int, int]]:
        start, own = f"{self.path}/rank-{number}.", f".{os.getpid()}"
        heads = (_head(e) for e in self._entries() if e.startswith(start) and not e.endswith(own))
        return [_order_of(head, int(head["pid"])) for head in heads if head is not None]

    def _free_number(self, wanted: int, first: int) -> int:
        """A free number from ``first`` on. Processes that give way at the same time take different ones."""
        own = f".{os.getpid()}"
        heads = (_head(e) for e in self._entries() if not e.endswith(own))
        taken = {head["rank"] for head in heads if head is not None} | {wanted}
        free = (number for number in itertools.count(first) if number not in taken)
        before = self._claimants_before(wanted, rank_given=False)
        return next(itertools.islice(free, max(0, before - 1), None))

    def paces(self, but: int | None = None) -> tuple[RankPace, ...]:
        """The paces of the living ranks, without rank ``but``."""
        paces = (_pace(head) for entry in self._entries() if (head := _head(entry)) is not None)
        return tuple(pace for pace in paces if pace is not None and pace.rank != but)

    def live_ranks(self, but: Path | None = None) -> int:
        """How many living processes publish here. The file ``but`` does not count."""
        return sum(1 for entry in self._entries() if entry != str(but) and _alive(entry))

    def _entries(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [e.path for e in entries if e.name.startswith("rank-")]
        except OSError:
            return []

    def put(self, name: str, content: bytes) -> None:
        """Write a file for the other ranks of this node.

        Raises:
            OSError: it cannot be written.
        """
        replace_file(self.path / name, content)

    def get(self, name: str) -> bytes | None:
        """Read a file that a rank of this node has written; else None."""
        try:
            return read_small(self.path / name, _MAX_FILE_BYTES)
        except OSError:
            return None

    def stamp(self, name: str) -> int:
        """A number that changes when a file changes; 0 if there is no file."""
        try:
            return (self.path / name).stat(follow_symlinks=False).st_mtime_ns
        except OSError:
            return 0

    # -- who serves --------------------------------------------------------------------------------------------

    def lead(self) -> bool:
        """Whether this rank serves the node from now on: take or keep the lock, see `ServerLock.take`.

        Raises:
            OSError: the lock file cannot be made.
        """
        try:
            return self.server_lock.take()
        except FileNotFoundError:  # the folder was removed
            self._make()
            return self.server_lock.take()

    def announce(self, ports: list[int]) -> None:
        """Publish the port of the endpoint, the last of ``ports``. The others are taken by ranks that served before.

        Raises:
            OSError: the board cannot be written.
        """
        self._replace(self.path / _ENDPOINT, json.dumps({"ports": ports, "pid": os.getpid()}).encode())

    def announced_ports(self) -> list[int]:
        """What the rank that serves, or has served last, has announced; empty if that is unknown."""
        try:
            ports = json.loads(read_small(self.path / _ENDPOINT))["ports"]
            return [port for port in ports if isinstance(port, int) and 0 < port < 65536]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    # -- the end -----------------------------------------------------------------------------------------------

    def leave(self) -> bool:
        """Mark this rank's newest state as ended. If it was the last rank, removes the board and returns True."""
        last = self.live_ranks(but=self._mine) == 0
        if last:
            shutil.rmtree(self.path, ignore_errors=True)
        self.forget()
        return last

    def forget(self) -> None:
        """Close the lock file: in ``leave``, and in a forked child, which has a copy."""
        self.server_lock.close()

    def sweep(self) -> int:
        """Remove boards of this user that no living process has written to for an hour. Returns how many."""
        removed = 0
        with os.scandir(self._root) as boards:
            for board in boards:
                try:
                    if board.path == str(self.path) or not board.is_dir(follow_symlinks=False):
                        continue
                    old = unix_time() - board.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS
                    if old and not any(_alive(e.path) for e in os.scandir(board.path) if e.name.startswith("rank-")):
                        shutil.rmtree(board.path, ignore_errors=True)
                        removed += 1
                except OSError:
                    continue
        return removed


def _own_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    if not _is_ours(path):
        raise OSError(f"{path} is not a folder of this user alone; remove it")


def _is_ours(path: Path) -> bool:
    """Whether it is a folder that this user has made, and nobody else may use.

    Every user that a user namespace does not know has the same uid in it. So the right to write is tested, too.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    alone = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return alone and os.access(path, os.W_OK | os.X_OK)


def _content(head: dict[str, Any], families: list[tuple[bytes, bytes]]) -> bytes:
    return _SEPARATOR.join([json.dumps(head).encode(), *itertools.chain.from_iterable(families)])


def _newest(path: str, known: _File | None) -> _File:
    """Read a rank's file, or return ``known`` if it has not changed.

    Raises:
        OSError: it does not exist any more.
        ValueError, KeyError, TypeError: it was not written by this version.
    """
    status = os.lstat(path)
    version = (status.st_ino, status.st_mtime_ns)
    if known is not None and known.version == version:
        return known
    parts = read_small(path, _MAX_FILE_BYTES).split(_SEPARATOR)
    head = json.loads(parts[0])
    state = RankState(int(head["rank"]), int(head["pid"]), tuple(zip(parts[1::2], parts[2::2], strict=False)))
    return _File(version, head, state)


def _alive(entry: str | os.PathLike[str]) -> bool:
    """Whether the process that wrote a file is alive and has not ended its part."""
    return _head(entry) is not None


def _head(entry: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The head of the file of a process that is alive and has not ended its part; None for any other file."""
    try:
        meta: dict[str, Any] = json.loads(read_small(entry, _MAX_HEAD_BYTES).partition(_SEPARATOR)[0])
        return meta if not meta.get("ended") and start_ticks(int(meta["pid"])) == meta["ticks"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _order_of(head: dict[str, Any], pid: int) -> tuple[bool, int, int]:
    """A sort key for processes that claim the same rank. The one with the smallest key keeps it."""
    since = head.get("since", 0)
    return (not head.get("told", True), since if isinstance(since, int) else 0, pid)


def _pace(head: dict[str, Any]) -> RankPace | None:
    """The pace in a head; None before the first pace, or if it is of another version."""
    try:
        return pace_from(head["pace"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
