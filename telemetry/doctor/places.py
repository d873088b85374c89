"""Where a run writes, serves, and meets the other ranks of its node."""

from __future__ import annotations

import errno
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

    from telemetry.publish.address import Address

_BOARD_BYTES: Final = 16 << 20
_RESOLVER_SECONDS: Final = 5.0


def check_endpoint(place: Place) -> Iterable[Finding]:
    """Whether the port can be had, or which other one."""
    from telemetry.publish.node import PORTS_TRIED, explained

    host, port = place.config.host, place.config.port
    if port is None:
        yield Finding(ABSENT, "endpoint", "the setting port is off: no metrics")
        return
    try:
        address = _address_of(host)
        refused = _bind(address, port)
        free = None
        if refused is not None and refused.errno == errno.EADDRINUSE:
            others = range(port + 1, min(port + PORTS_TRIED, 65536)) if port else ()
            free = next((other for other in others if _bind(address, other) is None), None)
    except OSError as error:
        refused, free = error, None
    if refused is None:
        where = f"port {port}" if port else "any free port"
        yield Finding(OK, "endpoint", f"{where} can be had on {host}")
    elif free is not None:
        text = f"port {port} cannot be had on {host} ({refused.strerror}): a run would take port {free}"
        yield Finding(ABSENT, "endpoint", text)
    else:
        why, remedy = explained(refused, host, port)
        text = f"no metrics: {why}; {remedy} ({ENV_PREFIX}HOST, {ENV_PREFIX}PORT)"
        yield Finding(PROBLEM, "endpoint", text)


def _address_of(host: str) -> Address:
    """The address that a run would listen on.

    Raises:
        OSError: the name has none, or the resolver is silent.
    """
    from telemetry.publish.address import Lookup, numeric

    address = numeric(host)
    if address is not None:
        return address
    lookup = Lookup(host)
    if not lookup.wait(_RESOLVER_SECONDS):
        raise socket.gaierror(socket.EAI_AGAIN, f"the resolver is silent for {_RESOLVER_SECONDS:g} s")
    return lookup.result()


def _bind(address: Address, port: int) -> OSError | None:
    """Take a port as the endpoint would, and give it back. Returns why it cannot be had."""
    try:
        with socket.socket(address.family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address.at(port))
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
            board.seats.take()
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
