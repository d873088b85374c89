"""The log of this process: which lines it has, when they are written, and how they reach the disk."""

from __future__ import annotations

import errno
import os
import platform
import stat
import sys
import threading
from dataclasses import asdict
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import structs

from telemetry._version import __version__
from telemetry.log_lines import ABSENT, MemoryForecast, Resumption, WindowLine, fields_of
from telemetry.records import COMPUTE, DATA_WAIT, LogWindow, Totals, rounded
from telemetry.sources import proc
from telemetry.util.files import Descriptor, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    from telemetry.agent.accounting import Accounting
    from telemetry.agent.attempt import AttemptLog
    from telemetry.agent.collectors import CollectorPoller
    from telemetry.agent.totals import StallCounts, TotalsBuilder
    from telemetry.agent.trends import MemoryWatch
    from telemetry.config import Config
    from telemetry.diagnosis.growth import StepTrend
    from telemetry.hooks.tracker import StepTracker
    from telemetry.log_lines import Line, RunStartLine
    from telemetry.node.endpoint import NodeService
    from telemetry.records import Percentiles
    from telemetry.util.clock import WallClock
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity
    from telemetry.util.sketch import Sketch

_MAX_PROCESSES: Final = 10_000
"""So many processes with the same rank and pid can log into one folder."""


class LogFile:
    """Appends lines to its own file, and rotates ``NAME`` to ``NAME.1``, ``NAME.1`` to ``NAME.2`` and so on.

    Args:
        path: the newest file. If another process has made that name, this one puts a number before the ending.
        max_bytes: the file is rotated at this size.
        max_files: how many files are kept, including the newest.
        head: makes the first line of each later file.

    Attributes:
        path: the newest file.
        dropped: lines that could not be written, or that others have deleted.
    """

    def __init__(self, path: Path, max_bytes: int, max_files: int, head: Callable[[], bytes]) -> None:
        self.path = self._wanted = path
        self._made: tuple[int, int] | None = None  # the identity of the file that this object has made
        self._head = head
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._file: Descriptor | None = None
        self._size = 0
        self._lines = 0
        self.dropped = 0
        self.last_error: OSError | None = None

    def write(self, line: bytes) -> bool:
        """Append a line. Returns whether the file has it; keeps an error instead of raising it."""
        try:
            if self._file is None or not self._file.is_ours():
                self._open()
            elif self._size + len(line) > self._max_bytes and self._size:
                self._rotate()
            self._append(line)
        except OSError as error:
            self.dropped += 1
            self.last_error = error
            self.forget()
            return False
        return True

    def _append(self, line: bytes) -> None:
        assert self._file is not None  # noqa: S101 - _open has raised otherwise
        written = os.write(self._file.number, line)
        self._size += written
        self._lines += 1
        if written < len(line):  # the disk is full. _open ends the torn line, so that the next one is whole
            raise OSError(errno.ENOSPC, "only a part of the line was written")

    def replace_if_removed(self) -> tuple[str, int] | None:
        """Begin a new file, with a head, if another process has removed or emptied this one.

        Returns:
            What happened, in words, and how many lines were lost; None if nothing happened.
        """
        if self._file is None or not self._file.is_ours():
            return None  # the next line opens it again
        size = links = 0
        try:
            status = os.fstat(self._file.number)
            size, links = status.st_size, status.st_nlink
            there = self.path.lstat()
            moved = (there.st_dev, there.st_ino) != self._file.identity
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}:
                return None  # the state of the file is unknown
            moved = True
        if not moved and size >= self._size:
            return None
        lost = self._lines if moved and not links else 0
        self.dropped += lost
        what = "emptied" if not moved else "renamed" if links else "deleted"
        self.forget()
        try:
            self._open()
            if not moved:  # otherwise _open has written the head
                self._lines = 0
                self._append(self._head())
        except OSError as error:
            self.last_error = error
            self.forget()
        return f"the log file was {what} by others: a new one begins", lost

    def forget(self) -> None:
        """Close the file. The next line opens it again, except in a forked child, which writes none."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                pass

    def move(self, path: Path) -> None:
        """Rename the file and its rotated parts.

        Raises:
            OSError: the file keeps its name, because it could not be renamed.
        """
        if path == self._wanted:
            return
        self._wanted = path
        if self._made is None:
            self.path = path
            return
        if identity_at(self.path) != self._made:
            return  # removed or replaced: the next file gets the new name
        parts = [number for number in range(self._max_files) if self._numbered(number).exists()]
        reserved, new = self._reserve(taken_by_us=None)
        os.close(reserved)
        try:
            for number in parts:
                self._numbered(number).replace(_numbered(new, number))
        finally:
            if identity_at(new) == self._made:
                self.path = new

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._made is None or not self._reopen():
            lost = self._made is not None
            file, self.path = self._reserve(taken_by_us=self.path if lost else None)
            self._file, self._size, self._lines = Descriptor(file), 0, 0
            self._made = self._file.identity
            if lost:
                self._append(self._head())

    def _reopen(self) -> bool:
        """Open the file again and end a torn line in it. Returns False if the file is gone."""
        try:
            file = opened(self.path, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        self._file = Descriptor(file)
        if self._file.identity != self._made:
            self.forget()
            return False
        self._size = os.fstat(file).st_size
        if self._size and os.pread(file, 1, self._size - 1) != b"\n":
            self._size += os.write(file, b"\n")
        return True

    def _reserve(self, taken_by_us: Path | None) -> tuple[int, Path]:
        """Make a file under the first free name. Returns its descriptor and path.

        Args:
            taken_by_us: the name whose rotated files are our own.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
        name = self._wanted.name.removesuffix(".jsonl")
        for number in range(1, _MAX_PROCESSES):
            path = self._wanted if number == 1 else self._wanted.with_name(f"{name}.{number}.jsonl")
            try:
                file = opened(path, flags, 0o644)
            except FileExistsError:
                if not stat.S_ISREG(path.lstat().st_mode):
                    raise
                continue
            if path == taken_by_us or not _numbered(path, 1).exists():
                return file, path
            os.close(file)  # its owner is rotating right now
            path.unlink()
        raise FileExistsError(errno.EEXIST, "too many processes have logged under this name", str(self._wanted))

    def _rotate(self) -> None:
        self.forget()
        for number in range(self._max_files - 1, 0, -1):
            older = self._numbered(number)
            if number == self._max_files - 1:
                older.unlink(missing_ok=True)
            newer = self._numbered(number - 1)
            if newer.exists():
                newer.replace(older)
        if self._max_files == 1:
            self.path.unlink(missing_ok=True)
        self._open()  # no file has that name now, so this makes one with a head

    def _numbered(self, number: int) -> Path:
        return _numbered(self.path, number)


def identity_at(path: Path) -> tuple[int, int] | None:
    """The identity of the file at a path, as `Descriptor.identity` has it; None without a file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _numbered(path: Path, number: int) -> Path:
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


_HEAVY: Final = ("rich", "twisted", "better_exceptions", "colorama")
_MAX_TEXT: Final = 8192


class _Absent(MetaPathFinder):
    """Hides packages from imports on the thread that made this. Another thread may import them right now."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        del path, target
        if fullname.partition(".")[0] in _HEAVY and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def _structlog() -> ModuleType:
    """Import structlog without the packages that it loads for its console.

    It imports rich and twisted if they are installed (structlog 26.1: dev.py, twisted.py). This copy is removed from
    ``sys.modules`` again, so that a script that uses structlog gets a complete one.
    """
    loaded = sys.modules.get("structlog")
    if loaded is not None:
        return loaded
    absent = _Absent()
    sys.meta_path.insert(0, absent)
    try:
        import structlog
    finally:
        sys.meta_path.remove(absent)
        for name in [n for n in sys.modules if n == "structlog" or n.startswith("structlog.")]:
            del sys.modules[name]
    return structlog


class JsonLog:
    """Writes the lines of this process.

    Args:
        folder: ``RUN_DIR/logs``.
        identity: run, rank, node and pid for every line. The rank may become known later.
        timestamp: returns the time for a line, ISO-8601 in UTC.
        step: returns the number of ended steps for every line.
        head: returns the fields of ``run_start``, with which every rotated file begins.
    """

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        *,
        timestamp: Callable[[], str],
        step: Callable[[], int],
        head: Callable[[], dict[str, Any]],
        max_bytes: int,
        max_files: int,
    ) -> None:
        structlog = _structlog()
        self._folder = folder
        self._identity = identity
        self.file = LogFile(self._path(), max_bytes, max_files, self._head_line)
        self._heading = False
        self._timestamp = timestamp
        self._step = step
        self._head = head
        self._logger: Any = structlog.wrap_logger(
            self,
            processors=[self._stamp, _order, structlog.processors.JSONRenderer(serializer=_dumps)],
            wrapper_class=structlog.BoundLogger,
            context_class=dict,
            cache_logger_on_first_use=True,
            run=identity.run,
            node=identity.node,
            pid=identity.pid,
        )

    def rename(self) -> None:
        """Rename the file after the rank of this process has become known or has changed.

        Raises:
            OSError: the file could not be renamed.
        """
        self.file.move(self._path())

    def _path(self) -> Path:
        return self._folder / f"rank-{self._identity.rank}.{self._identity.pid}.jsonl"

    def emit(self, event: str, fields: Mapping[str, Any]) -> bool:
        """Write one line. Returns whether the file has it."""
        written: bool = self._logger.msg(event, **fields)
        return written

    def msg(self, line: bytes) -> bytes | bool:
        """Write a finished line of structlog to the file, or return it to `_head_line`."""
        return line + b"\n" if self._heading else self.file.write(line + b"\n")

    def _head_line(self) -> bytes:
        self._heading = True
        try:
            line: bytes = self._logger.msg("run_start", **self._head(), continued=True)
        finally:
            self._heading = False
        return line

    def _stamp(self, logger: Any, method: str, fields: dict[str, Any]) -> dict[str, Any]:
        del logger, method
        fields["rank"], fields["local_rank"] = self._identity.rank, self._identity.local_rank
        fields.setdefault("time", self._timestamp())
        fields.setdefault("tid", threading.get_native_id())
        fields.setdefault("step", self._step())
        return fields


_FIRST: Final = ("time", "event", "run", "rank", "local_rank", "node", "pid", "tid", "step")


def _order(logger: Any, method: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Put the fields that every line has first, in the order of the contract."""
    del logger, method
    return {name: fields[name] for name in _FIRST} | fields


def _dumps(fields: dict[str, Any], **kwargs: Any) -> bytes:
    del kwargs
    try:
        return msgspec.json.encode(fields)
    except (TypeError, ValueError):  # a lone surrogate, or a type that JSON does not have: write what can be written
        return msgspec.json.encode(_plain(fields), enc_hook=repr)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_MAX_TEXT].encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.structs.asdict(value))
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


_CPUINFO: Final = Path("/proc/cpuinfo")
_FIRST_CORE_BYTES: Final = 2048
"""The kernel writes this file core by core. The first core is enough, and a machine may have hundreds."""


def cpu_model() -> str:
    """The name of the processor; empty if the kernel does not give one."""
    try:
        with _CPUINFO.open("rb") as file:
            text = file.read(_FIRST_CORE_BYTES).decode(errors="replace")
    except OSError:
        return ""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), "")


_ENOUGH: Final = 0.98
"""A window is over after this share of its length. Otherwise a tick that comes a moment too early would cost a calm
loop one more tick in each window."""

_FIRST_WINDOW_SECONDS: Final = 1.0
"""The first window's length. Each later one is twice as long, up to the log interval. So a young run shows early."""


class EventLog:
    """Decides which log lines a rank writes, and when, and makes them from its accounting and samples.

    Args:
        run_dir: the run folder, which has the folder ``logs``.

    Attributes:
        identity: this process.
        newest_window: the newest window in the log; None before the first.
    """

    def __init__(
        self,
        run_dir: Path,
        identity: Identity,
        config: Config,
        *,
        accounting: Accounting,
        builder: TotalsBuilder,
        attempt: AttemptLog,
        tracker: StepTracker,
        node: NodeService | None,
        collectors: CollectorPoller,
        memory: MemoryWatch,
        stall_counts: StallCounts,
        errors: ErrorLog,
        wall: WallClock,
    ) -> None:
        self.identity = identity
        self._config = config
        self._accounting = accounting
        self._collectors = collectors
        self._memory = memory
        self._errors = errors
        self._wall = wall
        self._builder = builder
        self._attempt = attempt
        self._node = node
        self._stall_counts = stall_counts
        self.log = JsonLog(
            run_dir / "logs",
            identity,
            timestamp=wall.iso,
            step=lambda: accounting.steps_total,
            head=lambda: _fields(self.head()),
            max_bytes=config.log_max_bytes,
            max_files=config.log_max_files,
        )
        self._seconds = min(_FIRST_WINDOW_SECONDS, config.log_interval_seconds)
        self._began = False
        self._environment = {
            "script": Path(sys.argv[0]).name if sys.argv else "",
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "omp_threads": os.environ.get("OMP_NUM_THREADS"),
        }
        self._tracker = tracker
        self._surroundings: dict[str, Any] = {}  # as the log has them
        self._before = Totals()  # the totals at the end of the last window
        self._children = 0
        self.newest_window: LogWindow | None = None

    def emit(self, event: str, values: Mapping[str, Any]) -> bool:
        """Write a line, and count an error if that fails. Returns whether the file has it."""
        try:
            if self.log.emit(event, values):
                return True
            self._errors.note("jsonl", self.log.file.last_error or "the log cannot be written")
        except Exception as error:
            self._errors.note("jsonl", error)
        return False

    def write(self, line: Line) -> bool:
        """Write a record, as `emit` does."""
        return self.emit(str(line.__struct_config__.tag), _fields(line))

    def start(self) -> bool:
        """Write the first line of the run."""
        self._began = True
        return self.write(self.head())

    def rank_has_changed(self) -> None:
        """Continue under another rank, after this process has learned or changed its rank, and log that."""
        with self._errors.contained("jsonl"):
            self.log.rename()
        if self._began:
            self.write(structs.replace(self.head(), continued=True))

    @property
    def child_processes(self) -> int:
        """The largest number of child processes seen so far that may train."""
        return self._children

    @property
    def is_due(self) -> bool:
        """Whether a window is over or a phase has ended. Errors alone wait for the next tick."""
        return self._window_is_over(self._accounting.ledger.wall_seconds) or self._accounting.phase_has_ended

    def _window_is_over(self, wall_seconds: float) -> bool:
        return wall_seconds - self._before.wall_seconds >= _ENOUGH * self._seconds

    def write_what_is_due(self) -> None:
        """Write phases and errors, and the window with its samples once it is over."""
        self.write_phases()
        self._children = max(self._children, proc.started())
        if self._window_is_over(self._builder.current().wall_seconds):
            self._seconds = min(2 * self._seconds, self._config.log_interval_seconds)
            self.window()
            for event, values in self._collectors.take_log_fields().items():
                self.emit(event, values)
        self.write_errors()

    def write_phases(self, *, last: bool = False) -> None:
        """Write the phases that have ended. ``last``: this is the last call."""
        spans = (*self._accounting.ledger.take_phases(), *self._accounting.take_named_phases())
        for line in self._attempt.phases.lines(spans, last=last):
            self.write(line)

    def window(self) -> None:
        """Write the window that ends now, with the totals of the run so far."""
        self._replace_removed_file()
        accounting, totals = self._accounting, self._builder.current()
        window, added = accounting.stats.take_window(), totals - self._before
        self.newest_window = LogWindow(added, window.step.percentiles(), window.wait.percentiles())
        exposed, loop = added.exposed_wait_seconds, added.ledger_seconds[DATA_WAIT] + added.ledger_seconds[COMPUTE]
        self.write(
            WindowLine(
                window_seconds=added.wall_seconds,
                steps=window.steps,
                optimizer_steps=added.optimizer_steps,
                ledger_seconds=added.ledger_seconds,
                exposed_wait_seconds=exposed,
                exposed_wait_ratio=exposed / loop if exposed is not None and loop > 0 else None,
                exposed_wait_source=None if accounting.no_batch_seen else accounting.exposed_source,
                step_seconds=_percentiles(self.newest_window.step),
                data_wait_seconds=_percentiles(self.newest_window.wait),
                step_sketch=_buckets(window.step),
                data_wait_sketch=_buckets(window.wait),
                **self._totals(),
                **self._news(),
            )
        )
        # After the line: if it begins a new file, the head of that file has the totals before it.
        accounting.stats.commit(window)
        self._before = totals

    def _replace_removed_file(self) -> None:
        """Begin a new file if another process has deleted, renamed or emptied this one."""
        found = self.log.file.replace_if_removed()
        if found is None:
            return
        text, lost = found
        if lost:
            self._errors.note("jsonl", f"{text}; {lost} lines are lost", count=lost)
        else:
            self._errors.tell("jsonl", text)

    def head(self) -> RunStartLine:
        """The first line of a log file. A later file repeats the run so far, because old windows may be deleted."""
        step, wait, kills = self._accounting.stats.run_step, self._accounting.stats.run_wait, self._attempt.oom_kills()
        self._surroundings = self._known_surroundings()
        return structs.replace(
            self._attempt.head(),
            started=self._wall.iso(self._accounting.ledger.start_ns),
            world_size=self.identity.world_size,
            launcher=self.identity.launcher,
            rank_source=self.identity.rank_source,
            claimed_rank=self.identity.claimed_rank,
            life=self._attempt.life,
            telemetry_version=__version__,
            python_version=platform.python_version(),
            cpu_count=os.cpu_count(),
            metrics_url=None if self._node is None else self._node.url,
            step_sketch=_buckets(step) if step.total else ABSENT,
            step_max_seconds=step.largest if step.total else ABSENT,
            data_wait_sketch=_buckets(wait) if wait.total else ABSENT,
            data_wait_max_seconds=wait.largest if wait.total else ABSENT,
            settings=self._config.as_log_fields(),
            continued=ABSENT,
            oom_kills_total=ABSENT if kills is None else kills,
            **{"loader": ABSENT} | self._surroundings,
        )

    def _known_surroundings(self) -> dict[str, Any]:
        version = getattr(sys.modules.get("torch"), "version", None)
        torch = {"torch_version": getattr(version, "__version__", None), "cuda_version": getattr(version, "cuda", None)}
        known = self._environment | torch
        fields: dict[str, Any] = {"environment": {name: value for name, value in known.items() if value}}
        if self._builder.loader:
            size = self._tracker.loaders.newest_batch_size()
            fields["loader"] = self._builder.loader | ({} if size is None else {"batch_size": size})
        return fields

    def _news(self) -> dict[str, Any]:
        """What has changed in the surroundings. What has not is absent."""
        before, self._surroundings = self._surroundings, self._known_surroundings()
        changed = {name: value for name, value in self._surroundings.items() if before.get(name) != value}
        return {"environment": ABSENT, "loader": ABSENT} | changed

    def end(self, stuck_for_seconds: float | None, step_trend: StepTrend | None) -> bool:
        """Write the last line of the run.

        Args:
            stuck_for_seconds: how long it has been stuck; None if it is not.
            step_trend: the trend of a short run.
        """
        return self.write(
            structs.replace(
                self._attempt.end.settled,
                stuck_for_seconds=ABSENT if stuck_for_seconds is None else stuck_for_seconds,
                step_trend=ABSENT if step_trend is None else step_trend,
                errors_total=dict(self._errors.counts),
                log_lines_dropped=self.log.file.dropped,
                environment=ABSENT,
                loader=ABSENT,
                **self._totals(),
            )
        )

    def write_errors(self) -> None:
        """Write the errors that the log does not have yet."""
        for line in self._errors.take_lines():
            self.emit("error", line)

    def close(self) -> None:
        """Close the file after the last line."""
        self.log.file.forget()

    def _totals(self) -> dict[str, Any]:
        """The fields of a `TotalsLine`. Every window has them, so the newest line alone shows the ledger."""
        totals, energy_of = self._builder.current(), self._builder.energy_sample
        kills, memory, resumption = self._attempt.oom_kills(), self._memory.line_field(), self._attempt.resumption()
        return {
            "steps_total": totals.steps,
            "wall_seconds": totals.wall_seconds,
            "ledger_total_seconds": totals.ledger_seconds,
            "exposed_wait_total_seconds": totals.exposed_wait_seconds,
            "exposed_wait_absent": self._accounting.exposed_absent,
            "first_wait_seconds": totals.first_wait_seconds,
            "overhead_seconds": totals.overhead_seconds,
            "stall_lost_total_seconds": self._stall_counts.lost(),
            "dropped_steps_total": totals.dropped_steps,
            "child_processes": self._children,
            "unseen_steps_total": totals.unseen_steps,
            "samples_total": totals.samples,
            "tokens_total": totals.tokens,
            "gpu_energy_total_joules": totals.gpu_energy_joules,
            "gpu_uuid": energy_of.uuid if totals.gpu_energy_joules and energy_of is not None else None,
            "cpu_total_seconds": _cpu_seconds(totals),
            "memory": ABSENT if memory == MemoryForecast() else memory,
            "optimizer_steps_total": self._tracker.optimizer_steps,
            "oom_kills_total": ABSENT if kills is None else kills,
            "resumption": ABSENT if resumption == Resumption() else resumption,
        }


def _fields(line: Line) -> dict[str, Any]:
    fields: dict[str, Any] = rounded(fields_of(line))
    return fields


def _buckets(sketch: Sketch) -> dict[int, int]:
    return dict(sorted(sketch.counts.items()))


def _percentiles(value: Percentiles | None) -> dict[str, float] | None:
    return None if value is None else asdict(value)


def _cpu_seconds(totals: Totals) -> dict[str, float] | None:
    cpu, workers = totals.sampled.cpu, totals.sampled.workers
    if cpu.other_cores.known is None or cpu.used_cores.known is None:
        return None
    told = {"used": cpu.used_cores.known, "others": cpu.other_cores.known, "known": cpu.other_cores.seconds}
    if totals.run_queue_delay_seconds is not None and totals.thread_cpu_seconds is not None:
        told |= {"thread": totals.thread_cpu_seconds, "thread_delay": totals.run_queue_delay_seconds}
    if workers.cpu_seconds > 0:  # the kernel separates running from run-queue delay
        told |= {"worker": workers.cpu_seconds, "worker_delay": workers.runnable_seconds}
    return told
