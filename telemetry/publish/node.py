"""One endpoint per node: the ranks of a run agree through the board on which one serves, and replace it if it ends."""

from __future__ import annotations

import os
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from telemetry.publish.board import RankState
from telemetry.publish.exposition import CONTENT_TYPE
from telemetry.publish.hang_board import HangBoard
from telemetry.publish.listen_address import PORTS_TRIED, Address, Lookup, explained, numeric
from telemetry.util.clock import NS, now_ns, sleep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.publish.board import Board
    from telemetry.publish.discovery import TargetFile
    from telemetry.publish.endpoint import Endpoint
    from telemetry.records import RankPace
    from telemetry.util.errors import ErrorLog

_ANNOUNCED_SECONDS: Final = 0.2
"""Ranks start together. A rank that does not serve waits this long for the serving rank to announce its port. A
resolver gets the same time."""

_SLOW_LOOKUP_SECONDS: Final = 5.0
"""A lookup that takes longer is reported."""

_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
"""Between two attempts to listen, after the first one failed. Each pause is twice as long as the one before."""

_TARGETS_SECONDS: Final = 10.0
"""How often the agent checks that the target file exists and names the right ports."""


class NodeService:
    """This rank's part in serving its node.

    Args:
        board: the board of this run on this node.
        targets: the target file; None for none.
        host: address to listen on.
        port: the setting; None for off, 0 for any.
        node: this machine's name.
        errors: takes messages for the user, and counts requests that failed because of an error in the agent.
        mono_ns: the clock for pauses, monotonic nanoseconds.

    Attributes:
        endpoint: the endpoint of this rank, if it serves.
        hang_board: what the ranks of this node share during a hang.
        leads: whether it is this rank's turn to act for its node, with or without an endpoint.
        trouble: why there is no endpoint although it is this rank's turn; empty if there is no problem.
    """

    def __init__(
        self,
        board: Board,
        targets: TargetFile | None,
        *,
        host: str,
        port: int | None,
        node: str,
        errors: ErrorLog,
        mono_ns: Callable[[], int] = now_ns,
    ) -> None:
        self._board = board
        self._targets = targets
        self._host = host
        self._port = port
        self._node = node
        self._errors = errors
        self._now = mono_ns
        self._settled_ns = mono_ns() + int(_ANNOUNCED_SECONDS * NS)
        self._ended = False
        self._machine = RankState(0, 0, ())
        self._before: list[int] = []  # ports that stopped ranks have: the metrics belong there
        self._lookup: Lookup | None = None
        self._lookup_ns = 0
        self._address: Address | None = None
        self._retry_ns = -(1 << 62)
        self._pause = _FIRST_PAUSE_SECONDS
        self._told: set[str] = set()
        self._targets_ns = -(1 << 62)
        self._new_endpoint: type[Endpoint] | None = None
        self._abandon_all: Callable[[], None] = lambda: None
        if port is not None:
            # Here, on the thread that starts the agent: a child that is forked while another thread imports a module
            # can never import that module.
            from telemetry.publish.endpoint import Endpoint
            from telemetry.publish.http_server import abandon_all

            self._new_endpoint, self._abandon_all = Endpoint, abandon_all
        self.endpoint: Endpoint | None = None
        self.hang_board = HangBoard(board.path)
        self.leads = False
        self._closed_cpu_seconds = 0.0
        self.trouble = ""

    def publish(
        self,
        rank: int,
        families: list[tuple[bytes, bytes]],
        machine: Iterable[tuple[bytes, bytes]],
        *,
        pace: RankPace | None = None,
        ended: bool,
    ) -> None:
        """Put this rank's families, and its pace, on the board.

        ``machine``, the families of the machine, are kept here: only the rank that serves shows its own. So each is
        there once, and never that of a rank that has stopped reading.

        Raises:
            OSError: the board cannot be written.
        """
        self._ended = ended
        self._machine = RankState(rank, os.getpid(), tuple(machine))
        self._board.publish(rank, families, pace=pace, ended=ended)

    def rank_for(self, claimed: int, *, rank_given: bool, world_size: int) -> int:
        """The rank under which this process is shown, see `Board.rank_for`."""
        return self._board.rank_for(claimed, rank_given=rank_given, world_size=world_size)

    def move(self, before: int, rank: int) -> None:
        """Show this process under another rank from now on.

        Raises:
            OSError: the board cannot be written.
        """
        self._board.move(before, rank)

    def paces(self, but: int | None = None) -> tuple[RankPace, ...]:
        """The paces of the ranks of this node, without rank ``but``."""
        return self._board.paces(but)

    @property
    def board_name(self) -> str:
        """Name of the board. It distinguishes two containers of one machine that have the same node name."""
        return self._board.path.name

    def live_ranks(self) -> int:
        """How many living ranks of this node publish."""
        return self._board.live_ranks()

    def put(self, name: str, content: bytes) -> None:
        """Write a file on the board for the other ranks of this node.

        Raises:
            OSError: the board cannot be written.
        """
        self._board.put(name, content)

    def get(self, name: str) -> bytes | None:
        """Read a file that a rank of this node has written on the board; else None."""
        return self._board.get(name)

    def stamp(self, name: str) -> int:
        """A number that changes when a file on the board changes; 0 if there is no file."""
        return self._board.stamp(name)

    def lead_if_vacant(self) -> None:
        """Serve if no other rank does, or if the rank that does is stopped. If this rank serves, join the states.

        Cheap enough for every tick. Called at least once a second. It waits neither for another rank nor for a
        resolver.

        Raises:
            OSError: the address cannot be listened on (raised once), or the target file cannot be written. In the
                latter case the endpoint serves nevertheless.
        """
        if self._ended:  # other ranks do not wait for an ended one: the board may be removed
            if self.endpoint is not None:
                self.endpoint.keep_page()
            return
        led, self.leads = self.leads, self._board.lead()
        if self._port is None:
            if self.leads:
                self._board.server_lock.beat()
            return
        if not self.leads:
            self._close()
            self._wait_for_announcement()
            return
        if not led:
            announced = self._board.announced_ports()
            self._before = announced if self._board.server_lock.took_over else announced[:-1]
        if self.endpoint is not None and not self.endpoint.serves:
            self._close()
        if self.endpoint is None:
            self._board.server_lock.beat()
            self._serve()
        elif self._before:
            self._return()
        self._name_endpoints()

    @property
    def port(self) -> int | None:
        """The port at which any rank serves this node's metrics; None if no rank does."""
        return self.endpoint.port if self.endpoint is not None else next(reversed(self._board.announced_ports()), None)

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds for the answers, including endpoints that were replaced."""
        endpoint = self.endpoint
        return self._closed_cpu_seconds + (endpoint.cpu_seconds if endpoint is not None else 0.0)

    def leave(self) -> None:
        """Remove this rank from the board. The last rank also removes the target file."""
        self._close()
        if self._board.leave() and self._targets is not None:
            self._targets.remove()

    def after_fork_in_child(self) -> None:
        """Close the copies of the parent's files and sockets."""
        self._abandon_all()
        self._board.forget()

    # -- the endpoint ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Listen, unless that has just failed or the name of the address is not resolved yet."""
        if self._now() < self._retry_ns:
            return
        ports = self._ports()
        try:
            if self._address is None:
                self._address = self._found()
            if self._address is None:
                return
            endpoint = self._listen(ports)
        except OSError as error:
            self._give_up(error)
            return
        self.trouble = ""
        self._pause, self._told = _FIRST_PAUSE_SECONDS, set()
        self._adopt(endpoint)
        if self._before:
            text = "the rank that serves this node does not answer; until it does, the metrics of this run are"
            self._errors.tell("endpoint", f"{text} at port {endpoint.port}")
        elif self._port not in {0, endpoint.port}:
            self._errors.tell(
                "endpoint", f"port {self._port} is taken; the metrics of this run are at port {endpoint.port}"
            )

    def _states(self) -> list[RankState]:
        """What the endpoint shows: what each rank has published, and the machine as this rank sees it."""
        return [*self._board.states(), self._machine]

    def _return(self) -> None:
        """Serve at a port where the metrics were before, once the rank that has it goes on or dies."""
        try:
            endpoint = self._listen(self._before)
        except OSError:
            return
        self._close()
        self._adopt(endpoint)
        self._errors.tell("endpoint", f"the metrics of this run are at port {endpoint.port} again")

    def _listen(self, ports: list[int]) -> Endpoint:
        assert self._new_endpoint is not None  # noqa: S101 - there are ports
        return self._new_endpoint(
            self._host,
            ports,
            self._states,
            self._node,
            CONTENT_TYPE,
            address=self._address,
            on_error=partial(self._errors.note, "endpoint"),
            alive=self._board.server_lock.beat,
        )

    def _adopt(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._before = list(takewhile(lambda port: port != endpoint.port, self._before))
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
            if self._now() - self._lookup_ns > _SLOW_LOOKUP_SECONDS * NS:
                self._tell_once(f"no metrics yet: {self.trouble}; set host to an address instead of a name")
            return None
        lookup, self._lookup = self._lookup, None
        return lookup.result()

    def _give_up(self, error: OSError) -> None:
        """Try again later, with increasing pauses.

        Raises:
            OSError: the problem and what to do about it, unless it was already reported.
        """
        self._retry_ns = self._now() + int(self._pause * NS)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        self._address = None  # a name may have another address by then
        self.trouble, remedy = explained(error, self._host, self._port or 0)
        text = f"no metrics: {self.trouble}; {remedy}. It is tried again after a while"
        if text not in self._told:
            self._told.add(text)
            raise OSError(text)

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._errors.tell("endpoint", text)

    def _close(self) -> None:
        endpoint, self.endpoint = self.endpoint, None
        if endpoint is not None:
            try:
                endpoint.close()
            finally:
                self._closed_cpu_seconds += endpoint.cpu_seconds

    def _wait_for_announcement(self) -> None:
        while self._now() < self._settled_ns and not self._board.announced_ports():
            sleep(0.002)

    def _ports(self) -> list[int]:
        """The ports at which the metrics were before come first, so that scrapes continue."""
        before = self._board.announced_ports()
        ports = range(self._port, min(65536, self._port + PORTS_TRIED)) if self._port else [0]
        return list(dict.fromkeys([*before, *ports]))

    # -- the target file ---------------------------------------------------------------------------------------

    def _name_endpoints(self) -> None:
        """Keep the announcement and the target file correct: both may be removed, or written by another rank."""
        if self.endpoint is None:
            return
        ports = [*self._before, self.endpoint.port]
        try:
            if self._board.announced_ports() != ports:
                self._board.announce(ports)
        finally:
            if self._targets is not None and self._now() - self._targets_ns >= _TARGETS_SECONDS * NS:
                self._targets_ns = self._now()
                self._targets.write(self._reachable_host(), ports)

    def _reachable_host(self) -> str:
        address = numeric(self._host)
        return self._node if address is not None and address.is_any else self._host
