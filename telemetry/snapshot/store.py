"""From a recording to a file that can be trusted: saved, compressed, read back, and only then given its name.

    snapshots/REASON-stepN/rank-R.HOST_PID.MS.pt.trace.json.gz     one per rank, as TensorBoard's plugin wants them
    snapshots/REASON-stepN/about/snapshot.json, rank-R.json        why, which steps, and whose clock; see `about`
    snapshots/.partial-OWNER/                                      what is not whole yet
    snapshots/.claim-BYTES-DEVICE-OWNER                            room that an export has claimed; see `space`

Holistic Trace Analysis takes every ``.json`` in a folder for a trace (and one without a rank for that of rank 0),
which is why the description lies in a folder of its own.

The trace goes to disk beside its place, never to memory: /dev/shm is small, and the batches of every training on the
machine pass through it. torch holds the interpreter while it writes, so the disk is tried first: one that does not
take a mebibyte in time would hold up the training.
"""

from __future__ import annotations

import errno
import gzip
import os
import re
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.clock import NS, now_ns
from telemetry.files import raised
from telemetry.snapshot import plan as p
from telemetry.snapshot.folder import Folder, open_folder
from telemetry.snapshot.space import NoRoomError, Room, age, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from telemetry.snapshot.outcome import Trace

PARTIAL: Final = ".partial-"
_CHUNK: Final = 1 << 18
_RAW: Final = "trace.json"
_PROBE: Final = "probe"
_PACKED: Final = "packed"  # no name by which a reader of traces would know it
_LEVEL: Final = 4
_COMPRESSES: Final = 5
"""How many times smaller a trace gets at least; measured 15 to 25."""

_PROBE_BYTES: Final = 1 << 20
_PROBE_SECONDS: Final = 2.0
"""A disk that takes longer for so much is not written to: torch would hold the interpreter all the while."""

_MOST_OVERSHOOT: Final = 10
"""How many times `Keeper.most_bytes` a trace may turn out to have before its events are counted first."""

_HEAD: Final = re.compile(rb'"baseTimeNanoseconds": (\d+)')
_EVENTS: Final = re.compile(rb'"traceEvents": \[\s*(\{)')


class StoreError(Exception):
    """The trace is not kept; the text says why."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A trace that is in its place.

    Attributes:
        name: of the file; ``size`` in bytes, ``raw_bytes`` uncompressed.
        zero_ns: Unix time in nanoseconds from which the trace's microseconds count; None where it does not say.
        held: seconds for which the interpreter was held, by ``save`` and ``free``.
    """

    name: str
    size: int
    raw_bytes: int
    zero_ns: int | None
    held: dict[str, float]


@dataclass(frozen=True, slots=True)
class Keeper:
    """Keeps the traces of one process.

    Attributes:
        snapshots: the folder ``RUN_DIR/snapshots``.
        shared: a folder that this user's runs on this machine have in common; None where there is none.
        owner: names this process for good; see `telemetry.snapshot.owner`.
        most_bytes: of one trace, uncompressed.
        budget_bytes: of all snapshots of the run, on disk.
        is_gone: whether the process of an owner runs no more, given the seconds since it left its mark.
    """

    snapshots: Path
    shared: Path | None
    owner: str
    most_bytes: int
    budget_bytes: int
    is_gone: Callable[[str, float], bool] = lambda _owner, _age: False

    def keep(
        self,
        trace: Trace,
        folder: str,
        name: str,
        *,
        more: Callable[[int], bytes] = lambda _: b"",
        reached: Callable[[str], None] = lambda _: None,
    ) -> Stored:
        """Save a trace, and publish it whole. It is freed in any case.

        Args:
            trace: to save.
            folder: of the snapshot.
            name: of the file.
            more: given the trace's zero (`Stored.zero_ns`), events to put first into it, a comma after each.
            reached: told of each stage as it is reached, for whoever watches.

        Raises:
            StoreError: there is no room, or it is too large, or not whole.
            OSError: something else on the way.
        """
        held: dict[str, float] = {}
        with open_folder(self.snapshots, make=True) as snapshots:
            partial = f"{PARTIAL}{self.owner}"
            snapshots.remove(partial)
            try:
                with snapshots.sub(partial, make=True) as work:
                    reached("begun")
                    room = Room(self.snapshots, self.shared, self.owner, self.is_gone)
                    with self._claimed(room, trace, held):
                        _try_disk(work)
                        raw = self._save(trace, work, held)
                        try:
                            reached("saved")
                            size, zero_ns = self._compress(raw, work, more, reached)
                        finally:
                            work.close(raw, discard=True)
                    stored = Stored(name, os.stat(_PACKED, dir_fd=work.fd).st_size, size, zero_ns, held)
                    self._make_room(snapshots, folder, stored.size)
                    with snapshots.sub(folder, make=True) as final:
                        reached("verified")
                        os.rename(_PACKED, name, src_dir_fd=work.fd, dst_dir_fd=final.fd)
                        final.sync()
                snapshots.sync()
                reached("published")
            finally:
                if "free" not in held:
                    held["free"] = trace.free()
                snapshots.remove(partial)
        return stored

    @contextmanager
    def _claimed(self, room: Room, trace: Trace, held: dict[str, float]) -> Iterator[None]:
        """Hold room for the trace and for what it is compressed to, or refuse it before anything is written."""
        most = trace.most_bytes()
        try:
            if most <= _MOST_OVERSHOOT * self.most_bytes:
                with room.claimed(most + most // _COMPRESSES):
                    yield
                return
        except NoRoomError:
            pass  # that figure is high: see what its events say
        least, most, held["count"] = trace.estimate()
        if least > self.most_bytes:
            raise StoreError(f"it has at least {least} bytes, more than snapshot_max_bytes = {self.most_bytes}")
        try:
            with room.claimed(most + most // _COMPRESSES):
                yield
        except NoRoomError as error:
            raise StoreError(str(error)) from None

    @staticmethod
    def _save(trace: Trace, work: Folder, held: dict[str, float]) -> int:
        """Have torch write it. Returns the open file, which has no name any more."""
        try:
            held["save"] = trace.save(work.path / _RAW)
        finally:
            held["free"] = trace.free()
        raw = work.reopen(_RAW)
        work.remove(_RAW)
        return raw

    def _compress(
        self, raw: int, work: Folder, more: Callable[[int], bytes], reached: Callable[[str], None]
    ) -> tuple[int, int | None]:
        size = os.fstat(raw).st_size
        if size > self.most_bytes:
            raise StoreError(f"it has {size} bytes, more than snapshot_max_bytes = {self.most_bytes}")
        head = os.pread(raw, _CHUNK, 0)
        zero, events = _HEAD.search(head), _EVENTS.search(head)
        if os.pread(raw, 64, max(0, size - 64)).rstrip()[-1:] != b"}":
            raise StoreError("torch did not write it to its end")
        file, whole = work.create(_PACKED), False
        try:
            reached("compressing")
            begin, added = b"", b""
            if zero is not None and events is not None:
                begin, added = os.read(raw, events.start(1)), more(int(zero[1]))
                size += len(added)
            checksum = _deflate(begin + added, raw, file)
            os.fsync(file)
            reached("compressed")
            os.lseek(file, 0, os.SEEK_SET)
            if _inflate(file) != (size, checksum):
                raise StoreError("what was read back is not what was written")
            whole = True
        finally:
            work.close(file, discard=not whole)
        return size, None if zero is None else int(zero[1])

    def _make_room(self, snapshots: Folder, current: str, wanted: int) -> None:
        """Remove the oldest snapshots until one more trace fits in. The current one, others' parts included, stays."""
        found: list[tuple[float, str, int]] = []
        for name in snapshots.names():
            if p.valid_folder(name):
                try:
                    size, changed = snapshots.size(name)
                except OSError:
                    continue  # removed by another rank, or no folder of ours
                found.append((float("inf") if name == current else changed, name, size))
        total = wanted + sum(size for _, _, size in found)
        for _, name, size in sorted(found):
            if total <= self.budget_bytes:
                return
            if name == current:
                break
            snapshots.remove(name)
            total -= size
        if total > self.budget_bytes:
            raise StoreError(f"this snapshot alone is larger than snapshot_disk_bytes = {self.budget_bytes}")


def _deflate(begin: bytes, raw: int, file: int) -> int:
    """Compress ``begin`` and what is left of ``raw`` into ``file``, gzip. Returns the checksum of all of it.

    zlib works without the interpreter.
    """
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    checksum = zlib.crc32(begin)
    _write(file, packer.compress(begin))
    while chunk := os.read(raw, _CHUNK):
        checksum = zlib.crc32(chunk, checksum)
        _write(file, packer.compress(chunk))
    _write(file, packer.flush())
    return checksum


def _inflate(file: int) -> tuple[int, int]:
    """Read a gzip file as a stream. Returns its size and checksum, uncompressed."""
    size = checksum = 0
    try:
        with gzip.open(os.fdopen(raised(os.dup(file)), "rb")) as stream:
            while chunk := stream.read(_CHUNK):
                size += len(chunk)
                checksum = zlib.crc32(chunk, checksum)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return -1, 0
    return size, checksum


def _write(file: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        written = os.write(file, view)
        if written <= 0:
            raise OSError(errno.ENOSPC, "no room for the trace")
        view = view[written:]


def _try_disk(work: Folder) -> None:
    """Write a little to a disk, to its end.

    Raises:
        StoreError: it takes too long.
        OSError: it does not take it.
    """
    start = now_ns()
    file = work.create(_PROBE)
    try:
        _write(file, bytes(_PROBE_BYTES))
        os.fsync(file)
    finally:
        work.close(file, discard=True)
        work.remove(_PROBE)
    seconds = (now_ns() - start) / NS
    if seconds > _PROBE_SECONDS:
        raise StoreError(
            f"the disk is too slow: {seconds:.1f} s for {_PROBE_BYTES >> 20} MiB, and the training would wait for it"
        )


def sweep(roots: Iterable[Path | None], is_gone: Callable[[str, float], bool]) -> int:
    """Remove what processes that are gone have left half done. Returns how many.

    Args:
        roots: folders in which they may have: the run's, and that of the machine, where earlier versions saved.
        is_gone: whether the process of an owner certainly runs no more, given the seconds since it left its mark.

    Raises:
        OSError: a folder is not this user's alone; the others are swept all the same.
    """
    removed, failed = 0, None
    for root in roots:
        if root is None or not root.exists():
            continue
        try:
            with open_folder(root) as folder:
                for name in folder.names():
                    claim = parse(name)
                    owner = name.removeprefix(PARTIAL) if name.startswith(PARTIAL) else claim and claim[2]
                    if owner and is_gone(owner, age(folder.fd, name)):
                        folder.remove(name)
                        removed += 1
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed
    return removed


def trace_name(rank: int, host: str, pid: int, stamp_ms: int) -> str:
    """The name of a rank's trace: worker and span, in the words of TensorBoard's plugin."""
    return f"rank-{rank}.{host}_{pid}.{stamp_ms}.pt.trace.json.gz"
