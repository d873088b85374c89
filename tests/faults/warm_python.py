"""Processes that have torch already. Importing it takes longer than the rest of what a rank of a small job does.

One process for each process of the tests imports it, and forks the ranks. For scripts that are about what ranks do, not
about how a process starts or ends.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.processes import HANG, Child, environment


class ForkedProcess:
    """As much of `subprocess.Popen` as `Child` uses. It is not waited for by anybody else: a killed one is a zombie."""

    def __init__(self, server: socket.socket, order: dict, stderr) -> None:
        self._server = server
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        try:
            socket.send_fds(server, [json.dumps(order).encode()], [stdin, stdout, stderr.fileno()])
            self.pid: int = json.loads(server.recv(64))
        finally:
            os.close(stdin)
            os.close(stdout)
        self.stdin, self.stdout = os.fdopen(to_stdin, "w"), os.fdopen(from_stdout)
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended."""
        if self._status is None:
            self._server.send(json.dumps({"wait": self.pid}).encode())
            self._status = json.loads(self._server.recv(64))
        return self._status


class WarmServer:
    """The process that has torch. It ends when this one does: then nobody is at the other side of its socket."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = Path(__file__).with_name("warm_server.py")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(theirs.fileno())],
                env=environment(OMP_NUM_THREADS="1"),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.socket.settimeout(HANG)


_server = functools.cache(WarmServer)


class WarmChild(Child):
    """A script in a process that has torch. Otherwise like any other `Child`."""

    def __init__(self, script: Path, *arguments: object, cwd: Path, env: dict[str, str]) -> None:
        self.stderr_path = cwd / f"stderr-{time.monotonic_ns()}.txt"
        order = {
            "script": str(script),
            "arguments": [*map(str, arguments)],
            "folder": str(cwd),
            "environment": env,
        }
        with self.stderr_path.open("wb") as stderr:
            self.process = ForkedProcess(_server().socket, order, stderr)
