"""The URL of this node's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from telemetry.config import Config
    from telemetry.publish.node import NodeService

_EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to


class EndpointAddress:
    """Follows the endpoint: another rank of the node may serve it, and on another port than was asked for.

    Attributes:
        node: the rank's part in the endpoint. It serves, or knows which rank does; None without a board.
    """

    def __init__(self, config: Config, node_name: str) -> None:
        self._host = config.host
        self._off = config.port is None
        self._node_name = node_name
        self.node: NodeService | None = None

    @property
    def url(self) -> str | None:
        """The URL of the metrics; None without an endpoint, or before any rank serves it."""
        port = None if self.node is None or self._off else self.node.port
        if port is None:
            return None
        host = self._host
        shown = self._node_name if host in _EVERYWHERE else f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}/metrics"
