"""The board: a node-local folder in which each rank publishes its newest state, and who leads and is which rank there.

It is in /dev/shm if possible. It belongs to one user and one run. Each rank has one small file, replaced as a whole: a
line of JSON about the rank (`RankHead`), then its numbers (`Numbers`) as MessagePack.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from telemetry.diagnosis.hangs import HangState
from telemetry.model.records import Histogram, RankPace
from telemetry.safety.files import Descriptor, opened, read_small, remove_file, replace_file
from telemetry.safety.gil import let_others_run
from telemetry.safety.processes import pid_namespace, process_state, start_ticks
from telemetry.util.clock import NS, monotonic_ns, now_ns, unix_time
from telemetry.util.identity import identity_from_torch, slug

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from telemetry.safety.errors import ErrorLog
    from telemetry.util.identity import Identity

_STALE_SECONDS: Final = 3600.0
_PREFIX: Final = "torch-telemetry"
_MAX_FILE_BYTES: Final = 4 << 20
_MAX_HEAD_BYTES: Final = 8192

_ROOTS: Final = 8
"""The folder of all boards may have this many names. Others can take a name in a folder that is open to everyone."""

_RANK: Final = "rank-"
_GONE: Final = "gone-"
"""How the name of a dead process's file begins. Nothing else shows that the process was there."""

_ENDPOINT: Final = "endpoint.json"

_LASTING: Final = "training_run_info"
"""The metric that a rank still shows while it cannot publish: it is true as long as the rank is there."""


# -- what a rank publishes ---------------------------------------------------------------------------------------------


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """The readings of the metrics of a rank, or of its machine, by the name of the metric.

    Attributes:
        values: a number, or for a metric with a label a number for each of its values.
        labels: the labels that all metrics of a group carry, by the name of the group.
        started: Unix time from which the counters count.
        others: the readings of further GPUs of the rank.
    """

    values: dict[str, float | dict[str, float]] = {}
    histograms: dict[str, Histogram] = {}
    labels: dict[str, dict[str, str]] = {}
    started: float = 0.0
    others: tuple[Numbers, ...] = ()


class RankHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who has published a file.

    Attributes:
        ticks: start of the process, see `start_ticks`. With the pid it identifies the process.
        at_ns: when it was published, monotonic ns.
        ended: whether the agent has ended by itself.
        rank_given: whether a launcher gave this process its rank.
        since: when it took the rank, monotonic ns.
        pace: for the other ranks; None in a job of one rank.
        hang: what this rank does while the job hangs; else None.
    """

    rank: int
    pid: int
    ticks: int | None
    at_ns: int = 0
    ended: bool = False
    rank_given: bool = False
    since: int = 0
    pace: RankPace | None = None
    hang: HangState | None = None

    @property
    def order(self) -> tuple[bool, int, int]:
        """A sort key for processes that claim the same rank. The one with the smallest key keeps it."""
        return (not self.rank_given, self.since, self.pid)

    @property
    def process_state(self) -> str:
        """The letter of the process's state in proc(5); empty if the process is gone."""
        return process_state(self.pid, self.ticks)

    @property
    def lives(self) -> bool:
        """Whether the process is alive and has not ended its part."""
        return not self.ended and self.process_state != ""


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
_decode_announcement: Final = msgspec.json.Decoder(Announcement).decode
_encode_numbers: Final = msgspec.msgpack.Encoder().encode
_decode_numbers: Final = msgspec.msgpack.Decoder(Numbers).decode


def _content(state: RankState) -> bytes:
    return _encode_head(state.head) + b"\n" + _encode_numbers(state.numbers)


def _state(path: str) -> RankState | None:
    """Read what a rank has published; None if it is gone, or of another version."""
    try:
        head, _, numbers = read_small(path, _MAX_FILE_BYTES).partition(b"\n")
        return RankState(_decode_head(head), _decode_numbers(numbers))
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None


def _entries(folder: str | Path, *beginnings: str) -> list[str]:
    """The paths of the ranks' files on a board."""
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.name.startswith(beginnings)]
    except OSError:
        return []


def _heads(folder: str | Path, *beginnings: str) -> Iterator[tuple[str, RankHead]]:
    """The paths of the ranks' files on a board, and who has published each."""
    for entry in _entries(folder, *beginnings):
        try:
            yield entry, _decode_head(read_small(entry, _MAX_HEAD_BYTES).partition(b"\n")[0])
        except (OSError, msgspec.MsgspecError, RecursionError):
            continue  # it is gone, or no such file


def _living(folder: str | Path) -> list[tuple[str, RankHead]]:
    return [(entry, head) for entry, head in _heads(folder, _RANK) if head.lives]


# -- the folder of all boards ------------------------------------------------------------------------------------------


def board_root() -> Path:
    """The folder of all boards of this user on this machine: the first name that is ours, else the first free one."""
    roots = _possible_roots()
    free = (root for root in roots if not os.path.lexists(root))
    return next(filter(_is_ours, roots), None) or next(free, roots[0])


def _possible_roots() -> list[Path]:
    """The names that it may have. All ranks of a user find the same ones, also in a container, so they have its uid.

    In a container without privileges the user has another uid inside, such as 0.
    """
    shared = Path("/dev/shm")  # noqa: S108 - a folder of our own, mode 0700, is made below it
    base = shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    name = f"{_PREFIX}-{_outer_uid()}"
    return [base / name, *(base / f"{name}-{number}" for number in range(2, _ROOTS + 1))]


def _outer_uid() -> int:
    """The uid of this process outside of its user namespace, if the kernel tells; else the one inside."""
    uid = os.getuid()
    try:
        lines = read_small("/proc/self/uid_map").splitlines()
    except OSError:
        lines = []
    for line in lines:
        inside, outside, count = map(int, line.split())
        if inside <= uid < inside + count:
            return outside + uid - inside
    return uid


def _own_folder(path: Path) -> None:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
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


# -- the board of a run ------------------------------------------------------------------------------------------------


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

    # -- a rank's state ------------------------------------------------------------------------------------------------

    def publish(
        self,
        rank: int,
        numbers: Numbers,
        *,
        pace: RankPace | None = None,
        hang: HangState | None = None,
        ended: bool = False,
    ) -> None:
        """Replace this rank's state. A rank that has ended is still shown as long as others of the run are there.

        If the write fails, the old state is removed, because it would look like a new one. The rank still shows that it
        is there. If the process had another rank before, its file goes.

        Raises:
            OSError: the state cannot be written.
        """
        pid = os.getpid()
        head = RankHead(
            rank=rank, pid=pid, ticks=self._ticks, at_ns=now_ns(), ended=ended, rank_given=self._rank_given,
            since=self._since, pace=pace, hang=hang,
        )  # fmt: skip
        path, before = self.path / f"{_RANK}{rank}.{pid}", self._mine
        if before is not None and before != path:
            remove_file(before)
        self._mine, self._own = path, RankState(head, numbers)
        try:
            self.put(path.name, _content(self._own))
        except OSError:
            remove_file(path)  # makes room for the rest
            values = {name: value for name, value in numbers.values.items() if name == _LASTING}
            lasting = msgspec.structs.replace(numbers, values=values, histograms={})
            with suppress(OSError):
                replace_file(path, _content(RankState(msgspec.structs.replace(head, pace=None), lasting)))
            raise

    def states(self) -> list[RankState]:
        """The state of every living rank, sorted by rank. Removes the file of a dead rank.

        Until their next publication, two processes may have the same rank. Then only the one that will keep it is
        shown, because duplicate series would fail the scrape. See `rank_for`.
        """
        found: dict[int, RankState] = {}
        mine = str(self._mine)
        for entry in {*_entries(self.path, _RANK), *([mine] if self._own else ())}:
            let_others_run()
            state = self._own if entry == mine else _state(entry)
            if state is None:
                continue
            head = state.head
            if entry != mine and not head.ended and not head.lives:
                try:
                    Path(entry).replace(self.path / f"{_GONE}{head.rank}")
                except OSError:
                    remove_file(entry)
                continue
            other = found.get(head.rank)
            if other is None or (head.ended, *head.order) < (other.head.ended, *other.head.order):
                found[head.rank] = state
        return [found[rank] for rank in sorted(found)]

    def heads(self) -> list[RankHead]:
        """Every process that has published here, also those that are gone, by rank."""
        return sorted((head for _, head in _heads(self.path, _RANK, _GONE)), key=lambda head: head.rank)

    def paces(self, but: int | None = None) -> tuple[RankPace, ...]:
        """The paces of the living ranks, without rank ``but``."""
        paces = [head.pace for _, head in _living(self.path)]
        return tuple(pace for pace in paces if pace is not None and pace.rank != but)

    def live_ranks(self, but: Path | None = None) -> int:
        """How many living processes publish here. The file ``but`` does not count."""
        return sum(1 for entry, _ in _living(self.path) if entry != str(but))

    # -- which rank this process is ------------------------------------------------------------------------------------

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
        others = [head for _, head in _living(self.path) if head.pid != os.getpid()]

        def is_free(number: int) -> bool:
            """Whether no living process claims this number with priority over this one."""
            since = self._since if number == self._number else monotonic_ns()
            mine = (not (rank_given and number == claimed), since, os.getpid())
            return not any(head.rank == number and head.order < mine for head in others)

        kept = self._number
        wanted = claimed if rank_given or kept is None else kept
        if not is_free(wanted):
            if kept is not None and kept != wanted and is_free(kept):
                wanted = kept
            else:
                taken = {head.rank for head in others} | {wanted}
                wanted = next(number for number in itertools.count(max(world_size, 1)) if number not in taken)
        if wanted != kept:
            self._since = monotonic_ns()
        self._number, self._rank_given = wanted, rank_given and wanted == claimed
        return wanted

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

    # -- who serves ----------------------------------------------------------------------------------------------------

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
            return None if content is None else _decode_announcement(content)
        except msgspec.MsgspecError:
            return None

    # -- the end -------------------------------------------------------------------------------------------------------

    def leave(self) -> bool:
        """Close the lock. The last rank removes the board and returns True."""
        last = self.live_ranks(but=self._mine) == 0
        if last:
            shutil.rmtree(self.path, ignore_errors=True)
        self.server_lock.close()
        return last

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


# -- the lock that decides which rank serves its node ------------------------------------------------------------------

STILL_SECONDS: Final = 4.0
"""A sign of life comes once a second. A rank without one for this long is treated as stopped or hung."""


class ServerLock:
    """The lock of the rank that serves. The ranks of a run share its file, and never wait for each other.

    It is a POSIX record lock: the kernel releases it when its holder dies, and a forked DataLoader worker does not
    inherit it. A process that is stopped, by SIGSTOP or in a debugger, keeps its lock and does not answer. So the
    holder also gives a sign of life: the modification time of the file. If that has not changed for `STILL_SECONDS`,
    another rank removes the file and locks a new one in its place. Only the lock on the file that is in place counts.
    So a process loses the lock if its file is removed, by another rank or with the whole board.

    Args:
        path: the lock file.
        mono_ns: the clock that times the signs of life.
    """

    def __init__(self, path: Path, mono_ns: Callable[[], int] = now_ns) -> None:
        self._path = path
        self._now = mono_ns
        self._file: Descriptor | None = None
        self._held = False
        self._looked_ns = mono_ns()
        self._sign = 0  # the holder's newest sign of life
        self._sign_ns = 0  # when it was first seen
        self._left_until_ns = 0  # until then, the lock is left to the rank that held it

    def take(self) -> bool:
        """Take or keep the lock if it is free, or if its holder gives no sign of life. Never blocks.

        Raises:
            OSError: the lock file cannot be made.
        """
        now = self._now()
        if now - self._looked_ns > STILL_SECONDS * NS:
            self._sign_ns = now  # this process itself was stopped, and perhaps the holder, too
        self._looked_ns = now
        if not self._in_place():
            # Removing the board ends no rank: the serving rank keeps its port if the others let it be first.
            left = self._file is not None and not self._held
            self._left_until_ns = now + int(STILL_SECONDS * NS) if left else 0
            self._open(now)
        self._held = now >= self._left_until_ns and self._lock()
        if not self._held and self._is_still(now):
            remove_file(self._path)
            self._open(now)
            self._held = self._lock()
        return self._held

    def beat(self) -> None:
        """Give a sign of life, if possible. The holder calls this about once a second, on any thread."""
        file, stamp = self._file, self._now()
        try:
            if file is not None and file.is_ours():
                os.utime(file.number, ns=(stamp, stamp))
        except OSError:
            pass

    def close(self) -> None:
        """Close the file, which releases the lock. In a forked child, the parent keeps its lock."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self, now: int) -> None:
        file = Descriptor(opened(self._path, os.O_RDWR | os.O_CREAT))
        self.close()
        self._file, self._sign_ns = file, now

    def _in_place(self) -> bool:
        """Whether the open file is the one that has its name now.

        It is not opened again for this: closing any descriptor of a file releases the process's locks on it.
        """
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            return False
        file = self._file
        return file is not None and file.is_ours() and file.identity == (status.st_dev, status.st_ino)

    def _lock(self) -> bool:
        assert self._file is not None  # noqa: S101 - opened by the caller
        try:
            fcntl.lockf(self._file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return self._in_place()  # another rank may have replaced it meanwhile

    def _is_still(self, now: int) -> bool:
        """Whether the holder has given no sign of life for `STILL_SECONDS`."""
        assert self._file is not None  # noqa: S101 - opened by the caller
        sign = os.fstat(self._file.number).st_mtime_ns
        if sign != self._sign:
            self._sign, self._sign_ns = sign, now
        return now - self._sign_ns > STILL_SECONDS * NS


# -- the rank of this process: the one that it claims, and the one that it is shown under ------------------------------

_REMEDY: Final = (
    "give each process RANK and WORLD_SIZE, or call torch.distributed.init_process_group; a separate job needs a "
    "run folder of its own"
)


class Membership:
    """Follows the rank that this process claims, and the number that it is shown under.

    Args:
        identity: the identity at the start. All parts of the agent share this one record, and `look` updates it.
        errors: reports that another process claims the same rank.
    """

    def __init__(self, identity: Identity, errors: ErrorLog) -> None:
        self._identity = identity
        self._claim = replace(identity)
        self._errors = errors
        self._seen: int | None = None

    def look(self, board: Board | None, *, steps: int) -> bool:
        """Update the identity of this process. Returns whether it has changed; then publish under the new rank.

        The rank comes from torch.distributed once that is initialised. If another living process of this node already
        has this rank, this process is shown under a free number.

        Args:
            board: shows the other processes; None without a board.
            steps: steps that have ended. A process without steps gets its number without a message in the log.
        """
        with self._errors.contained("rank"):
            self._claim, self._seen = identity_from_torch(self._claim, self._seen)
        claim, number = self._claim, self._claim.rank
        with self._errors.contained("board"):
            if board is not None:
                number = board.rank_for(claim.rank, rank_given=claim.rank_given, world_size=claim.world_size)
        if number != claim.rank and steps:
            others = f"another process of this node is rank {claim.rank} too"
            self._errors.tell("rank", f"{others}; this one is shown as {number}: {_REMEDY}")
        identity, before = self._identity, replace(self._identity)
        identity.rank, identity.claimed_rank = number, claim.rank
        identity.local_rank, identity.world_size = claim.local_rank, claim.world_size
        identity.rank_source = claim.rank_source if number == claim.rank else "assigned"
        return identity != before
