"""The board: a node-local folder in which each rank publishes its newest state, with the locks of the serving rank.

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

from telemetry.core.clock import monotonic_ns, unix_time
from telemetry.core.filesystem import read_small, replace_file
from telemetry.core.identity import slug
from telemetry.core.processes import pid_namespace, start_ticks
from telemetry.core.tick import RankPace, pace_fields, pace_from
from telemetry.publish.hang_board import mark_gone
from telemetry.publish.server_locks import ServerLocks

_SEPARATOR: Final = b"\0"
_STALE_SECONDS: Final = 3600.0
_PREFIX: Final = "torch-telemetry"
_MAX_FILE_BYTES: Final = 4 << 20
_MAX_HEAD_BYTES: Final = 4096
"""Maximum size of what precedes the families: the identity of the rank, and its pace."""


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
    """The folder of all boards of this user on this machine."""
    shared = Path("/dev/shm")  # noqa: S108 - a folder of our own, mode 0700, is made below it
    base = shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return base / f"{_PREFIX}-{os.getuid()}"


class Board:
    """The board of one run on this node.

    Args:
        run: name of the run.
        scope: distinguishes two runs of the same name: the run folder. It is the same on all ranks.
        node: this machine's name according to the launcher. One machine may stand for several nodes.
        root: folder of all boards; `board_root` by default.

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
        self.server_locks = ServerLocks(self.path)
        self._mine: Path | None = None
        self._number: int | None = None  # the rank that this process is shown under
        self._since = 0  # when it took that number
        self._rank_given = False  # whether a launcher gave it that number
        self._ticks = start_ticks(os.getpid())
        self._known: dict[str, _File] = {}
        self._own: _File | None = None  # the newest publication of this process

    def _make(self) -> None:
        _own_folder(self._root)
        _own_folder(self.path)

    # -- a rank's state ----------------------------------------------------------------------------------------

    def publish(
        self, rank: int, families: list[tuple[bytes, bytes]], *, pace: RankPace | None = None, ended: bool = False
    ) -> None:
        """Replace this rank's state. A rank that has ended is still shown as long as others of the run are there."""
        pid = os.getpid()
        meta: dict[str, Any] = {"rank": rank, "pid": pid, "ticks": self._ticks, "ended": ended}
        meta |= {"told": self._rank_given, "since": self._since}
        if pace is not None:
            meta["pace"] = pace_fields(pace)
        parts = [json.dumps(meta).encode(), *itertools.chain.from_iterable(families)]
        path, content = self.path / f"rank-{rank}.{pid}", _SEPARATOR.join(parts)
        try:
            replace_file(path, content)
        except FileNotFoundError:  # the folder was removed, as systemd's RemoveIPC does at a logout
            self._make()
            replace_file(path, content)
        self._mine = path
        self._own = _File((0, 0), meta, RankState(rank, pid, tuple(families)))

    def states(self) -> list[RankState]:
        """The state of every living rank, sorted by rank. Removes the file of a dead rank.

        Until their next publication, two processes may have the same rank. Then only the one that will keep it is
        shown, because duplicate series would fail the scrape. See `rank_for`.
        """
        states: dict[int, tuple[tuple[bool, bool, int, int], RankState]] = {}
        known, self._known = self._known, {}
        for entry in self._entries():
            try:
                own = self._own if entry == str(self._mine) else None
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

    def announce(self, port: int, place: int = 0) -> None:
        """Publish the port at which the holder of a server lock serves, so that its successor can use the same port."""
        content = json.dumps({"port": port, "pid": os.getpid()}).encode()
        replace_file(self.path / _announcement(place), content)

    def announced_port(self, place: int = 0) -> int | None:
        """The port at which the holder of a server lock last served this run on this node; None if unknown."""
        try:
            port: Any = json.loads(read_small(self.path / _announcement(place)))["port"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return port if isinstance(port, int) and 0 < port < 65536 else None

    # -- the end -----------------------------------------------------------------------------------------------

    def leave(self) -> bool:
        """Mark this rank's newest state as ended. If it was the last rank, removes the board and returns True."""
        last = self.live_ranks(but=self._mine) == 0
        if last:
            shutil.rmtree(self.path, ignore_errors=True)
        self.forget()
        return last

    def forget(self) -> None:
        """Close the lock files: in ``leave``, and in a forked child, which has copies."""
        self.server_locks.close()

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
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{path} is not a folder of this user alone; remove it")


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


def _announcement(place: int) -> str:
    return "endpoint.json" if place == 0 else f"endpoint-{place}.json"


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
