"""Writes the HTML page of a report. What draws it is imported only then: it is an optional extra."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any, Final

from telemetry.util.files import replace_file
from telemetry.util.text import byte_size, complain, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.goodput import Goodput
    from telemetry.report.html.run_recorder import RunRecorder
    from telemetry.report.process_log import ProcessLog

_PACKAGES: Final = frozenset({"bokeh", "jinja2", "markupsafe", "numpy"})
_READABLE: Final = 0o644


class PageError(Exception):
    """The page cannot be made; the text says why."""


def recorder() -> RunRecorder:
    """What gathers the figures of the page while the logs are read.

    Raises:
        PageError: the packages that draw the page are missing.
    """
    try:
        from telemetry.report.html import html_report
        from telemetry.report.html.run_recorder import RunRecorder
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _PACKAGES:
            raise
        raise PageError(f"--html needs {error.name}: pip install 'torch-telemetry[html]'") from error
    del html_report
    return RunRecorder()


def write(
    path: str,
    *,
    summary: dict[str, Any],
    processes: Sequence[ProcessLog],
    goodput: Goodput,
    recorder: RunRecorder,
    notes: Sequence[str],
) -> int:
    """Write the page and print its path. Returns the exit status: 1 if it cannot be written.

    Args:
        path: the file. A regular file that is there is replaced, also through a symbolic link; nothing else is.
        summary: the report, as ``--json`` prints it.
        processes: of the run.
        goodput: its books.
        recorder: has seen the lines of the logs.
        notes: what is missing or damaged in the logs.
    """
    from telemetry.report.html.html_report import html_page

    try:
        _replaceable(path)  # before the work, and again after it
    except (OSError, ValueError) as error:
        return _refused(path, error)
    content = html_page(summary, processes, goodput, recorder=recorder, notes=notes).encode("utf-8", "backslashreplace")
    try:
        replace_file(_replaceable(path), content, _READABLE)
    except (OSError, ValueError) as error:
        return _refused(path, error)
    return show(f"{path} ({byte_size(len(content))})\n")


def _refused(path: str, error: Exception) -> int:
    complain(f"the page cannot be written to {path}: {error}")
    return 1


def _replaceable(path: str) -> str:
    """The path, or the real one if it is a symbolic link. A device, such as ``/dev/null``, must not be replaced.

    Raises:
        OSError: something is there that is no regular file; a link leads nowhere.
        ValueError: no file can have this name.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return path
    if stat.S_ISLNK(mode):
        try:
            path = os.path.realpath(path, strict=True)
        except FileNotFoundError:
            raise OSError("it is a link that leads to no file") from None
        mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        raise OSError("it is there, and is no regular file")
    return path
