"""The node's endpoint: joins what the ranks have rendered, and serves it.

A few threads and no more, a deadline on every connection, loopback unless told otherwise, and nothing that can be
triggered from outside: GET /metrics and GET /healthz are all there is.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final

from telemetry.clock import NS, now_ns
from telemetry.files import Descriptor, raised_socket
from telemetry.publish.address import Address, numeric
from telemetry.publish.hosts import HostNames
from telemetry.signals import signals_blocked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.publish.board import RankState

CONNECTION_SECONDS: Final = 5.0
"""A connection, request and answer together, may last so long."""

MAX_CONNECTIONS: Final = 8
"""More than these at a time are closed at once."""

_POLL_SECONDS: Final = 0.5
_REQUEST_SECONDS: Final = 0.002
"""So soon after the connection the request is there, of a client that is near; the others get a thread each."""

_PAUSE_SECONDS: Final = 0.1
"""Before the next try where a connection cannot be accepted: it waits on, and so the socket does not."""

_MOST_HEAD_BYTES: Final = 8192
_MOST_UNSENT_BYTES: Final = 1 << 20  # in the kernel, of one answer: a node of 64 ranks
_FRESH_SECONDS: Final = 2.0  # the agent thread joins once a second; where it does not get to it, the request does
_PLAIN: Final = "text/plain; charset=utf-8"
_UNKNOWN_HOST: Final = (
    b"unknown host: ask by IP address, by localhost or by the name of the node, or set host to the name you ask by\n"
)


def join(states: Iterable[RankState]) -> bytes:
    """One exposition of the families of several ranks: each family once, the samples of all ranks below it."""
    families: dict[bytes, list[bytes]] = {}
    for state in states:
        for header, samples in state.families:
            families.setdefault(header, [header]).append(samples)
    return b"".join(part for family in families.values() for part in family)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request gets."""

    status: int
    content_type: str
    body: bytes


class Endpoint:
    """The HTTP server of this node.

    Args:
        host: the setting: what to listen on, and a name that a request may name as its host.
        ports: ports to try, in order, until one is not taken; 0 is any free one.
        states: reads the board.
        node: this machine's name, which a request may name as its host.
        content_type: of the metrics.
        address: of ``host``, where that is a name.
        alive: called about twice a second, as long as requests are answered.

    Attributes:
        port: where it listens.
        failures: requests that failed because of us.

    Raises:
        OSError: the address cannot be listened on, or every port is taken (EADDRINUSE).
    """

    def __init__(
        self,
        host: str,
        ports: Iterable[int],
        states: Callable[[], Iterable[RankState]],
        node: str,
        content_type: str,
        *,
        address: Address | None = None,
        alive: Callable[[], None] | None = None,
    ) -> None:
        self._states = states
        self._content_type = content_type
        self._names = HostNames([host, node])
        self.failures = 0
        self._page = (-(1 << 62), b"")
        self._cpu_ns = 0
        address = address or numeric(host)
        if address is None:
            raise OSError(f"{host} is no address")
        self._server = self._bind(address, ports)
        self.port: int = self._server.server_address[1]
        self._server.answer = self.answer
        self._server.alive = alive
        self._thread = threading.Thread(
            target=self._server.serve, args=(_POLL_SECONDS,), name="telemetry-endpoint", daemon=True
        )
        with signals_blocked():
            self._thread.start()

    @property
    def serves(self) -> bool:
        """Whether it still does: not where others have closed its socket."""
        return self._thread.is_alive() and self._server.listening.is_ours()

    @property
    def cpu_seconds(self) -> float:
        """CPU time the answers took."""
        return self._cpu_ns / NS

    def close(self) -> None:
        """Stop serving, at once: the shut socket wakes the thread that polls it."""
        self._server.wake()
        self._server.shutdown()
        self._server.close_sockets()

    def _bind(self, address: Address, ports: Iterable[int]) -> _Server:
        taken: OSError | None = None
        for port in ports:
            try:
                return _Server(address, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise  # it would be the same at every port
                taken = error
        raise taken or OSError("no port to try")

    def answer(self, method: str, path: str, host: str) -> Answer:
        """The answer to one request. Never raises."""
        began = time.thread_time_ns()
        try:
            return self._respond(method, path, host)
        except Exception:
            self.failures += 1
            return Answer(500, _PLAIN, b"the metrics could not be joined\n")
        finally:
            self._cpu_ns += time.thread_time_ns() - began

    def refresh(self) -> None:
        """Join the states ahead of the next scrape, which then only sends them."""
        self._page = (now_ns(), join(self._states()))

    def _text(self) -> bytes:
        joined_ns, page = self._page
        return page if now_ns() - joined_ns < _FRESH_SECONDS * NS else join(self._states())

    def _respond(self, method: str, path: str, host: str) -> Answer:
        if not self._names.knows(host):
            return Answer(403, _PLAIN, _UNKNOWN_HOST)
        if method not in {"GET", "HEAD"}:
            return Answer(405, _PLAIN, b"only GET is served here\n")
        if path == "/metrics":
            return Answer(200, self._content_type, self._text())
        if path == "/healthz":
            return Answer(200, _PLAIN, b"ok\n")
        return Answer(404, _PLAIN, b"see /metrics and /healthz\n")


class _Handler(BaseHTTPRequestHandler):
    """One request: HTTP/1.0, so one to a connection. Nothing of it reaches the training's stderr.

    Attributes:
        rest: of the answer, what the kernel has not taken at once.
    """

    timeout = CONNECTION_SECONDS
    server: _Server
    rest = b""

    def setup(self) -> None:
        super().setup()
        self.wfile = self._answer = BytesIO()

    def finish(self) -> None:
        answer = self._answer.getvalue()
        super().finish()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, min(len(answer), _MOST_UNSENT_BYTES))
        self.rest = answer[self.connection.send(answer) :]

    def do_GET(self) -> None:
        path = self.requestline.split()[1]  # as it was sent: `self.path` has its first slashes made one
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

    def version_string(self) -> str:
        return "telemetry"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        del format, args


def _is_whole(request: socket.socket) -> bool:
    """Whether the whole request has come, or does within `_REQUEST_SECONDS`."""
    try:
        request.settimeout(_REQUEST_SECONDS)
        return b"\r\n\r\n" in request.recv(_MOST_HEAD_BYTES, socket.MSG_PEEK)
    except OSError:
        return False


class _SocketGoneError(Exception):
    """Others have closed the socket that listens."""


class _Server(ThreadingMixIn, TCPServer):
    """Threads per connection, capped in number and in time."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, address: Address, port: int) -> None:
        self.address_family = address.family
        self.alive: Callable[[], None] | None = None
        self.answer: Callable[[str, str, str], Answer] = lambda *_: Answer(503, _PLAIN, b"not ready\n")
        self._open: dict[socket.socket, int] = {}
        self._guard = threading.Lock()
        _servers.add(self)  # before there is a socket: a child may be forked at any moment
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
        """Serve until `shutdown`, or until the socket is another's."""
        try:
            self.serve_forever(poll_seconds)
        except _SocketGoneError:
            pass

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Where that fails at once, it would fail again at once, on a core of the training's."""
        if not self.listening.is_ours():
            raise _SocketGoneError
        try:
            request, address = super().get_request()
            return raised_socket(request), address
        except OSError as error:
            if error.errno != errno.EINVAL:  # which is that of `wake`
                time.sleep(_PAUSE_SECONDS)  # no descriptor is left, above all
            raise

    def wake(self) -> None:
        """End the wait for connections."""
        try:
            if self.listening.is_ours():
                self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            full = len(self._open) >= MAX_CONNECTIONS
            if not full:
                self._open[request] = now_ns()
        if full:
            self.shutdown_request(request)
        elif _is_whole(request):
            self._answer_here(request, client_address)
        else:
            super().process_request(request, client_address)

    def _answer_here(self, request: Any, client_address: Any) -> None:
        """Without a thread of its own, which has to wait for the interpreter more often than all the rest of it.

        With one the 99th percentile of a scrape took twice as long beside a training loop (`benchmarks/`), and the
        steps that it met 0.3 ms more. Nothing here waits for the client: what it does not take at once gets its thread.
        """
        rest = b""
        try:
            rest = _Handler(request, client_address, self).rest
        except Exception:
            self.handle_error(request, client_address)
        if rest:
            threading.Thread(target=self._send_rest, args=(request, rest), daemon=True).start()
        else:
            self.shutdown_request(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """On a thread of its own."""
        request.sendall(_Handler(request, client_address, self).rest)

    def _send_rest(self, request: Any, rest: bytes) -> None:
        try:
            request.sendall(rest)
        except OSError:
            pass
        finally:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.pop(request, None)
        try:
            super().shutdown_request(request)
        except OSError:
            pass  # others have closed it; and a thread that raises is on the training's stderr

    def service_actions(self) -> None:
        """Twice a second: say that we live; end the connections that have lasted too long, however busy they keep."""
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
        """A client that went away, mostly; nothing for the training's stderr."""

    def close_sockets(self) -> None:
        self.socket.detach()
        self.listening.close()
        for request in list(self._open):
            try:
                request.shutdown(socket.SHUT_RDWR)  # its thread closes it: `close` waits for the file on the socket
            except OSError:
                pass

    def abandon(self) -> None:
        """Close this process's copies, in a forked child. Not `socket.close`: it waits for a file on the socket."""
        listening = getattr(self, "listening", None)
        if listening is not None and not listening.is_ours():
            self.socket.detach()
        for each in (getattr(self, "socket", None), *list(self._open)):
            try:
                if each is not None:
                    os.close(each.detach())
            except OSError:
                pass


_servers: Final[weakref.WeakSet[_Server]] = weakref.WeakSet()


def abandon_all() -> None:
    """In a forked child: close the sockets, which are the parent's, also of a server that is only being made."""
    for server in list(_servers):
        server.abandon()
