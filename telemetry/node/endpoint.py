"""The endpoint of a node: an HTTP server for the metrics, and the choice of the rank that runs it.

The server answers only GET /metrics and GET /healthz, so nothing can be triggered from outside. It listens on loopback
by default, has one thread, few connections, and a deadline for each. The ranks of a run agree through the board on
the one that serves. Another one takes over when that rank ends, dies, or stops answering.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import select
import socket
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.hooks.patching import WeakMap
from telemetry.node.prometheus import Exposition, Page, numbers_of
from telemetry.util.clock import NS, now_ns, sleep, thread_time_ns
from telemetry.util.files import LOWEST, Descriptor, raised, read_small
from telemetry.util.threads import OwnThread, rest, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.diagnosis.hangs import HangState
    from telemetry.node.board import Board, ServerLock
    from telemetry.node.metrics import RunView
    from telemetry.node.prometheus import TargetFile
    from telemetry.records import RankPace
    from telemetry.util.errors import ErrorLog

# -- the setting `host` --------------------------------------------------------------------------------------------

PORTS_TRIED: Final = 64
"""If the port is taken, up to this many higher ports are tried."""


class Address(NamedTuple):
    """An IP address to listen on, as `socket.getaddrinfo` gives it."""

    family: int
    where: tuple[Any, ...]

    def at(self, port: int) -> tuple[Any, ...]:
        """The socket address with a port."""
        host, _, *rest = self.where
        return (host, port, *rest)

    @property
    def is_any(self) -> bool:
        """Whether it means all addresses of this machine."""
        return ipaddress.ip_address(self.where[0].partition("%")[0]).is_unspecified


def numeric(host: str) -> Address | None:
    """The address of a numeric ``host`` or ``localhost``; None for any other name. Asks no resolver."""
    try:
        return _looked_up("127.0.0.1" if host.lower() in {"localhost", "localhost."} else host, socket.AI_NUMERICHOST)
    except OSError:
        return None


def _looked_up(host: str, flags: int = 0) -> Address:
    """Look up the first address of a name, preferring IPv4 to IPv6.

    Raises:
        OSError: the name has no address.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "not a name of a host") from None
    usable = [Address(each[0], each[4]) for each in found if each[0] in {socket.AF_INET, socket.AF_INET6}]
    if not usable:
        raise socket.gaierror(socket.EAI_NONAME, "no IP address")
    return min(usable, key=lambda each: each.family != socket.AF_INET)


class Lookup:
    """Looks a name up on its own thread: a resolver that does not answer takes minutes."""

    def __init__(self, name: str) -> None:
        self._found: Address | OSError = OSError(f"{name} has no address")
        self._thread = OwnThread(self._run, name, name="telemetry-resolver")
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait at most this many seconds for the answer. Returns whether it has come."""
        return self._thread.join(max(0.0, seconds))

    def result(self) -> Address:
        """The answer. Call it only after the answer has come.

        Raises:
            OSError: the name has no address.
        """
        if isinstance(self._found, OSError):
            raise self._found
        return self._found

    def _run(self, name: str) -> None:
        try:
            self._found = _looked_up(name)
        except OSError as error:
            self._found = error


def explained(error: OSError, host: str, port: int) -> tuple[str, str]:
    """Why these settings' address cannot be listened on, and what to do, in words."""
    why = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        ports = f"every port from {port} to {min(65536, port + PORTS_TRIED) - 1}" if port else "every port"
        return f"{ports} is taken on {host}", "set port to another one, or to 0 for any"
    if error.errno == errno.EACCES:
        return f"port {port} may not be listened on ({why})", "set port to one above 1023"
    what = "be resolved" if isinstance(error, socket.gaierror) else "be listened on"
    return f"{host} cannot {what} ({why})", "set host to an address of this machine, such as 127.0.0.1 or 0.0.0.0"


# -- the names of a node -------------------------------------------------------------------------------------------

_HOST: Final = re.compile(r"([^:\[\]]*)(?::[0-9]*)?|\[([^\[\]]*)\](?::[0-9]*)?|([^\[\]]*)")
"""A Host header: a name or an address, perhaps with a port; an IPv6 address in brackets; or one without them."""


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
        given = {_plain(name) for name in (*given, socket.gethostname())}
        own = {name for name in given if name not in {"", "localhost"} and not _is_address(name)}
        own |= {name.partition(".")[0] for name in own}
        self._names = {*own, "localhost"}
        for line in _lines(etc / "hosts"):
            names = {_plain(word) for word in line.split("#")[0].split()[1:]}
            if names & own:
                self._names |= {name for name in names if name in own or name.partition(".")[0] in own}
        for line in _lines(etc / "resolv.conf"):
            word, *domains = line.split() or [""]
            if word in {"search", "domain"}:
                self._names |= {f"{name}.{_plain(domain)}" for name in own for domain in domains if _plain(domain)}

    def knows(self, header: str) -> bool:
        """Whether a Host header names this node."""
        match = _HOST.fullmatch(_plain(header))
        if match is None:
            return False
        name, address = match[1], match[2] or match[3]
        return _is_address(address) if name is None else _plain(name) in self._names or _is_address(name)


def _lines(path: Path) -> list[str]:
    try:
        # `read_small` needs the resolved path, because the file may be a link.
        return read_small(path.resolve(), 1 << 16).decode("ascii", "replace").splitlines()
    except (OSError, RuntimeError):
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


# -- the HTTP server -----------------------------------------------------------------------------------------------

CONNECTION_SECONDS: Final = 5.0
"""The deadline of a connection, for request and answer together."""

MAX_CONNECTIONS: Final = 8
"""Connections above this number are closed at once."""

_POLL_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.1
"""The pause after a connection could not be accepted. Without it, repeated errors would use a core."""

_MAX_REQUEST_BYTES: Final = 8192
_REQUEST_LINE: Final = re.compile(r"([A-Za-z]+) ([!-~]+) HTTP/1\.[01]")
_FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")
_UNKNOWN_HOST: Final = (
    "unknown host: ask by IP address, by localhost or by the name of the node, or set host to the name you ask by"
)


def _parsed(head: bytes) -> tuple[str, str, dict[str, str]] | None:
    """Method, path and headers (names in lower case, equal ones joined by commas) of a request; None for anything else.

    The standard library has no parser for it that is fast enough: the one for mail, which reads headers, holds the GIL
    for half a millisecond on a cold cache.
    """
    head, end, _ = head.partition(b"\r\n\r\n")
    line, *fields = head.decode("latin-1").split("\r\n")
    request = _REQUEST_LINE.fullmatch(line)
    if request is None or not end:
        return None
    headers: dict[str, str] = {}
    for text in fields:
        field = _FIELD.fullmatch(text)
        if field is None:
            return None
        name = field[1].lower()
        headers[name] = f"{headers[name]},{field[2]}" if name in headers else field[2]
    return request[1], request[2].partition("?")[0], headers


class _Connection:
    """A connection: what was received, and then the part of the answer that the kernel has not taken yet."""

    __slots__ = ("answer", "descriptor", "received", "since_ns", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.descriptor = Descriptor(connection.fileno())
        self.since_ns = now_ns()
        self.received = b""
        self.answer = memoryview(b"")

    def receive(self) -> bool:
        """Read until the request is whole or too long. Returns False if its end does not come.

        Raises:
            BlockingIOError: more may come.
            OSError: the client has closed the connection.
        """
        while b"\r\n\r\n" not in self.received and len(self.received) < _MAX_REQUEST_BYTES:
            part = self.socket.recv(_MAX_REQUEST_BYTES)
            if not part:
                return False
            self.received += part
        return True

    def send(self) -> None:
        """Send what the kernel takes at once. The rest stays in ``answer``.

        Raises:
            OSError: the client has closed the connection.
        """
        self.answer = self.answer[self.socket.send(self.answer) :]

    def close(self, *, copy: bool = False) -> None:
        """Close it, unless other code has closed it and its number belongs to another file by now.

        Args:
            copy: whether this is a forked child's copy. Then the connection itself goes on.
        """
        if not self.descriptor.is_ours():
            self.socket.detach()
            return
        try:
            if not copy:
                self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client has closed it
        self.socket.close()


class Endpoint:
    """The HTTP server of this node. One thread answers one connection after another, and waits for no client.

    Args:
        address: the address to listen on.
        ports: ports to try in this order until one is free; 0 is any free port.
        exposition: makes the answer.
        names: names that a request may use for this host.
        lock: gets a sign of life about once a second, as long as requests are answered; None for no lock.
        errors: counts requests that failed because of an error in the agent.

    Attributes:
        port: the port that it listens on.
        cpu_seconds: CPU time of its thread.

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
        lock: ServerLock | None,
        errors: ErrorLog,
    ) -> None:
        self.exposition = exposition
        self._names = names
        self._lock = lock
        self._errors = errors
        self._ended = False
        self._connections: dict[int, _Connection] = {}
        self.cpu_seconds = 0.0
        self._socket = _raised(socket.socket(address.family, socket.SOCK_STREAM))
        self._listening = Descriptor(self._socket.fileno())
        _endpoints[self] = None  # before it has a port, because a child may be forked at any moment
        try:
            self._listen(address, ports)
            self.port: int = self._socket.getsockname()[1]
            self._thread = OwnThread(self._serve, name="telemetry-endpoint")
            self._thread.start()
        except BaseException:
            self._socket.close()
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

    def close(self) -> None:
        """Stop serving at once."""
        self._ended = True
        try:
            if self._listening.is_ours():
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        except OSError:
            pass
        self._thread.join(_POLL_SECONDS)
        self._socket.detach()
        self._listening.close()

    def abandon(self) -> None:
        """Close a forked child's copies of the sockets."""
        for connection in [*self._connections.values()]:
            connection.close(copy=True)
        self._socket.detach()
        self._listening.close()

    # -- its thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Serve until `close`, or until the listening socket belongs to other code."""
        poll = select.poll()
        poll.register(self._listening.number, select.POLLIN)
        try:
            while not self._ended:
                rest()
                ready = poll.poll(1000 * _POLL_SECONDS)
                work()
                if self._ended or not self._listening.is_ours():
                    break
                for number, _ in ready:
                    if number == self._listening.number:
                        self._accept(poll)
                    elif number in self._connections:
                        self._proceed(poll, number)
                self._end_late(poll)
                self.cpu_seconds = thread_time_ns() / NS
                if self._lock is not None:
                    self._lock.beat()
        except Exception as error:  # the agent starts another endpoint
            self._errors.note("endpoint", error)
        finally:
            for connection in self._connections.values():
                connection.close()

    def _accept(self, poll: select.poll) -> None:
        try:
            accepted = _raised(self._socket.accept()[0])
        except BlockingIOError:
            return  # the client has gone
        except OSError:
            sleep(_PAUSE_SECONDS)  # the usual reason: no descriptor is left
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            accepted.close()
            return
        accepted.setblocking(False)
        number = accepted.fileno()
        if number in self._connections:  # other code has closed that one
            poll.unregister(number)
            self._connections.pop(number).socket.detach()
        self._connections[number] = _Connection(accepted)
        poll.register(number, select.POLLIN)
        self._proceed(poll, number)  # the request has often arrived already

    def _proceed(self, poll: select.poll, number: int) -> None:
        """Read what has arrived of a request, and send what the kernel takes of the answer."""
        connection = self._connections[number]
        try:
            if connection.descriptor.is_ours() and connection.receive():
                if not connection.answer:
                    connection.answer = memoryview(self._answer(connection.received))
                    poll.modify(number, select.POLLOUT)
                connection.send()
                if connection.answer:
                    return
        except BlockingIOError:
            return
        except OSError:
            pass  # the client has closed the connection
        self._drop(poll, number)

    def _drop(self, poll: select.poll, number: int) -> None:
        poll.unregister(number)
        self._connections.pop(number).close()

    def _end_late(self, poll: select.poll) -> None:
        limit = now_ns() - int(CONNECTION_SECONDS * NS)
        for number in [number for number, each in self._connections.items() if each.since_ns < limit]:
            self._drop(poll, number)

    def _answer(self, received: bytes) -> bytes:
        """The answer to a request, as HTTP/1.0, which closes the connection after it."""
        request = _parsed(received)
        if request is None:
            return _response(400, _plain_page("this is no request"))
        method, path, headers = request
        try:
            status, page = self._respond(method, path, headers)
        except Exception as error:
            self._errors.note("endpoint", error)
            status, page = 500, _plain_page("the metrics could not be rendered")
        return _response(status, page, with_body=method != "HEAD")

    def _respond(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, Page]:
        if not self._names.knows(headers.get("host", "")):
            return 403, _plain_page(_UNKNOWN_HOST)
        if method not in {"GET", "HEAD"}:
            return 405, _plain_page("only GET is served here")
        if path == "/metrics":
            return 200, self.exposition.page(headers.get("accept", ""), headers.get("accept-encoding", ""))
        if path == "/healthz":
            return 200, _plain_page("ok")
        return 404, _plain_page("see /metrics and /healthz")


def _raised(opened: socket.socket) -> socket.socket:
    """Move a socket as `raised` moves a descriptor."""
    if opened.fileno() >= LOWEST:
        return opened
    timeout = opened.gettimeout()
    moved = socket.socket(opened.family, opened.type, opened.proto, fileno=raised(opened.detach()))
    moved.settimeout(timeout)
    return moved


def _plain_page(text: str) -> Page:
    return Page("text/plain; charset=utf-8", "", f"{text}\n".encode())


def _response(status: int, page: Page, *, with_body: bool = True) -> bytes:
    head = [
        f"HTTP/1.0 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "X-Content-Type-Options: nosniff",
    ]
    if page.encoding:
        head.append(f"Content-Encoding: {page.encoding}")
    if status == 405:
        head.append("Allow: GET, HEAD")
    return "\r\n".join([*head, "\r\n"]).encode() + (page.body if with_body else b"")


_endpoints: Final[WeakMap[None]] = WeakMap()


# -- which rank serves ---------------------------------------------------------------------------------------------

_ANNOUNCED_SECONDS: Final = 0.2
"""Ranks start together. A rank that does not serve waits this long for the announcement of the port. A resolver gets
the same time."""

_SLOW_LOOKUP_SECONDS: Final = 5.0
"""A lookup that takes longer is reported."""

_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
"""Pauses between attempts to listen double after each failure, up to this."""

_TARGETS_SECONDS: Final = 10.0
"""How often the agent checks that the target file exists and names the right port."""

_EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to


class NodeService:
    """This rank's part in serving its node.

    Args:
        board: the board of this run on this node.
        targets: the target file, if there is one.
        run: name of the run.
        host, port: the settings; port None for off, 0 for any.
        node: this machine's name.
        errors: takes messages for the user, and counts requests that failed because of an error in the agent.
        mono_ns: the clock for pauses, monotonic nanoseconds.

    Attributes:
        endpoint: the endpoint of this rank, if it serves.
        trouble: why this rank has no endpoint although it should serve; else empty.
    """

    def __init__(
        self,
        board: Board,
        targets: TargetFile | None,
        *,
        run: str,
        host: str,
        port: int | None,
        node: str,
        errors: ErrorLog,
        mono_ns: Callable[[], int] = now_ns,
    ) -> None:
        self.board = board
        self._targets = targets
        self._host = host
        self._port = port
        self._node = node
        self._errors = errors
        self._now = mono_ns
        self._exposition = Exposition(board, run, node)
        self._settled_ns = mono_ns() + int(_ANNOUNCED_SECONDS * NS)
        self._ended = False
        self._first = 0  # the port at which this node was first served; 0 before that
        self._lookup: Lookup | None = None
        self._lookup_ns = 0
        self._address: Address | None = None
        self._retry_ns = -(1 << 62)
        self._pause = _FIRST_PAUSE_SECONDS
        self._told: set[str] = set()
        self._targets_ns = -(1 << 62)
        self.endpoint: Endpoint | None = None
        self._closed_cpu_seconds = 0.0
        self.trouble = ""

    def publish(
        self, rank: int, view: RunView, *, pace: RankPace | None = None, hang: HangState | None = None, ended: bool
    ) -> None:
        """Put this rank's state on the board, see `RankHead`, and keep the machine's numbers for scrapes of this rank.

        Raises:
            OSError: the board cannot be written.
        """
        self._ended = ended
        self._exposition.machine = numbers_of(view, of_node=True)
        self.board.publish(rank, numbers_of(view), pace=pace, hang=hang, ended=ended)

    def lead_if_vacant(self) -> None:
        """Serve if no other rank does, or if the rank that does is stopped.

        Cheap enough for every tick. Called at least once a second. It waits neither for another rank nor for a
        resolver.

        Raises:
            OSError: the address cannot be listened on (raised once), or the target file cannot be written. The endpoint
                serves even without a target file.
        """
        if self._ended:  # other ranks do not wait for an ended one: the board may be removed
            if self.endpoint is not None:
                self._exposition.keep()
            return
        led = self.board.leads
        if not self.board.lead():
            self._close()
            if self._port is not None:
                self._wait_for_announcement()
            return
        if self._port is None:
            self.board.server_lock.beat()
            return
        if not led:
            announced = self.board.announced()
            self._first = announced.first if announced is not None else 0
        if self.endpoint is not None and not self.endpoint.serves:
            self._close()
        if self.endpoint is None:
            self.board.server_lock.beat()
            self._serve()
        elif self.endpoint.port != self._first:
            self._return()
        self._name_endpoint()

    @property
    def port(self) -> int | None:
        """The port at which any rank serves this node's metrics; None if no rank does."""
        if self.endpoint is not None:
            return self.endpoint.port
        announced = self.board.announced()
        return None if announced is None else announced.port

    @property
    def url(self) -> str | None:
        """The URL of the metrics; None with port ``off``, or before any rank serves them."""
        port = None if self._port is None else self.port
        if port is None:
            return None
        host = self._host
        shown = self._node if host in _EVERYWHERE else f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}/metrics"

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds for the answers, including endpoints that were replaced."""
        endpoint = self.endpoint
        return self._closed_cpu_seconds + (endpoint.cpu_seconds if endpoint is not None else 0.0)

    def leave(self) -> None:
        """Remove this rank from the board. The last rank also removes the target file."""
        self._close()
        if self.board.leave() and self._targets is not None:
            self._targets.remove()

    def after_fork_in_child(self) -> None:
        """Close the copies of the parent's files and sockets, also those of an endpoint that is being made."""
        for endpoint in _endpoints.objects():
            endpoint.abandon()
        self.board.server_lock.close()

    # -- the endpoint ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Listen, unless that has just failed or the address's name is not resolved yet."""
        if self._now() < self._retry_ns:
            return
        ports = range(self._port, min(65536, self._port + PORTS_TRIED)) if self._port else [0]
        try:
            if self._address is None:
                self._address = self._found()
            if self._address is None:
                return
            # The previous rank's port comes first, so that scrapes continue.
            endpoint = self._listen(self._address, [*filter(None, [self._first]), *ports])
        except OSError as error:
            self._give_up(error)
            return
        self.trouble = ""
        self._pause, self._told = _FIRST_PAUSE_SECONDS, set()
        self._adopt(endpoint)
        where = f"the metrics of this run are at port {endpoint.port}"
        if self._first not in {0, endpoint.port}:
            who = "by a rank that does not answer, or by another program"
            text = f"port {self._first}, at which this node was served, is still held {who}; until it is free"
            self._errors.tell("endpoint", f"{text}, {where}")
        elif self._port not in {0, endpoint.port}:
            self._errors.tell("endpoint", f"port {self._port} is taken; {where}")
        self._first = self._first or endpoint.port

    def _return(self) -> None:
        """Serve at the first port again, once the rank that has it goes on or dies."""
        assert self._address is not None  # noqa: S101 - there is an endpoint
        try:
            endpoint = self._listen(self._address, [self._first])
        except OSError:
            return
        self._close()
        self._adopt(endpoint)
        self._errors.tell("endpoint", f"the metrics of this run are at port {endpoint.port} again")

    def _listen(self, address: Address, ports: Iterable[int]) -> Endpoint:
        names = HostNames([self._host, self._node])
        return Endpoint(address, ports, self._exposition, names, lock=self.board.server_lock, errors=self._errors)

    def _adopt(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._targets_ns = -(1 << 62)

    def _found(self) -> Address | None:
        """The address to listen on; None while its name is being resolved."""
        address = numeric(self._host)
        if address is not None:
            return address
        if self._lookup is None:
            self._lookup, self._lookup_ns = Lookup(self._host), self._now()
        if not self._lookup.wait((self._settled_ns - self._now()) / NS):
            self.trouble = f"the name {self._host} is still being looked up"
            text = f"no metrics yet: {self.trouble}; set host to an address instead of a name"
            if self._now() - self._lookup_ns > _SLOW_LOOKUP_SECONDS * NS and text not in self._told:
                self._told.add(text)
                self._errors.tell("endpoint", text)
            return None
        lookup, self._lookup = self._lookup, None
        return lookup.result()

    def _give_up(self, error: OSError) -> None:
        """Try again later, with increasing pauses.

        Raises:
            OSError: the problem and its remedy, unless it was already reported.
        """
        self._retry_ns = self._now() + int(self._pause * NS)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        self._address = None  # a name may have another address by then
        self.trouble, remedy = explained(error, self._host, self._port or 0)
        text = f"no metrics: {self.trouble}; {remedy}. It is tried again after a while"
        if text not in self._told:
            self._told.add(text)
            raise OSError(text)

    def _close(self) -> None:
        endpoint, self.endpoint = self.endpoint, None
        if endpoint is not None:
            try:
                endpoint.close()
            finally:
                self._closed_cpu_seconds += endpoint.cpu_seconds

    def _wait_for_announcement(self) -> None:
        while self._now() < self._settled_ns and self.board.announced() is None:
            sleep(0.002)

    def _name_endpoint(self) -> None:
        """Keep the announcement and the target file correct: both may be removed, or written by another rank."""
        if self.endpoint is None:
            return
        try:
            self.board.announce(self.endpoint.port, self._first)
        finally:
            if self._targets is not None and self._now() - self._targets_ns >= _TARGETS_SECONDS * NS:
                self._targets_ns = self._now()
                self._targets.write(self._reachable_host(), self.endpoint.port)

    def _reachable_host(self) -> str:
        address = numeric(self._host)
        return self._node if address is not None and address.is_any else self._host
