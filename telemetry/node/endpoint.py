"""Which rank of a node serves its metrics.

The ranks of a run agree through the board on the one that serves. Another one takes over when that rank ends, dies, or
stops answering.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.node.prometheus import Exposition, at_port, numbers_of
from telemetry.node.server import Endpoint, HostNames, address_of, explained, from_port
from telemetry.util.clock import NS, now_ns, sleep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.diagnosis.hangs import HangState
    from telemetry.model.records import RankPace
    from telemetry.node.board import Board
    from telemetry.node.metrics import RunView
    from telemetry.node.prometheus import TargetFile
    from telemetry.node.server import Address
    from telemetry.safety.errors import ErrorLog

_ANNOUNCED_SECONDS: Final = 0.2
"""Ranks start together. A rank that does not serve waits this long for the announcement of the port. A resolver gets
the same time."""

_RETRY_SECONDS: Final = 10.0
"""The pause after an attempt to listen has failed."""

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
        self._retry_ns = self._targets_ns = -(1 << 62)
        self._told: set[str] = set()
        self._closed_cpu_seconds = 0.0
        self.endpoint: Endpoint | None = None
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
            while self._port is not None and self._now() < self._settled_ns and self.board.announced() is None:
                sleep(0.002)
            return
        if not led:
            announced = self.board.announced()
            self._first = announced.first if announced is not None else 0
        if self.endpoint is not None and not self.endpoint.serves:
            self._close()
        if self.endpoint is None:
            self.board.server_lock.beat()
            if self._port is not None and self._now() >= self._retry_ns:
                self._serve(self._port)
        elif self.endpoint.port != self._first:
            self._return(self.endpoint.address)
        if self.endpoint is not None:
            self._name(self.endpoint.port)

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
        return None if port is None else f"http://{at_port(self._reachable_host, port)}/metrics"

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
        """Close the copy of the parent's lock file. The sockets are closed in any case."""
        self.board.server_lock.close()

    # -- the endpoint --------------------------------------------------------------------------------------------------

    def _serve(self, port: int) -> None:
        """Listen. If that fails, try again later.

        Raises:
            OSError: the problem and its remedy, unless it was already reported.
        """
        try:
            address = address_of(self._host, (self._settled_ns - self._now()) / NS)
            # The previous rank's port comes first, so that scrapes continue.
            endpoint = self._listen(address, [*filter(None, [self._first]), *from_port(port)])
        except OSError as error:
            if not isinstance(error, TimeoutError):
                self._retry_ns = self._now() + int(_RETRY_SECONDS * NS)
            self.trouble, remedy = explained(error, self._host, port)
            text = f"no metrics: {self.trouble}; {remedy}. It is tried again after a while"
            if text not in self._told:
                self._told.add(text)
                raise OSError(text) from None
            return
        self.trouble, self._told = "", set()
        where = f"the metrics of this run are at port {endpoint.port}"
        if self._first not in {0, endpoint.port}:
            who = "by a rank that does not answer, or by another program"
            text = f"port {self._first}, at which this node was served, is still held {who}; until it is free"
            self._errors.tell("endpoint", f"{text}, {where}")
        elif port not in {0, endpoint.port}:
            self._errors.tell("endpoint", f"port {port} is taken; {where}")
        self._first = self._first or endpoint.port

    def _return(self, address: Address) -> None:
        """Serve at the first port again, once the rank that has it goes on or dies."""
        try:
            self._listen(address, [self._first])
        except OSError:
            return
        self._errors.tell("endpoint", f"the metrics of this run are at port {self._first} again")

    def _listen(self, address: Address, ports: Iterable[int]) -> Endpoint:
        """Serve at the first of these ports that is free, instead of the present one.

        Raises:
            OSError: the address cannot be listened on, or every port is taken.
        """
        names, lock = HostNames([self._host, self._node]), self.board.server_lock
        endpoint = Endpoint(address, ports, self._exposition, names, lock=lock, errors=self._errors)
        self._close()
        self.endpoint, self._targets_ns = endpoint, -(1 << 62)
        return endpoint

    def _close(self) -> None:
        endpoint, self.endpoint = self.endpoint, None
        if endpoint is not None:
            try:
                endpoint.close()
            finally:
                self._closed_cpu_seconds += endpoint.cpu_seconds

    def _name(self, port: int) -> None:
        """Keep the announcement and the target file correct: both may be removed, or written by another rank."""
        try:
            self.board.announce(port, self._first)
        finally:
            if self._targets is not None and self._now() - self._targets_ns >= _TARGETS_SECONDS * NS:
                self._targets_ns = self._now()
                self._targets.write(self._reachable_host, port)

    @property
    def _reachable_host(self) -> str:
        return self._node if self._host in _EVERYWHERE else self._host
