"""One port per node: the ranks of a run agree through the board on who serves, and the next takes over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from telemetry.clock import NS, now_ns
from telemetry.publish.endpoint import Endpoint, abandon_all
from telemetry.publish.exposition import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.publish.board import Board
    from telemetry.publish.discovery import TargetFile
    from telemetry.records import RankPace

PORTS_TRIED: Final = 64
"""A job that finds the port taken tries so many above it."""

_ANNOUNCED_SECONDS: Final = 0.2
"""Ranks start together: one that does not serve waits so long for the one that does to say where."""


class NodeService:
    """This rank's part in serving its node.

    Args:
        board: of this run on this node.
        targets: the file that names the endpoint; None for none.
        host: address to listen on.
        port: the setting; None for off, 0 for any.
        node: this machine's name.
        notice: told, in words, of what a person should know.
    """

    def __init__(
        self,
        board: Board,
        targets: TargetFile | None,
        *,
        host: str,
        port: int | None,
        node: str,
        notice: Callable[[str], None],
    ) -> None:
        self._board = board
        self._targets = targets
        self._host = host
        self._port = port
        self._node = node
        self._notice = notice
        self._settled_ns = now_ns() + int(_ANNOUNCED_SECONDS * NS)
        self._ended = False
        self.endpoint: Endpoint | None = None

    def publish(
        self, rank: int, families: list[tuple[bytes, bytes]], *, pace: RankPace | None = None, ended: bool
    ) -> None:
        """Put this rank's families, and its pace, on the board.

        Raises:
            OSError: the board cannot be written.
        """
        self._ended = ended
        self._board.publish(rank, families, pace=pace, ended=ended)

    def rank_for(self, claimed: int, *, told: bool, world_size: int) -> int:
        """The rank under which this process is to be shown, see `Board.rank_for`."""
        return self._board.rank_for(claimed, told=told, world_size=world_size)

    def move(self, before: int, rank: int) -> None:
        """This process is shown under another rank from now on.

        Raises:
            OSError: the board cannot be written.
        """
        self._board.move(before, rank)

    def paces(self, but: int) -> tuple[RankPace, ...]:
        """How the other ranks of this node get on; ``but`` is one's own rank."""
        return self._board.paces(but)

    def lead_if_vacant(self) -> None:
        """Serve, if nobody does; and if it is this rank that does, join what the others have published by now.

        Cheap enough for every tick; called at least once a second.

        Raises:
            OSError: no port can be had, or the target file cannot be written (the endpoint then serves all the same).
        """
        if self.endpoint is not None and self.endpoint.serves:
            self.endpoint.refresh()
            return
        self._close()  # who closed its socket will have closed the lock as well: it is to be won anew
        if self._port is None or self._ended:
            return  # and who has ended is no more waited for: the board may be gone
        if not self._board.try_lead():
            self._wait_for_announcement()
            return
        endpoint = Endpoint(self._host, self._ports(), self._board.states, self._node, CONTENT_TYPE)
        self.endpoint = endpoint
        self._board.announce(endpoint.port)
        if self._port not in {0, endpoint.port}:
            self._notice(f"port {self._port} is taken; the metrics of this run are at port {endpoint.port}")
        if self._targets is not None:
            self._targets.write(self._reachable_host(), endpoint.port)

    @property
    def port(self) -> int | None:
        """The port at which this node's metrics are served, by whichever rank; None if by none."""
        return self.endpoint.port if self.endpoint is not None else self._board.announced_port()

    def leave(self) -> None:
        """Take this rank off the board. The last one takes the target file along."""
        self._close()
        if self._board.leave() and self._targets is not None:
            self._targets.remove()

    def _close(self) -> None:
        endpoint, self.endpoint = self.endpoint, None
        if endpoint is not None:
            endpoint.close()

    def after_fork_in_child(self) -> None:
        """Close what is the parent's."""
        abandon_all()
        self._board.forget()

    def _wait_for_announcement(self) -> None:
        while now_ns() < self._settled_ns and self._board.announced_port() is None:
            time.sleep(0.002)

    def _ports(self) -> list[int]:
        ports = list(range(self._port, min(65536, self._port + PORTS_TRIED))) if self._port else [0]
        before = self._board.announced_port()  # where the one before us served: the scrape goes on there
        return [before, *(port for port in ports if port != before)] if before is not None else ports

    def _reachable_host(self) -> str:
        return self._node if self._host in {"0.0.0.0", "::", ""} else self._host  # noqa: S104 - a comparison
