"""Where a run writes, serves, and meets the other ranks of its node."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.config import ENV_PREFIX
from telemetry.doctor.finding import ABSENT, OK, PROBLEM, Finding, Place, as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

_BOARD_BYTES: Final = 16 << 20


def check_endpoint(place: Place) -> Iterable[Finding]:
    """Whether the port can be had, or which other one."""
    from telemetry.publish.node import PORTS_TRIED

    host, port = place.config.host, place.config.port
    if port is None:
        yield Finding(ABSENT, "endpoint", "the setting port is off: no metrics")
        return
    refused = _bind(host, port)
    if refused is None:
        where = f"port {port}" if port else "any free port"
        yield Finding(OK, "endpoint", f"{where} can be had on {host}")
        return
    last = min(port + PORTS_TRIED, 65536) - 1
    free = next((other for other in range(port + 1, last + 1) if _bind(host, other) is None), None)
    if port and free is not None:
        why = refused.strerror or str(refused)
        text = f"port {port} cannot be had on {host} ({why}): a run would take port {free}"
        yield Finding(ABSENT, "endpoint", text)
    else:
        ports = f"no port from {port} to {last}" if port else "no port at all"
        text = f"{ports} can be had on {host} ({refused}); choose another {ENV_PREFIX}PORT or {ENV_PREFIX}HOST"
        yield Finding(PROBLEM, "endpoint", text)


def _bind(host: str, port: int) -> OSError | None:
    """Take a port as the endpoint would, and give it back. Returns why it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        return error
    return None


def check_run_folder(place: Place) -> Iterable[Finding]:
    """Whether the run folder can be written, with room for the log."""
    config = place.config
    folder = (config.run_dir or Path("telemetry-runs")).absolute()
    try:
        there = _nearest(folder)
        with tempfile.TemporaryFile(dir=there) as trial:
            trial.write(b"x")
        free = shutil.disk_usage(there).free
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror or error}): no log; choose another --run-dir"
        yield Finding(PROBLEM, "run folder", text)
        return
    logs = config.log_max_bytes * config.log_max_files
    text = f"{folder} can be {'written' if there == folder else 'made'}, {as_bytes(free)} free"
    if free < logs:
        yield Finding(PROBLEM, "run folder", f"{text}: the log of one rank may take {as_bytes(logs)}; make room")
    else:
        yield Finding(OK, "run folder", text)


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest above it that is there: the one that it would be made in."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise OSError(f"{folder} is a file")
    return folder


def check_board(place: Place) -> Iterable[Finding]:
    """Make a board, take its lock, and take it away."""
    del place
    from telemetry.publish.board import Board, board_root

    root = board_root()
    try:
        board = Board("doctor", str(os.getpid()), "")
        try:
            board.try_lead()
        finally:
            board.leave()
        free = shutil.disk_usage(root).free
    except OSError as error:
        yield Finding(PROBLEM, "board", f"{root} cannot be used: no metrics; {error}")
        return
    text = f"ranks meet in {root}, {as_bytes(free)} free"
    if free < _BOARD_BYTES:
        yield Finding(PROBLEM, "board", f"{text}: make room (of a container: a larger --shm-size)")
    else:
        yield Finding(OK, "board", text)
