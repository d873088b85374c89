"""The HTTP server below the endpoint: a few threads, and a deadline on every connection."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final

from telemetry.hooks.patching import WeakMap
from telemetry.publish.http_text import PLAIN_TEXT, SERVER, HttpAnswer, as_http, plain_request
from telemetry.util.clock import NS, now_ns, sleep, unix_time
from telemetry.util.files import Descriptor, raised_socket
from telemetry.util.threads import OwnThread, rest, work

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.publish.listen_address import Address

CONNECTION_SECONDS: Final = 5.0
"""The deadline of a connection, for request and answer together."""

MAX_CONNECTIONS: Final = 8
"""Connections above this number are closed at once."""

_REQUEST_SECONDS: Final = 0.002
"""A client on the same node sends its request within this time. Slower clients get a thread each."""

_PAUSE_SECONDS: Final = 0.1
"""The pause after a connection could not be accepted."""

_MAX_HEAD_BYTES: Final = 8192
_MAX_UNSENT_BYTES: Final = 1 << 20  # in the kernel, of one answer: a node of 64 ranks


class _Handler(BaseHTTPRequestHandler):
    """One request. HTTP/1.0, so each connection has one request. Writes nothing to the training's stderr.

    Attributes:
        rest: the part of the answer that the kernel has not accepted yet.
    """

    timeout = CONNECTION_SECONDS
    server: Server
    rest = b""

    def setup(self) -> None:
        super().setup()
        self.wfile = self._answer = BytesIO()

    def finish(self) -> None:
        answer = self._answer.getvalue()
        super().finish()
        self.rest = _sent(self.connection, answer)

    def do_GET(self) -> None:
        path = self.requestline.split()[1]  # as it was sent: `self.path` merges leading slashes
        hosts = self.headers.get_all("Host") or [""]
        answer = self.server.answer(self.command, path.partition("?")[0], hosts[0] if len(hosts) == 1 else "")
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if answer.status == 405:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET  # noqa: N815 - the base class's names

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(unix_time() if timestamp is None else timestamp)

    def version_string(self) -> str:
        return SERVER

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        del format, args


def _head_at_once(request: socket.socket) -> bytes:
    """The request, if it has arrived completely within `_REQUEST_SECONDS`; else empty. It stays in the socket."""
    try:
        request.settimeout(_REQUEST_SECONDS)
        head = request.recv(_MAX_HEAD_BYTES, socket.MSG_PEEK)
    except OSError:
        return b""
    return head if b"\r\n\r\n" in head else b""


def _on_a_thread(target: Callable[..., None], *args: Any) -> None:
    OwnThread(target, *args, name="telemetry-request").start()


def _sent(connection: socket.socket, answer: bytes) -> bytes:
    """Send what the kernel accepts at once. Returns the rest.

    Raises:
        OSError: the client has closed the connection.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, min(len(answer), _MAX_UNSENT_BYTES))
    return answer[connection.send(answer) :]


class _SocketGoneError(Exception):
    """Other code in the process has closed the listening socket."""


class Server(ThreadingMixIn, TCPServer):
    """A server with a limited number of threads, and a deadline for each connection."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, address: Address, port: int) -> None:
        self.address_family = address.family
        self.alive: Callable[[], None] | None = None
        self.answer: Callable[[str, str, str], HttpAnswer] = lambda *_: HttpAnswer(503, PLAIN_TEXT, b"not ready\n")
        self._ended = False
        self._open: dict[socket.socket, int] = {}
        self._guard = threading.Lock()
        _servers[self] = None  # before the socket is made: a child may be forked at any moment
        super().__init__(address.at(port), _Handler, bind_and_activate=False)
        self.socket = raised_socket(self.socket)
        try:
            self.server_bind()
            self.server_activate()
        except BaseException:
            self.server_close()
            raise
        self.listening = Descriptor(self.socket.fileno())

    def serve(self, poll_seconds: float) -> None:
        """Serve until `end`, or until the socket belongs to other code."""
        waiting = select.poll()
        waiting.register(self.socket.fileno(), select.POLLIN)
        try:
            while not self._ended:
                rest()
                ready = waiting.poll(1000 * poll_seconds)
                work()
                if ready and not self._ended:
                    self._handle_request_noblock()  # type: ignore[attr-defined]
                self.service_actions()
        except _SocketGoneError:
            pass

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Pauses after an error: without a pause, repeated errors would use a core."""
        if not self.listening.is_ours():
            raise _SocketGoneError
        try:
            request, address = super().get_request()
            return raised_socket(request), address
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL comes from `end`
                sleep(_PAUSE_SECONDS)  # the usual reason: no descriptor is left
            raise

    def end(self) -> None:
        """End `serve`. Shutting the socket down wakes the thread that waits for it."""
        self._ended = True
        try:
            if self.listening.is_ours():
                self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request that has arrived at once, or give it a thread."""
        with self._guard:
            full = len(self._open) >= MAX_CONNECTIONS
            if not full:
                self._open[request] = now_ns()
        if full:
            self.shutdown_request(request)
        elif head := _head_at_once(request):
            self._answer_here(request, client_address, head)
        else:
            _on_a_thread(self.process_request_thread, request, client_address)

    def _answer_here(self, request: Any, client_address: Any, head: bytes) -> None:
        """Answer without a new thread, because a new thread has to wait for the GIL more often.

        With a thread, the 99th percentile of a scrape took twice as long beside a training loop (`benchmarks/`), and
        the steps during it took 0.3 ms longer. Nothing here waits for the client: the rest of an answer gets a thread.
        """
        rest = b""
        try:
            scrape = plain_request(head)
            if scrape is None:
                rest = _Handler(request, client_address, self).rest
            else:
                request.settimeout(_Handler.timeout)
                request.recv(_MAX_HEAD_BYTES)
                answer = self.answer(scrape.method, scrape.path, scrape.host)
                rest = _sent(request, as_http(answer, with_body=scrape.method == "GET"))
        except Exception:
            self.handle_error(request, client_address)
        if rest:
            _on_a_thread(self._send_rest, request, rest)
        else:
            self.shutdown_request(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Handle a request on its own thread."""
        request.sendall(_Handler(request, client_address, self).rest)

    def _send_rest(self, request: Any, rest: bytes) -> None:
        try:
            request.sendall(rest)
        except OSError:
            pass
        finally:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, which makes room for another one."""
        with self._guard:
            self._open.pop(request, None)
        try:
            super().shutdown_request(request)
        except OSError:
            pass  # other code has closed it; an exception in a thread would be printed to the training's stderr

    def service_actions(self) -> None:
        """Called about once a second: give a sign of life, and end connections that are past their deadline."""
        if self.alive is not None:
            try:
                self.alive()
            except OSError:
                pass
        limit = now_ns() - int(CONNECTION_SECONDS * NS)
        with self._guard:
            late = [request for request, since in self._open.items() if since < limit]
        for request in late:
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection, mostly a client that went away. Nothing goes to the training's stderr."""

    def close_sockets(self) -> None:
        """Close the listening socket and every connection."""
        self.socket.detach()
        self.listening.close()
        for request in list(self._open):
            try:
                request.shutdown(socket.SHUT_RDWR)  # its thread closes it: `close` waits for the file on the socket
            except OSError:
                pass

    def abandon(self) -> None:
        """Close a forked child's copies. Not with `socket.close`, which waits for a file on the socket."""
        listening = getattr(self, "listening", None)
        if listening is not None and not listening.is_ours():
            self.socket.detach()
        for each in (getattr(self, "socket", None), *list(self._open)):
            try:
                if each is not None:
                    os.close(each.detach())
            except OSError:
                pass


_servers: Final[WeakMap[None]] = WeakMap()


def abandon_all() -> None:
    """In a forked child: close the parent's sockets, including that of a server that is not complete yet."""
    for server in _servers.objects():
        server.abandon()
