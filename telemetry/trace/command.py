"""``telemetry trace FILE_OR_DIR [--json]``: the text that the command line prints."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from telemetry.trace.read_limits import NoTraceError, ReadLimits, TraceError
from telemetry.trace.reader import Trace, read_trace
from telemetry.trace.trace_text import overview, render

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENDINGS: Final = (".json", ".json.gz")
_MAX_FILES: Final = 10_000
_DEEPEST: Final = 5
_MAX_SHOWN: Final = 4


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """What the command prints.

    Attributes:
        text: for the standard output; empty if nothing could be read.
        problems: lines for the standard error.
        status: the exit status; 1 if a file could not be read.
    """

    text: str
    problems: tuple[str, ...]
    status: int


def trace(path: str, *, as_json: bool, limits: ReadLimits) -> ReadOutcome:
    """Read a trace, or all traces in a folder.

    In a folder, symbolic links are not followed, and JSON files that are not traces are skipped.

    Args:
        path: the file or the folder.
        as_json: whether to give JSON: an object for a file, a list for a folder.
        limits: the limits for reading one file.
    """
    if not Path(path).is_dir():
        try:
            read = read_trace(path, limits)
        except TraceError as error:
            return ReadOutcome("", (str(error),), 1)
        return ReadOutcome(_dump(read.as_json()) if as_json else render(read), (), 0)
    return _folder(path, as_json=as_json, limits=limits)


def _folder(path: str, *, as_json: bool, limits: ReadLimits) -> ReadOutcome:
    traces: list[Trace] = []
    problems: list[str] = []
    for file in _files(Path(path), _DEEPEST):
        try:
            traces.append(read_trace(file, limits, follow=False))
        except NoTraceError:
            continue
        except TraceError as error:
            problems.append(str(error))
        if len(traces) + len(problems) >= _MAX_FILES:
            problems.append(f"only the first {_MAX_FILES} files in {path} were read")
            break
    if not traces and not problems:
        problems.append(f"there is no trace in {path}: no file that ends in .json or .json.gz is one")
    status = 1 if problems else 0
    if not traces:
        return ReadOutcome("", tuple(problems), status)
    traces.sort(key=lambda each: (each.rank is None, each.rank or 0, each.file))
    text = _dump([each.as_json() for each in traces]) if as_json else _several(traces)
    return ReadOutcome(text, tuple(problems), status)


def _several(traces: list[Trace]) -> str:
    if len(traces) == 1:
        return render(traces[0])
    shown = traces if len(traces) <= _MAX_SHOWN else []
    more = "" if shown else "\nName one of the files to see all of it, or use --json.\n"
    return "\n\n".join([overview(traces), *map(render, shown)]) + more


def _files(folder: Path, depth: int) -> Iterator[Path]:
    """Files that may be traces, sorted by name. Symbolic links are not followed."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        try:
            mode = entry.stat(follow_symlinks=False).st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode) and depth > 1:
            yield from _files(Path(entry.path), depth - 1)
        elif stat.S_ISREG(mode) and entry.name.endswith(_ENDINGS):
            yield Path(entry.path)


def _dump(value: dict[str, Any] | list[dict[str, Any]]) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() + "\n"
