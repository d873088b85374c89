"""Writes the HTML page of a report. What draws it is imported only then: it is an optional extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.filesystem import replace_file
from telemetry.core.formatting import byte_size
from telemetry.core.terminal import complain, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.goodput import Goodput
    from telemetry.report.html.run_recorder import RunRecorder
    from telemetry.report.log_reader import ProcessLog

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
        path: the file. A file that is there is replaced.
        summary: the report, as ``--json`` prints it.
        processes: of the run.
        goodput: its books.
        recorder: has seen the lines of the logs.
        notes: what is missing or damaged in the logs.
    """
    from telemetry.report.html.html_report import html_page

    content = html_page(summary, processes, goodput, recorder=recorder, notes=notes).encode("utf-8", "backslashreplace")
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        replace_file(path, content, _READABLE)
    except (OSError, ValueError) as error:
        complain(f"the page cannot be written to {path}: {error}")
        return 1
    return show(f"{path} ({byte_size(len(content))})\n")
