"""``telemetry trace FILE_OR_DIR [--json]``: what it says, as text for the command line to print."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from telemetry.snapshot.reading.limits import Limits, NoTraceError, TraceError
from telemetry.snapshot.reading.text import overview, render
from telemetry.snapshot.trace import Trace, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENDINGS: Final = (".json", ".json.gz")
_MOST_FILES: Final = 10_000
_DEEPEST: Final = 5
_MOST_SHOWN: Final = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the command has to say.

    Attributes:
        text: for the standard output; empty where nothing could be read.
        problems: a line each, for the standard error.
        status: the exit status: 1 where a file could not be read.
    """

    text: str
    problems: tuple[str, ...]
    status: int


def trace(path: str, *, as_json: bool, limits: Limits) -> Outcome:
    """Read a trace, or all traces in a folder.

    In a folder, no symbolic link is followed, and JSON that is no trace is passed over.

    Args:
        path: the file or the folder.
        as_json: an object for a file and a list for a folder, instead of text.
        limits: what reading one file may cost.
    """
    if not Path(path).is_dir():
        try:
            read = read_trace(path, limits)
        except TraceError as error:
            return Outcome("", (str(error),), 1)
        return Outcome(_dump(read.as_json()) if as_json else render(read), (), 0)
    return _folder(path, as_json=as_json, limits=limits)


def _folder(path: str, *, as_json: bool, limits: Limits) -> Outcome:
    traces: list[Trace] = []
    problems: list[str] = []
    for file in _files(Path(path), _DEEPEST):
        try:
            traces.append(read_trace(file, limits, follow=False))
        except NoTraceError:
            continue
        except TraceError as error:
            problems.append(str(error))
        if len(traces) + len(problems) >= _MOST_FILES:
            problems.append(f"only the first {_MOST_FILES} files in {path} were read")
            break
    if not traces and not problems:
        problems.append(f"there is no trace in {path}: no file that ends in .json or .json.gz holds one")
    status = 1 if problems else 0
    if not traces:
        return Outcome("", tuple(problems), status)
    traces.sort(key=lambda each: (each.rank is None, each.rank or 0, each.file))
    text = _dump([each.as_json() for each in traces]) if as_json else _several(traces)
    return Outcome(text, tuple(problems), status)


def _several(traces: list[Trace]) -> str:
    if len(traces) == 1:
        return render(traces[0])
    shown = traces if len(traces) <= _MOST_SHOWN else []
    more = "" if shown else "\nName one of the files for all about it, or give --json.\n"
    return "\n\n".join([overview(traces), *map(render, shown)]) + more


def _files(folder: Path, depth: int) -> Iterator[Path]:
    """Files that may be traces, in the order of their names; nothing behind a symbolic link."""
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
