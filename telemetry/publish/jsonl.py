"""The lines of the log: one JSON object each, through structlog. `log_file` writes them to disk."""

from __future__ import annotations

import sys
import threading
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any, Final

import orjson

from telemetry.publish.log_file import LogFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import ModuleType

    from telemetry.util.processes import Identity

_HEAVY: Final = ("rich", "twisted", "better_exceptions", "colorama")
_MAX_TEXT: Final = 8192


class _Absent(MetaPathFinder):
    """Hides packages from imports on the thread that made this. Another thread may be importing them right now."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        del path, target
        if fullname.partition(".")[0] in _HEAVY and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def _structlog() -> ModuleType:
    """Import structlog without the packages that it would load into the training process for its console.

    It imports rich and twisted if they are installed (structlog 26.1: dev.py, twisted.py). The copy made here is
    removed from ``sys.modules`` again, so that a script that uses structlog itself gets a complete one.
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
    """The log of this process.

    Args:
        folder: ``RUN_DIR/logs``.
        identity: run, rank, node and pid, which are in every line.
        timestamp: returns the time of a line, ISO-8601 in UTC.
        step: returns the number of ended steps, which is in every line.
        head: returns the fields of the ``run_start`` at the start of a rotated file, so that each file is complete.
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
        self.file = LogFile(self._path_of(identity), max_bytes, max_files, self._head_line)
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
            rank=identity.rank,
            local_rank=identity.local_rank,
            node=identity.node,
            pid=identity.pid,
        )

    def adopt(self, identity: Identity) -> None:
        """Write the rank of this process, which has become known, into all lines from now on.

        Raises:
            OSError: the file could not be renamed to match.
        """
        self._logger = self._logger.bind(rank=identity.rank, local_rank=identity.local_rank)
        self.file.move(self._path_of(identity))

    def _path_of(self, identity: Identity) -> Path:
        return self._folder / f"rank-{identity.rank}.{identity.pid}.jsonl"

    def emit(self, event: str, fields: dict[str, Any]) -> bool:
        """Write one line. Returns whether it is in the file."""
        written: bool = self._logger.msg(event, **fields)
        return written

    def msg(self, line: bytes) -> bytes | bool:
        """Called by structlog with a finished line: writes it to the file, or returns it to `_head_line`."""
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
        fields.setdefault("time", self._timestamp())
        fields.setdefault("tid", threading.get_native_id())
        fields.setdefault("step", self._step())
        return fields


_FIRST: Final = ("time", "event", "run", "rank", "local_rank", "node", "pid", "tid", "step")


def _order(logger: Any, method: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Put the fields every line has first, in the order of the contract."""
    del logger, method
    return {name: fields[name] for name in _FIRST} | fields


def _dumps(fields: dict[str, Any], **kwargs: Any) -> bytes:
    del kwargs
    try:
        return orjson.dumps(fields, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # a lone surrogate, or a type that orjson does not know: write what can be written
        return orjson.dumps(_plain(fields), option=orjson.OPT_NON_STR_KEYS, default=repr)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_MAX_TEXT].encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
