"""Turns a recording into a trace file.

    snapshots/REASON-stepN/rank-R.HOST_PID.MS.pt.trace.json.gz     one per rank, named as TensorBoard's plugin needs it
    snapshots/.export.….tmp/                                       an unfinished export

A trace gets its name only after all of it is on the disk. Its key ``telemetry`` says why it was recorded.

An unfinished trace is on the same disk, never in memory: /dev/shm is small, and all trainings of the machine pass
their batches through it. torch holds the GIL while it writes, so the disk is tried first: if it takes too long to write
one mebibyte, it would block the training.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import stat
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from telemetry.safety.files import opened, temporary_name
from telemetry.safety.threads import OwnThread, Wake
from telemetry.snapshot.plan import FOLDER
from telemetry.util.clock import NS, now_ns, unix_ns, unix_time

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.config import Config
    from telemetry.seams.loaders import LoaderRegistry
    from telemetry.seams.profilers import Session
    from telemetry.seams.worker_block import WorkerCounters
    from telemetry.snapshot.budget import Budget
    from telemetry.snapshot.plan import Plan
    from telemetry.util.identity import Identity

MIN_FREE_BYTES: Final = 1 << 30
"""Space that must be free: for checkpoints, for other programs, and for the unfinished traces of all ranks. By default
the budget of a recording keeps each of them to some tens of MiB."""

_STALE_SECONDS: Final = 600.0
"""An older unfinished export was left behind by a process that was killed: an export takes seconds."""

_CHUNK: Final = 1 << 18
_LEVEL: Final = 4

_PROBE_BYTES: Final = 1 << 20
_PROBE_SECONDS: Final = 2.0

_HEAD: Final = re.compile(rb'"baseTimeNanoseconds": (\d+)')
_EVENTS: Final = re.compile(rb'"traceEvents": \[\s*(\{)')
_KERNEL: Final = b'"cat": "kernel"'


class ExportError(Exception):
    """The trace is not published; the text has the reason."""


@dataclass(slots=True)
class Outcome:
    """The result of a plan on the training thread.

    Attributes:
        result: one of `SNAPSHOT_RESULTS`.
        why: the reason in words, if there is no recording or it was cut short.
        first_step, last_step: the steps that were recorded in full; None without a recording.
        started_ns, ended_ns: monotonic start and end of the recording.
        pauses: seconds that the training thread spent on ``prepare``, ``start`` and ``stop``.
        trace: the recording; None without one.
    """

    result: str
    why: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    started_ns: int = 0
    ended_ns: int = 0
    pauses: dict[str, float] = field(default_factory=dict)
    trace: Session | None = None


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """A complete trace file.

    Attributes:
        path: path in the run folder.
        size_bytes: of the file; ``trace_bytes``: uncompressed.
        held_seconds: seconds for which the GIL was held, by activity: ``save``, ``free``.
        kernels: whether a kernel of a GPU is in it.
    """

    path: str
    size_bytes: int
    trace_bytes: int
    held_seconds: dict[str, float]
    kernels: bool


class Export:
    """One snapshot of this rank, from its plan to its file, with a thread of its own.

    The thread watches what the recording takes, waits for its outcome, and saves the trace. It is started before the
    recording, because Python 3.12 and later start no thread while the process exits.

    Args:
        plan: what is recorded; ``budget``: how much of it.
        snapshots: the folder ``RUN_DIR/snapshots``.
        loaders: have the workers whose fetches are added, because the profiler records this process only.

    Attributes:
        outcome: what came of the plan on the training thread; None before that.
        stored: the saved trace; ``error``: why there is none.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(
        self,
        plan: Plan,
        budget: Budget,
        *,
        snapshots: Path,
        config: Config,
        identity: Identity,
        loaders: LoaderRegistry,
    ) -> None:
        self._snapshots, self._disk_bytes = snapshots, config.snapshot_disk_bytes
        self._name = plan.file_name(identity)
        self._loaders = loaders
        self._submitted = Wake()
        self.plan, self.budget = plan, budget
        self.outcome: Outcome | None = None
        self.stored: StoredTrace | None = None
        self.error: str | None = None
        self.thread = OwnThread(self._main, name="telemetry-export")
        self.thread.start()

    @property
    def finished(self) -> bool:
        """Whether there is an outcome, and its trace, if it has one, was saved or could not be."""
        if self.outcome is None or self.outcome.trace is None:
            return self.outcome is not None
        return self.stored is not None or self.error is not None

    def submit(self, outcome: Outcome) -> None:
        """Save the trace, if there is one, and end the thread. Called once, on the training thread or the agent's."""
        self.outcome = outcome
        self._submitted.set()

    def abandon(self) -> None:
        """End the thread although the training thread has not ended the recording: nobody will save it."""
        self.budget.close()
        self._submitted.set()

    def _main(self) -> None:
        self.budget.watch()
        self._submitted.wait()
        outcome = self.outcome
        if outcome is not None and outcome.trace is not None:
            try:
                self.stored = self._publish(outcome, outcome.trace)
            except (ExportError, OSError) as error:
                self.error = str(error)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"

    def _publish(self, outcome: Outcome, trace: Session) -> StoredTrace:
        """Save a trace and make it visible once it is complete. It is freed in any case."""
        # Read now, because workers keep only their newest fetches.
        blocks = [loader.block for loader in self._loaders.live() if loader.block is not None]
        workers = [worker for block in blocks for worker in block.read()]
        work, held = self._snapshots / temporary_name("export"), {"save": 0.0}
        try:
            try:
                self._snapshots.mkdir(0o700, parents=True, exist_ok=True)
                work.mkdir(0o700)
                _check_disk(work)
                held["save"] = trace.save(work / "trace.json")
            finally:
                held["free"] = trace.free()
            packed = work / "packed"  # not a name that a reader of traces would look for
            trace_bytes, kernels = _compress(work / "trace.json", packed, outcome, workers)
            folder, packed_bytes = self._snapshots / self.plan.folder, packed.stat().st_size
            self._remove_oldest(packed_bytes)
            folder.mkdir(0o700, exist_ok=True)
            packed.rename(folder / self._name)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return StoredTrace(f"snapshots/{folder.name}/{self._name}", packed_bytes, trace_bytes, held, kernels)

    def _remove_oldest(self, added: int) -> None:
        """Remove the oldest snapshots until ``added`` bytes fit the limit. This one stays, on all ranks."""
        total, current_bytes = added, added
        others: list[tuple[float, Path, int]] = []
        for path in self._snapshots.iterdir():
            if FOLDER.fullmatch(path.name) and not path.is_symlink():
                try:
                    inside = [each.lstat() for each in path.rglob("*")]
                    changed = path.stat().st_mtime
                except OSError:
                    continue  # another rank has removed it
                size = sum(each.st_size for each in inside if stat.S_ISREG(each.st_mode))
                total += size
                if path.name == self.plan.folder:
                    current_bytes += size
                else:
                    others.append((changed, path, size))
        if current_bytes > self._disk_bytes:
            raise ExportError(f"this snapshot alone is larger than snapshot_disk_bytes = {self._disk_bytes}")
        for _, path, size in sorted(others):
            if total <= self._disk_bytes:
                return
            shutil.rmtree(path, ignore_errors=True)
            total -= size


def sweep(snapshots: Path) -> None:
    """Remove unfinished exports that were left behind."""
    for path in snapshots.glob(".export.*.tmp"):
        if unix_time() - path.lstat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _check_disk(work: Path) -> None:
    found = os.statvfs(work)
    free = found.f_bavail * found.f_frsize
    if free < MIN_FREE_BYTES:
        raise ExportError(f"no room: {MIN_FREE_BYTES >> 20} MiB must be free, and {free >> 20} MiB are")
    start, probe = now_ns(), _created(work / "probe")
    try:
        _write(probe, bytes(_PROBE_BYTES))
        os.fsync(probe)
    finally:
        os.close(probe)
    seconds = (now_ns() - start) / NS
    if seconds > _PROBE_SECONDS:
        size = f"{_PROBE_BYTES >> 20} MiB"
        raise ExportError(f"the disk is too slow: {seconds:.1f} s for {size}, and the training would wait for it")


def _compress(source: Path, target: Path, outcome: Outcome, workers: list[WorkerCounters]) -> tuple[int, bool]:
    """Compress a raw trace, with the fetches in it. Returns the uncompressed size, and whether it has a kernel.

    zlib releases the GIL while it works.
    """
    size, kernels, end = 0, False, b""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    raw = opened(source, os.O_RDWR)
    try:
        packed = _created(target)
        try:
            for chunk in itertools.chain([_begin(raw, outcome, workers)], iter(lambda: os.read(raw, _CHUNK), b"")):
                size += len(chunk)
                kernels, end = kernels or _KERNEL in end + chunk, (end + chunk)[-64:]
                _write(packed, compressor.compress(chunk))
            _write(packed, compressor.flush())
            os.fsync(packed)
        finally:
            os.close(packed)
        os.ftruncate(raw, 0)  # a worker that was forked meanwhile has the file open, too
    finally:
        os.close(raw)
    if end.rstrip()[-1:] != b"}":
        raise ExportError("torch did not write it to its end")
    return size, kernels


def _begin(raw: int, outcome: Outcome, workers: list[WorkerCounters]) -> bytes:
    """Read a trace up to its first event, and add the fetches; nothing if it has no event or does not tell the time."""
    head = os.pread(raw, _CHUNK, 0)
    base, events = _HEAD.search(head), _EVENTS.search(head)
    if base is None or events is None:
        return b""
    return os.read(raw, events.start(1)) + _fetches(outcome, workers, int(base[1]))


def _fetches(outcome: Outcome, workers: list[WorkerCounters], base_unix_ns: int) -> bytes:
    """The newest fetches that were in progress during the recording, as events of a trace on tracks of their own.

    Each event is a JSON object with a comma after it. The trace's microseconds count from ``base_unix_ns``.
    """
    zero_ns = base_unix_ns + now_ns() - unix_ns()
    events: list[dict[str, Any]] = []
    for worker in workers:
        where = {"pid": worker.pid, "tid": worker.tid}
        name = {"name": f"DataLoader worker {worker.worker}"}
        events.append({"ph": "M", "name": "process_name", "ts": 0, **where, "args": name})
        kept = len(worker.recent_finished_ns)
        for number in range(max(0, worker.ended - kept), worker.ended):
            began, ended = worker.recent_started_ns[number % kept], worker.recent_finished_ns[number % kept]
            if outcome.started_ns <= ended and began <= min(outcome.ended_ns, ended):
                times = {"ts": (began - zero_ns) / 1e3, "dur": (ended - began) / 1e3}
                args = {"worker": worker.worker, "number": number}
                # A category that no reader takes for the training process's.
                event = {"ph": "X", "cat": "dataloader_worker", "name": "fetch", "args": args}
                events.append(event | where | times)
    return b"".join(msgspec.json.encode(event) + b",\n" for event in events)


def _created(path: Path) -> int:
    return opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def _write(file: int, chunk: bytes) -> None:
    """Write to a descriptor: a file object's copy in a child that is forked meanwhile would write its buffer, too."""
    if os.write(file, chunk) < len(chunk):
        raise OSError(errno.ENOSPC, "no room for the trace")
