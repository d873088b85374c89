"""Checks of the endpoint, the run folder and the board."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.config import ENV_PREFIX
from telemetry.doctor.finding import ABSENT, OK, PROBLEM, CheckContext, Finding
from telemetry.util.text import binary_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from telemetry.node.endpoint import Address

_BOARD_BYTES: Final = 16 << 20
_RESOLVER_SECONDS: Final = 5.0


def check_endpoint(place: CheckContext) -> Iterable[Finding]:
    """Whether the port is free, and if not, which port a run would use."""
    from telemetry.node.endpoint import PORTS_TRIED, explained

    host, port = place.config.host, place.config.port
    if port is None:
        yield Finding(ABSENT, "endpoint", "turned off by the setting port: there are no Prometheus metrics")
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
        yield Finding(OK, "endpoint", f"port {port} is free on {host}" if port else f"a free port was found on {host}")
    elif free is not None:
        text = f"port {port} is taken on {host} ({refused.strerror}); a run will use port {free} instead"
        yield Finding(ABSENT, "endpoint", text)
    else:
        why, remedy = explained(refused, host, port)
        text = f"no metrics: {why}; {remedy} ({ENV_PREFIX}HOST, {ENV_PREFIX}PORT)"
        yield Finding(PROBLEM, "endpoint", text)


def _address_of(host: str) -> Address:
    """The address that a run would listen on.

    Raises:
        OSError: the name has no address, or the resolver does not answer.
    """
    from telemetry.node.endpoint import Lookup, numeric

    address = numeric(host)
    if address is not None:
        return address
    lookup = Lookup(host)
    if not lookup.wait(_RESOLVER_SECONDS):
        raise socket.gaierror(socket.EAI_AGAIN, f"the resolver did not answer for {_RESOLVER_SECONDS:g} s")
    return lookup.result()


def _bind(address: Address, port: int) -> OSError | None:
    """Bind a port as the endpoint does, and release it. Returns the error; None if the port is free."""
    try:
        with socket.socket(address.family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address.at(port))
    except OSError as error:
        return error
    return None


def check_run_folder(place: CheckContext) -> Iterable[Finding]:
    """Whether the run folder is writable, with enough space for the log."""
    config = place.config
    folder = (config.run_dir or Path("telemetry-runs")).absolute()
    try:
        there = _nearest(folder)
        with tempfile.TemporaryFile(dir=there) as trial:
            trial.write(b"x")
        free = shutil.disk_usage(there).free
    except OSError as error:
        text = f"{folder} is not writable ({error.strerror or error}): there is no log; choose another --run-dir"
        yield Finding(PROBLEM, "run folder", text)
        return
    logs = config.log_max_bytes * config.log_max_files
    text = f"{folder} {'is writable' if there == folder else 'can be created'}, {binary_size(free)} free"
    if free < logs:
        yield Finding(
            PROBLEM, "run folder", f"{text}: the log of one rank can grow to {binary_size(logs)}; free some space"
        )
    else:
        yield Finding(OK, "run folder", text)


def _nearest(folder: Path) -> Path:
    """The folder if it exists, else its nearest existing parent."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise OSError(f"{folder} is a file")
    return folder


def check_board(place: CheckContext) -> Iterable[Finding]:
    """Whether a board can be created and locked. It is removed again."""
    del place
    from telemetry.node.board import Board, board_root

    root = board_root()
    try:
        board = Board("doctor", str(os.getpid()), "")
        try:
            board.lead()
        finally:
            board.leave()
        free = shutil.disk_usage(root).free
    except OSError as error:
        yield Finding(
            PROBLEM,
            "board",
            f"the shared folder {root} does not work: there are no metrics; make it writable ({error})",
        )
        return
    text = f"the ranks of this node share {root}, {binary_size(free)} free"
    if board.notice:
        text += f" ({board.notice.partition(';')[0]})"
    if free < _BOARD_BYTES:
        yield Finding(PROBLEM, "board", f"{text}: free some space (for a container, raise --shm-size)")
    else:
        yield Finding(OK, "board", text)
