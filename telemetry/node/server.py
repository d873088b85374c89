"""The HTTP server of a node. It answers GET /metrics and GET /healthz.

So nothing can be triggered from outside. It has few connections, and a deadline for the client of each.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import select
import socket
from _thread import get_ident
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.node.prometheus import Page
from telemetry.safety.files import LOWEST, Descriptor, raised
from telemetry.safety.threads import OwnThread, no_fork
from telemetry.util.clock import NS, now_ns, sleep, thread_time

if TYPE_CHECKING:
    from collections.abc import Iterable

    from telemetry.node.board import ServerLock
    from telemetry.node.prometheus import Exposition
    from telemetry.safety.errors import ErrorLog

# -- the setting `host` ------------------------------------------------------------------------------------------------

PORTS_TRIED: Final = 64
"""If the port is taken, the ports after it are tried: so many in all."""


def from_port(port: int) -> range:
    """The ports to try for the setting ``port``; 0 is any free one."""
    return range(port, min(65536, port + PORTS_TRIED)) if port else range(1)


class Address(NamedTuple):
    """An IP address to listen on, as `socket.getaddrinfo` gives it."""

    family: int
    where: tuple[Any, ...]

    def at(self, port: int) -> tuple[Any, ...]:
        """The socket address with a port."""
        host, _, *more = self.where
        return (host, port, *more)


def _looked_up(host: str, flags: int = 0) -> Address:
    """An address of a name, of IPv4 if it has one.

    Raises:
        OSError: it has none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "not a name of a host") from None
    family, *_, where = min(found)  # IPv4 has the smaller number
    return Address(family, where)


def address_of(host: str, seconds: float) -> Address:
    """The address to listen on. A resolver that does not answer takes minutes, so a thread of its own asks it.

    Args:
        host: the setting.
        seconds: the longest wait for the resolver. Later calls wait for the same answer.

    Raises:
        TimeoutError: the resolver has not answered.
        OSError: the name has no address.
    """
    try:
        return _looked_up("127.0.0.1" if host.lower() in {"localhost", "localhost."} else host, socket.AI_NUMERICHOST)
    except OSError:
        pass  # it is a name
    lookup = _lookups.pop(host, None) or _Lookup(host)
    if not lookup.thread.join(max(0.0, seconds)):
        _lookups[host] = lookup
        raise TimeoutError("the resolver has not answered yet")
    if isinstance(lookup.found, OSError):
        raise lookup.found
    return lookup.found


class _Lookup:
    """A question to the resolver, and its answer once the thread has ended."""

    def __init__(self, name: str) -> None:
        self.found: Address | OSError = OSError("no answer")
        self.thread = OwnThread(self._ask, name, name="telemetry-resolver")
        self.thread.start()

    def _ask(self, name: str) -> None:
        try:
            self.found = _looked_up(name)
        except OSError as error:
            self.found = error


_lookups: Final[dict[str, _Lookup]] = {}


def explained(error: OSError, host: str, port: int) -> tuple[str, str]:
    """Why these settings' address cannot be listened on, and what to do, in words."""
    why = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        ports = f"every port from {port} to {from_port(port)[-1]}" if port else "every port"
        return f"{ports} is taken on {host}", "set port to another one, or to 0 for any"
    if error.errno == errno.EACCES:
        return f"port {port} may not be listened on ({why})", "set port to one above 1023"
    what = "be resolved" if isinstance(error, (socket.gaierror, TimeoutError)) else "be listened on"
    return f"{host} cannot {what} ({why})", "set host to an address of this machine, such as 127.0.0.1 or 0.0.0.0"


# -- the names of a node -----------------------------------------------------------------------------------------------

_HOST: Final = re.compile(r"\[(.*)\](?::[0-9]*)?|([^:]*)(?::[0-9]*)?|(.*)")
"""A Host header: an IPv6 address in brackets, or a name, perhaps with a port; or an IPv6 address alone."""


class HostNames:
    """The names by which a request may address this node: the node's names, localhost, and any IP address.

    Only exact names count, because a web page may rebind its own name to this node. The node's full name counts, too.
    A resolver may not answer, so the full name comes from files: the names beside the short name in /etc/hosts, and the
    search domains of /etc/resolv.conf.

    Args:
        given: the configured host and the node's name.
        etc: the folder of ``hosts`` and ``resolv.conf``.
    """

    def __init__(self, given: Iterable[str], etc: Path = Path("/etc")) -> None:
        own = {_plain(name) for name in (*given, socket.gethostname())} - {"", "localhost"}
        own = {name for name in own if not _is_address(name)}
        own |= {name.partition(".")[0] for name in own}
        self._names = {*own, "localhost"}
        for line in _lines(etc / "hosts"):
            names = {_plain(word) for word in line.split("#")[0].split()[1:]}
            if names & own:
                self._names |= {name for name in names if name.partition(".")[0] in own}
        for line in _lines(etc / "resolv.conf"):
            word, *domains = line.split() or [""]
            if word in {"search", "domain"}:
                self._names |= {f"{name}.{_plain(domain)}" for name in own for domain in domains}

    def knows(self, header: str) -> bool:
        """Whether a Host header names this node."""
        match = _HOST.fullmatch(_plain(header))
        bracketed, name, alone = match.groups() if match is not None else (None, None, None)
        return _plain(name or "") in self._names or _is_address(bracketed or name or alone or "")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii", "replace").splitlines()
    except OSError:
        return []


def _plain(name: str) -> str:
    """A name in the form for comparison: lower case, without a trailing dot."""
    return name.strip().lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


# -- the server --------------------------------------------------------------------------------------------------------

MAX_CONNECTIONS: Final = 16
"""Connections above this number are closed at once."""

CONNECTION_SECONDS: Final = 2.0
"""A client may take so long to send its request, and again to read the answer. It is looked at once a second."""

_POLL_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.005
"""The pause after each connection. So clients that ask all the time wait for one another, and not the training."""

_NEVER_NS: Final = 1 << 62

_UNKNOWN_HOST: Final = (
    "unknown host: ask by IP address, by localhost or by the name of the node, or set host to the name you ask by"
)


class _Request(BaseHTTPRequestHandler):
    """Answers the request of a connection, as HTTP/1.0, which closes the connection after it."""

    server: Endpoint  # type: ignore[assignment]
    error_message_format, error_content_type = "%(message)s\n", "text/plain; charset=utf-8"
    disable_nagle_algorithm = True  # the body follows its head at once

    def do_GET(self) -> None:
        """Answer GET, and HEAD without the body."""
        self.server.open[self.connection] = _NEVER_NS
        try:
            status, page = self._answer()
        except Exception as error:
            self.server.errors.note("endpoint", error)
            status, page = 500, _plain_page("the metrics could not be rendered")
        self.server.open[self.connection] = now_ns()
        self.send_response(status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if page.encoding:
            self.send_header("Content-Encoding", page.encoding)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page.body)

    do_HEAD = do_GET  # noqa: N815 - the base class's name

    def _answer(self) -> tuple[int, Page]:
        path, headers = self.path.partition("?")[0], self.headers
        if not self.server.names.knows(headers.get("Host", "")):
            return 403, _plain_page(_UNKNOWN_HOST)
        if path == "/metrics":
            return 200, self.server.exposition.page(headers.get("Accept", ""), headers.get("Accept-Encoding", ""))
        return (200, _plain_page("ok")) if path == "/healthz" else (404, _plain_page("see /metrics and /healthz"))

    def send_response(self, code: int, message: str | None = None) -> None:
        """Begin an answer without the time: a script may have replaced the clock that the base class reads."""
        self.send_response_only(code, message)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Print nothing."""


def _plain_page(text: str) -> Page:
    return Page("text/plain; charset=utf-8", "", f"{text}\n".encode())


class Endpoint:
    """The HTTP server of this node. One thread accepts connections, others answer one each.

    Args:
        address: the address to listen on.
        ports: ports to try in this order until one is free; 0 is any free port.
        exposition: makes the answer.
        names: names that a request may use for this host.
        lock: gets a sign of life about once a second.
        errors: counts requests that failed because of an error in the agent.

    Attributes:
        port: the port that it listens on.
        open: the connections, and since when each waits for its client.

    Raises:
        OSError: the address cannot be listened on, or every port is taken (EADDRINUSE).
    """

    def __init__(
        self,
        address: Address,
        ports: Iterable[int],
        exposition: Exposition,
        names: HostNames,
        *,
        lock: ServerLock,
        errors: ErrorLog,
    ) -> None:
        self.address = address
        self.exposition = exposition
        self.names = names
        self.errors = errors
        self._cpu: dict[int, float] = {}  # CPU seconds by thread
        self._lock = lock
        self._ended = False
        self.open: dict[socket.socket, int] = {}
        self._waiting: SimpleQueue[socket.socket | None] = SimpleQueue()
        self._answering: list[OwnThread] = []  # as many as there were connections at once
        with no_fork:
            self._socket = _raised(socket.socket(address.family, socket.SOCK_STREAM))
            self._listening = Descriptor(self._socket.fileno())
            _endpoints.add(self)
        try:
            self._listen(address, ports)
            self.port: int = self._socket.getsockname()[1]
            self._thread = OwnThread(self._serve, name="telemetry-endpoint")
            self._thread.start()
        except BaseException:
            with no_fork:
                self.abandon()
            raise

    def _listen(self, address: Address, ports: Iterable[int]) -> None:
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken: OSError | None = None
        for port in ports:
            try:
                self._socket.bind(address.at(port))
                self._socket.listen(2 * MAX_CONNECTIONS)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise  # every port would fail in the same way
                taken = error
            else:
                return
        raise taken or OSError("no port to try")

    @property
    def serves(self) -> bool:
        """Whether it still serves. False if other code in the process has closed its socket."""
        return self._thread.is_alive() and self._listening.is_ours()

    @property
    def cpu_seconds(self) -> float:
        """CPU time of its threads."""
        return sum([*self._cpu.values()])

    def close(self) -> None:
        """Stop serving at once, and end all connections."""
        self._ended = True
        with suppress(OSError):
            if self._listening.is_ours():
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_POLL_SECONDS)
        self._end_connections(0.0)
        for _ in self._answering:
            self._waiting.put(None)
        for thread in self._answering:
            thread.join(_POLL_SECONDS)
        with no_fork:
            self.abandon()

    def abandon(self) -> None:
        """Close the sockets, or a forked child's copies of them."""
        _endpoints.discard(self)
        for connection in self.open:
            with suppress(OSError):  # it is closed
                os.close(connection.detach())
        self._socket.detach()
        self._listening.close()

    # -- its threads ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Accept connections until `close`, or until the listening socket belongs to other code."""
        poll = select.poll()
        poll.register(self._listening.number, select.POLLIN)
        try:
            while True:
                ready = poll.poll(1000 * _POLL_SECONDS)
                if self._ended or not self._listening.is_ours():
                    return
                if ready:
                    self._accept()
                    sleep(_PAUSE_SECONDS)
                self._end_connections(CONNECTION_SECONDS)
                self._lock.beat()
                self._cpu[get_ident()] = thread_time()
        except Exception as error:  # the agent starts another endpoint
            self.errors.note("endpoint", error)

    def _accept(self) -> None:
        try:
            with no_fork:
                connection = _raised(self._socket.accept()[0])
                self.open[connection] = now_ns()
            connection.settimeout(None)  # the script may have set a default
            if len(self.open) > MAX_CONNECTIONS:
                self._end(connection)
                return
            self._waiting.put(connection)
            if len(self._answering) < len(self.open):
                thread = OwnThread(self._answer, name="telemetry-scrape")
                thread.start()
                self._answering.append(thread)
        except (OSError, RuntimeError):
            pass  # the client has gone; or no descriptor or thread is left, so it is tried again

    def _answer(self) -> None:
        while True:
            connection = self._waiting.get()
            if connection is None:
                return
            try:
                _Request(connection, None, self)  # type: ignore[arg-type]
            except OSError:
                pass  # the client has closed the connection
            except Exception as error:
                self.errors.note("endpoint", error)
            self._end(connection)
            self._cpu[get_ident()] = thread_time()

    def _end(self, connection: socket.socket) -> None:
        with no_fork:
            connection.close()
            del self.open[connection]

    def _end_connections(self, seconds: float) -> None:
        """End the connections that have waited this long for their client: their threads read and write no more."""
        limit = now_ns() - int(seconds * NS)
        with no_fork:
            for connection, since in self.open.items():
                if since < limit:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)


def _raised(opened: socket.socket) -> socket.socket:
    """Move a socket as `raised` moves a descriptor."""
    return opened if opened.fileno() >= LOWEST else socket.socket(fileno=raised(opened.detach()))


_endpoints: Final[set[Endpoint]] = set()
"""All that have a socket, also the one that is being made."""


def _after_fork_in_child() -> None:
    for endpoint in [*_endpoints]:
        endpoint.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
