"""A bare HTTP client for the tests of the endpoint."""

from __future__ import annotations

import contextlib
import socket

from faults.processes import HANG, wait_for
from telemetry.publish import endpoint as endpoint_module
from telemetry.publish import http_server as module
from telemetry.publish.board import RankState
from telemetry.publish.endpoint import Endpoint
from telemetry.publish.exposition import CONTENT_TYPE
from telemetry.util import threads

STATE = RankState(0, 1, ((b"# HELP x X.\n# TYPE x gauge\n", b'x{rank="0"} 1.0\n'),))
PAGE = b'# HELP x X.\n# TYPE x gauge\nx{rank="0"} 1.0\n'
GOOD = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.contextmanager
def serving():
    """An endpoint with one rank. Checks at the end that its threads have ended, and that it had no error."""
    errors = []
    before = len(threads.running())
    made = Endpoint("127.0.0.1", [0], lambda: [STATE], "the-node", CONTENT_TYPE, on_error=errors.append)
    yield made
    made.close()
    wait_for(lambda: len(threads.running()) <= before, "its threads are gone")
    assert errors == []


def shorten_deadlines(monkeypatch) -> None:
    """Shorten the deadline of a connection."""
    monkeypatch.setattr(module, "CONNECTION_SECONDS", 0.3)
    monkeypatch.setattr(module._Handler, "timeout", 0.3)
    monkeypatch.setattr(endpoint_module, "_POLL_SECONDS", 0.05)


@contextlib.contextmanager
def client(endpoint):
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=HANG) as connection:
        yield connection


def received(connection) -> bytes:
    """Everything that is received until the other side closes or resets the connection."""
    parts = []
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def ask(endpoint, request: bytes) -> bytes:
    with client(endpoint) as connection:
        connection.sendall(request)
        return received(connection)


def serves(endpoint) -> bool:
    answer = ask(endpoint, GOOD)
    return answer.startswith(b"HTTP/1.0 200 ") and answer.endswith(b"\r\n\r\n" + PAGE)
