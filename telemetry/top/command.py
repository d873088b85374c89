"""``telemetry top RUN_DIR``: a live view of a run; one frame as text where there is no terminal."""

from __future__ import annotations

import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.top.endpoints import Endpoints
from telemetry.top.run_folder import RunFolder
from telemetry.util.text import complain, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.top.job_view import JobView
    from telemetry.top.painter import Painter

_PLAIN_ROWS: Final = 64
_BEATS_SECONDS: Final = 1.2
"""One frame shows what happens now: the difference of two heartbeats, which come once a second."""


def top(run_dir: str | None, urls: Sequence[str], *, once: bool) -> int:
    """Show a run. Returns the exit status: 1 if there is nothing to show, or if rich is missing.

    Args:
        run_dir: the run folder, or None with ``urls``.
        urls: metrics endpoints.
        once: print one frame as text.
    """
    if find_spec("rich") is None:
        complain("top needs rich: pip install 'torch-telemetry[top]'")
        return 1
    from telemetry.top.painter import Painter

    try:
        painter = Painter(sys.stdout, lambda _: None)
        if once or not painter.is_capable:
            return _print(painter, _one_view(run_dir, urls))
        return _live(Painter, run_dir, urls)
    except KeyboardInterrupt:
        return 130


def _live(make_painter: type[Painter], run_dir: str | None, urls: Sequence[str]) -> int:
    from telemetry.top.live_screen import show_live
    from telemetry.top.poller import ViewPoller
    from telemetry.top.snapshot_request import SnapshotRequest

    source = Endpoints(urls) if run_dir is None else RunFolder(Path(run_dir))
    named = " ".join(urls) if run_dir is None else run_dir
    poller = ViewPoller(source, f"Reading {named}")
    poller.start()
    try:
        show_live(make_painter, poller, named, None if run_dir is None else SnapshotRequest(Path(run_dir)))
    finally:
        poller.stop()
    return 0


def _one_view(run_dir: str | None, urls: Sequence[str]) -> JobView:
    if run_dir is not None:
        folder = RunFolder(Path(run_dir))
        view = folder.poll()
        if not view.running:
            return view
        time.sleep(_BEATS_SECONDS)
        return folder.poll()
    endpoints = Endpoints(urls)
    endpoints.read_all()
    view = endpoints.view()
    if not view.running:
        return view
    time.sleep(2 * _BEATS_SECONDS)
    endpoints.read_all()
    return endpoints.view()


def _print(painter: Painter, view: JobView) -> int:
    from telemetry.top.screen import Frame

    width = max(80, shutil.get_terminal_size((100, 24)).columns)
    lines = Frame(painter.charset(), "").plain(view, width=min(width, 200), now=time.time(), rows=_PLAIN_ROWS)
    return show(painter.plain(lines)) or (0 if view.rows else 1)
