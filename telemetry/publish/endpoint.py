"""The node's endpoint: joins the text that the ranks have rendered, and serves it.

It uses few threads, has a deadline on every connection, and listens on loopback by default. It answers only GET
/metrics and GET /healthz, so nothing can be triggered from outside.
"""

from __future__ import annotations

import errno
from operator import is_
from typing import TYPE_CHECKING, Final

from telemetry.publish.host_names import HostNames
from telemetry.publish.http_server import Server
from telemetry.publish.http_text import PLAIN_TEXT, HttpAnswer
from telemetry.publish.listen_address import Address, numeric
from telemetry.util.clock import NS, thread_time_ns
from telemetry.util.threads import OwnThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.publish.board import RankState

_POLL_SECONDS: Final = 1.0

_MAX_KEPT_BYTES: Final = 1 << 16
"""A page of up to this size, of a rank or two, is kept for the next scrape, which often comes before a rank has
published again."""

_UNKNOWN_HOST: Final = (
    b"unknown host: ask by IP address, by localhost or by the name of the node, or set host to the name you ask by\n"
)


def join(states: Iterable[RankState]) -> bytes:
    """One exposition with the families of several ranks: each family once, with the samples of all ranks."""
    families: dict[bytes, list[bytes]] = {}
    for state in states:
        for header, samples in state.families:
            families.setdefault(header, [header]).append(samples)
    return b"".join(part for family in families.values() for part in family)


class Endpoint:
    """The HTTP server of this node.

    Args:
        host: the setting: the address to listen on, and a name that a request may use for this host.
        ports: ports to try in this order until one is free; 0 is any free port.
        states: reads the board.
        node: this machine's name, which a request may use for this host.
        content_type: content type of the metrics.
        address: the address of ``host``, if ``host`` is a name.
        on_error: called on the endpoint's thread if a request failed because of an error in the agent.
        alive: called about once a second, as long as requests are answered.

    Attributes:
        port: the port that it listens on.

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
        on_error: Callable[[BaseException], None] | None = None,
        alive: Callable[[], None] | None = None,
    ) -> None:
        self._states = states
        self._content_type = content_type
        self._names = HostNames([host, node])
        self._on_error = on_error
        self._last_page: bytes | None = None
        self._page: tuple[list[RankState], bytes] = ([], b"")
        self._cpu_ns = 0
        address = address or numeric(host)
        if address is None:
            raise OSError(f"{host} is no address")
        self._server = self._bind(address, ports)
        self.port: int = self._server.server_address[1]
        self._server.answer = self.answer
        self._server.alive = alive
        self._thread = OwnThread(self._server.serve, _POLL_SECONDS, name="telemetry-endpoint")
        self._thread.start()

    @property
    def serves(self) -> bool:
        """Whether it still serves. False if other code in the process has closed its socket."""
        return self._thread.is_alive() and self._server.listening.is_ours()

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds for the answers."""
        return self._cpu_ns / NS

    def close(self) -> None:
        """Stop serving at once."""
        self._server.end()
        self._thread.join(_POLL_SECONDS)
        self._server.close_sockets()

    def _bind(self, address: Address, ports: Iterable[int]) -> Server:
        taken: OSError | None = None
        for port in ports:
            try:
                return Server(address, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise  # it would be the same at every port
                taken = error
        raise taken or OSError("no port to try")

    def answer(self, method: str, path: str, host: str) -> HttpAnswer:
        """The answer to one request. Never raises."""
        began = thread_time_ns()
        try:
            return self._respond(method, path, host)
        except Exception as error:
            if self._on_error is not None:
                self._on_error(error)
            return HttpAnswer(500, PLAIN_TEXT, b"the metrics could not be joined\n")
        finally:
            self._cpu_ns += thread_time_ns() - began

    def keep_page(self) -> None:
        """Join the states for the last time, because the board may be removed before the next scrape."""
        self._last_page = join(self._states())

    def _text(self) -> bytes:
        if self._last_page is not None:
            return self._last_page
        states, (joined, page) = [*self._states()], self._page
        if len(states) == len(joined) and all(map(is_, states, joined)):
            return page
        page = join(states)
        self._page = (states, page) if len(page) <= _MAX_KEPT_BYTES else ([], b"")
        return page

    def _respond(self, method: str, path: str, host: str) -> HttpAnswer:
        if not self._names.knows(host):
            return HttpAnswer(403, PLAIN_TEXT, _UNKNOWN_HOST)
        if method not in {"GET", "HEAD"}:
            return HttpAnswer(405, PLAIN_TEXT, b"only GET is served here\n")
        if path == "/metrics":
            return HttpAnswer(200, self._content_type, self._text())
        if path == "/healthz":
            return HttpAnswer(200, PLAIN_TEXT, b"ok\n")
        return HttpAnswer(404, PLAIN_TEXT, b"see /metrics and /healthz\n")
