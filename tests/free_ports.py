"""Ports for servers of the tests."""

from __future__ import annotations

import os
import socket

FIRST_PORT, LAST_PORT = 10_000, 29_000
"""Below the ports that the kernel gives to a process that asks for any port: some of ours are used minutes later."""

_next_port = FIRST_PORT + os.getpid() % 90 * 200  # each process of the tests begins somewhere else


def free_ports(count: int = 1) -> int:
    """The first of ``count`` consecutive ports that nobody uses now. No port is returned twice until all had their turn."""
    global _next_port
    while True:
        first, _next_port = _next_port, _next_port + count
        if _next_port > LAST_PORT:
            _next_port = FIRST_PORT
        elif all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
