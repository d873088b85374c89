"""A fleet of endpoints in one process: nodes of simulated ranks at one loopback port, each at its own path.

Started by `benchmarks.fleet`. Prints its port, and serves until it is terminated.
"""

from __future__ import annotations

import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

from benchmarks.fleet_ranks import Node, fleet

if TYPE_CHECKING:
    from benchmarks.fleet_ranks import SimulatedRank

AGE_SECONDS: Final = 3600.0
"""Age of the runs when they are first scraped."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, nodes: list[list[SimulatedRank]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.nodes = {f"/{ranks[0].node}/metrics": Node(ranks) for ranks in nodes}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if a scraper disconnects."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # Prometheus keeps its connections
    server: _Server

    def do_GET(self) -> None:
        node = self.server.nodes.get(self.path)
        if node is None:
            self.send_error(404)
            return
        now = time.time()
        body = node.expose(rank.view(now) for rank in node.ranks)
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        del format, args


def main(argv: list[str]) -> None:
    """Serve ``ranks`` simulated ranks."""
    ranks, ranks_per_node = map(int, argv)
    server = _Server(fleet(ranks, ranks_per_node, time.time() - AGE_SECONDS))
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
