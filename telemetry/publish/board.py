"""The board: a node-local folder where each rank publishes its newest state, and the locks that name the server.

It is in /dev/shm if possible, belongs to one user and one run, and has one small file per rank, replaced as a whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import stat
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from telemetry.core.filesystem import read_small, replace_file
from telemetry.core.identity import slug
from telemetry.core.interval import RankPace
from telemetry.publish.hang_board import bury
from telemetry.publish.server_locks import ServerLocks

_SEPARATOR: Final = b"\0"
_STALE_SECONDS: Final = 3600.0
_PREFIX: Final = "torch-telemetry"
_MAX_FILE_BYTES: Final = 4 << 20
_MAX_HEAD_BYTES: Final = 4096
"""What precedes the families: the identity of the rank, and its pace."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank has published: who it is, and its families as (header, samples)."""

    rank: int
    pid: int
    families: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class _File:
    """A rank's file as it was read. ``version``: its inode and time; one that replaces it has others."""

    version: tuple[int, int]
    head: dict[str, Any]
    state: RankState


def start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; with its pid that identifies it. None if it is gone."""
    try:
        fields = read_small(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in {b"Z", b"X"}:
        return None
    return int(fields[19])


def board_root() -> Path:
    """The folder of all boards of this user on this machine."""
    shared = Path("/dev/shm")  # noqa: S108 - a folder of our own, mode 0700, is made below it
    base = shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return base / f"{_PREFIX}-{os.getuid()}"


class Board:
    """The board of one run on this node.

    Args:
        run: name of the run.
        scope: what tells two runs of the same name apart, the same on all ranks: the run folder.
        node: this machine's name, as the launcher has it: one machine may stand in for several nodes.
        root: folder of all boards; `board_root` by default.

    Raises:
        OSError: the folder cannot be made, or is not ours alone.
    """

    def __init__(self, run: str, scope: str, node: str, root: Path | None = None) -> None:
        self._root = root or board_root()
        # Containers started with --ipc=host share /dev/shm but not their process ids: each has boards of its own.
        where = f"{run}\0{scope}\0{node}\0{_pid_namespace()}"
        digest = hashlib.sha256(where.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        self.path = self._root / f"{slug(run)[:48]}-{digest}"
        self._make()
        self.server_locks = ServerLocks(self.path)
        self._mine: Path | None = None
        self._number: int | None = None  # the rank this process is shown under
        self._since = 0  # when it took that number
        self._told = False  # whether that number is the one a launcher gave it
        self._ticks = start_ticks(os.getpid())
        self._known: dict[str, _File] = {}
        self._own: _File | None = None  # what was published last

    def _make(self) -> None:
        _own_folder(self._root)
        _own_folder(self.path)

    # -- a rank's state ----------------------------------------------------------------------------------------

    def publish(
        self, rank: int, families: list[tuple[bytes, bytes]], *, pace: RankPace | None = None, ended: bool = False
    ) -> None:
        """Replace this rank's state. What has ended by itself is shown on, as long as others of the run are there."""
        pid = os.getpid()
        meta: dict[str, Any] = {"rank": rank, "pid": pid, "ticks": self._ticks, "ended": ended}
        meta |= {"told": self._told, "since": self._since}
        if pace is not None:
            meta["pace"] = asdict(pace)
        parts = [json.dumps(meta).encode(), *itertools.chain.from_iterable(families)]
        path, content = self.path / f"rank-{rank}.{pid}", _SEPARATOR.join(parts)
        try:
            replace_file(path, content)
        except FileNotFoundError:  # swept away, as systemd's RemoveIPC does at a logout
            self._make()
            replace_file(path, content)
        self._mine = path
        self._own = _File((0, 0), meta, RankState(rank, pid, tuple(families)))

    def states(self) -> list[RankState]:
        """The state of every rank that is alive, by rank. A dead rank's file is removed.

        Until the next publication two processes may have one rank: the one that will keep it is shown, as the same
        series twice would fail the scrape. See `rank_for`.
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
                bury(entry, state.rank)
                continue
            self._known[entry] = file
            order = (ended, *_order_of(file.head, state.pid))
            if state.rank not in states or order < states[state.rank][0]:
                states[state.rank] = (order, state)
        return [states[rank][1] for rank in sorted(states)]

    def rank_for(self, claimed: int, *, told: bool, world_size: int) -> int:
        """The rank under which this process is to be shown: a number that no other living process of this board has.

        That is the rank it claims, unless another one holds it: one that was told so by a launcher before one that
        was not, and of two alike the one that has had the number for longer. Who has to give way takes a free number
        above the ranks of the job. To be called before each publication; no lock is needed: of two that take one
        number at once, one gives way at its next publication.

        Args:
            claimed: the rank this process has been told, or takes itself to be.
            told: whether a launcher or torch.distributed has said so.
            world_size: number of ranks of the job.
        """
        wanted = claimed if told or self._number is None else self._number
        if self._rivals_before(wanted, told=told and wanted == claimed):
            kept = self._number
            if kept is None or kept == wanted or self._rivals_before(kept, told=False):
                wanted = self._free_number(wanted, max(world_size, 1))
            else:
                wanted = kept
        if wanted != self._number:
            self._since = time.monotonic_ns()
        self._number, self._told = wanted, told and wanted == claimed
        return wanted

    def move(self, before: int, rank: int) -> None:
        """This process is shown under another rank from now on: its file is renamed, and never there twice."""
        pid = os.getpid()
        old, new = self.path / f"rank-{before}.{pid}", self.path / f"rank-{rank}.{pid}"
        try:
            old.replace(new)
        except FileNotFoundError:
            return  # nothing was published yet
        self._mine, self._own = new, None

    def _rivals_before(self, number: int, *, told: bool) -> int:
        """How many living processes claim a number and come before this one."""
        since = self._since if number == self._number else time.monotonic_ns()
        mine = (not told, since, os.getpid())
        return sum(1 for order in self._rivals(number) if order < mine)

    def _rivals(self, number: int) -> list[tuple[bool, int, int]]:
        start, own = f"{self.path}/rank-{number}.", f".{os.getpid()}"
        heads = (_head(e) for e in self._entries() if e.startswith(start) and not e.endswith(own))
        return [_order_of(head, int(head["pid"])) for head in heads if head is not None]

    def _free_number(self, wanted: int, first: int) -> int:
        """A number from ``first`` on that nobody has; those who have to give way together take different ones."""
        own = f".{os.getpid()}"
        heads = (_head(e) for e in self._entries() if not e.endswith(own))
        taken = {head["rank"] for head in heads if head is not None} | {wanted}
        free = (number for number in itertools.count(first) if number not in taken)
        before = self._rivals_before(wanted, told=False)
        return next(itertools.islice(free, max(0, before - 1), None))

    def paces(self, but: int | None = None) -> tuple[RankPace, ...]:
        """How the ranks that are alive get on, without rank ``but``."""
        paces = (_pace(head) for entry in self._entries() if (head := _head(entry)) is not None)
        return tuple(pace for pace in paces if pace is not None and pace.rank != but)

    def live_ranks(self, but: Path | None = None) -> int:
        """How many processes publish here and are alive, one's own file left out."""
        return sum(1 for entry in self._entries() if entry != str(but) and _alive(entry))

    def _entries(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [e.path for e in entries if e.name.startswith("rank-")]
        except OSError:
            return []

    def put(self, name: str, content: bytes) -> None:
        """Leave a file for the other ranks of this node.

        Raises:
            OSError: it cannot be written.
        """
        replace_file(self.path / name, content)

    def get(self, name: str) -> bytes | None:
        """A file that a rank of this node has left; None without one."""
        try:
            return read_small(self.path / name, _MAX_FILE_BYTES)
        except OSError:
            return None

    def stamp(self, name: str) -> int:
        """Changes when a file does; 0 where there is none."""
        try:
            return (self.path / name).stat(follow_symlinks=False).st_mtime_ns
        except OSError:
            return 0

    # -- who serves --------------------------------------------------------------------------------------------

    def announce(self, port: int, place: int = 0) -> None:
        """Say at which port the holder of a server lock serves, so that its successor serves at the same."""
        content = json.dumps({"port": port, "pid": os.getpid()}).encode()
        replace_file(self.path / _announcement(place), content)

    def announced_port(self, place: int = 0) -> int | None:
        """The port at which this run was last served on this node, by the holder of a server lock."""
        try:
            port: Any = json.loads(read_small(self.path / _announcement(place)))["port"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return port if isinstance(port, int) and 0 < port < 65536 else None

    # -- the end -----------------------------------------------------------------------------------------------

    def leave(self) -> bool:
        """Leave what was published last, as ended. Returns whether this was the last rank; then the board is gone."""
        last = self.live_ranks(but=self._mine) == 0
        if last:
            shutil.rmtree(self.path, ignore_errors=True)
        self.forget()
        return last

    def forget(self) -> None:
        """Close the lock files: in ``leave``, and in a forked child, whose copies they are."""
        self.server_locks.close()

    def sweep(self) -> int:
        """Remove boards of this user that no living process has written to for an hour. Returns how many."""
        removed = 0
        with os.scandir(self._root) as boards:
            for board in boards:
                try:
                    if board.path == str(self.path) or not board.is_dir(follow_symlinks=False):
                        continue
                    old = time.time() - board.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS
                    if old and not any(_alive(e.path) for e in os.scandir(board.path) if e.name.startswith("rank-")):
                        shutil.rmtree(board.path, ignore_errors=True)
                        removed += 1
                except OSError:
                    continue
        return removed


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _own_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{path} is not a folder of this user alone; remove it")


def _newest(path: str, known: _File | None) -> _File:
    """A rank's file, which is not read again while it is the one that is known.

    Raises:
        OSError: it is not there any more.
        ValueError, KeyError, TypeError: it is no file of this version's.
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
    """Whether the process that wrote a file still runs and has not ended its part."""
    return _head(entry) is not None


def _head(entry: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What a process that still runs, and has not ended its part, says of itself; None of any other."""
    try:
        meta: dict[str, Any] = json.loads(read_small(entry, _MAX_HEAD_BYTES).partition(_SEPARATOR)[0])
        return meta if not meta.get("ended") and start_ticks(int(meta["pid"])) == meta["ticks"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _order_of(head: dict[str, Any], pid: int) -> tuple[bool, int, int]:
    """Of two processes that claim one rank, the lesser keeps it."""
    since = head.get("since", 0)
    return (not head.get("told", True), since if isinstance(since, int) else 0, pid)


def _pace(head: dict[str, Any]) -> RankPace | None:
    """None where there is none yet, or one of another version's."""
    try:
        return RankPace(**head["pace"])
    except (KeyError, TypeError):
        return None
