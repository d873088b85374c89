"""``telemetry report RUN_DIR [--json] [--html FILE]``: the report of a run, and what is missing in its logs."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from telemetry.log.reader import NoRunError
from telemetry.report.as_text import as_text
from telemetry.report.summary import read_report
from telemetry.safety.files import replace_file
from telemetry.util.words import byte_size, complain, show, show_json

if TYPE_CHECKING:
    from telemetry.report.html.over_time import RunRecorder
    from telemetry.report.summary import Report
_PACKAGES: Final = frozenset({"bokeh", "jinja2", "markupsafe", "numpy"})
_READABLE: Final = 0o644


class PageError(Exception):
    """The page cannot be made; the text has the reason."""


def report(run_dir: str, *, as_json: bool, html: str | None = None) -> int:
    """Print the report of a run, or write it as an HTML page.

    Args:
        run_dir: the run folder.
        as_json: print one JSON object instead of text.
        html: the file of the page; then its path is all that is printed.

    Returns:
        The exit status: 1 if there is no run in the folder, or the page cannot be written.
    """
    try:
        recorder = None if html is None else page_recorder()
        found = read_report(Path(run_dir), recorder)
    except (NoRunError, PageError) as error:
        complain(str(error))
        return 1
    if html is not None and recorder is not None:
        return _write_page(html, found, recorder)
    if as_json:
        return show_json(msgspec.json.format(msgspec.json.encode(found.values)).decode() + "\n")
    return show(as_text(found))


def page_recorder() -> RunRecorder:
    """The recorder that collects the figures of the page while the logs are read.

    Raises:
        PageError: the packages that draw the page are missing.
    """
    try:
        from telemetry.report.html import page
        from telemetry.report.html.over_time import RunRecorder
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _PACKAGES:
            raise
        raise PageError(f"--html needs {error.name}: pip install 'torch-telemetry[html]'") from error
    del page
    return RunRecorder()


def _write_page(path: str, found: Report, recorder: RunRecorder) -> int:
    """Write the page and print its path. Returns the exit status. It replaces only a regular file, also by a link."""
    from telemetry.report.html.page import html_page

    try:
        _replaceable(path)  # before the work, and again after it
        content = html_page(found, recorder).encode("utf-8", "backslashreplace")
        replace_file(_replaceable(path), content, _READABLE)
    except (OSError, ValueError) as error:
        complain(f"the page cannot be written to {path}: {error}")
        return 1
    return show(f"{path} ({byte_size(len(content))})\n")


def _replaceable(path: str) -> str:
    """The real path of a file. A device, such as ``/dev/null``, must not be replaced.

    Raises:
        OSError: something is there that is not a regular file.
        ValueError: no file can have this name.
    """
    path = os.path.realpath(path)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return path
    if not stat.S_ISREG(mode):
        raise OSError("it is there, and is not a regular file")
    return path
