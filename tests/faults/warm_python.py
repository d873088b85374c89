"""Processes that have torch already. Importing it takes longer than the rest of what a rank of a small job does.

One process for each process of the tests imports it, and forks the others. For scripts that are about what a training
does, not about how its process starts.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from tests.faults.processes import HANG, Child, environment


class ForkedProcess:
    """As much of `subprocess.Popen` as `Child` uses. It is not waited for by anybody else: a killed one is a zombie.

    Args:
        server: the socket of a `WarmServer`. ``arguments``: a script's path and its arguments, as Python takes them.
        cwd, env: of the process.
        streams: files for its standard input, output and error, in that order.
    """

    def __init__(
        self, server: socket.socket, arguments: tuple[object, ...], cwd: Path, env: dict[str, str], streams: list[int]
    ) -> None:
        self._server = server
        order = {"arguments": [*map(str, arguments)], "folder": str(cwd), "environment": env}
        socket.send_fds(server, [json.dumps(order).encode()], streams)
        self.pid: int = json.loads(server.recv(64))
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
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.socket.settimeout(HANG)


_server = functools.cache(WarmServer)


class WarmChild(Child):
    """A script in a process that has torch. Otherwise like any other `Child`."""

    process: PipedProcess

    def __init__(self, *arguments: object, cwd: Path, env: dict[str, str] | None = None) -> None:
        self.stderr_path = cwd / f"stderr-{time.monotonic_ns()}.txt"
        with self.stderr_path.open("wb") as stderr:
            self.process = PipedProcess(arguments, cwd, environment() if env is None else env, stderr)


class PipedProcess(ForkedProcess):
    """One with pipes for its standard input and output."""

    def __init__(self, arguments: tuple[object, ...], cwd: Path, env: dict[str, str], stderr: IO[bytes]) -> None:
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        try:
            super().__init__(_server().socket, arguments, cwd, env, [stdin, stdout, stderr.fileno()])
        finally:
            os.close(stdin)
            os.close(stdout)
        self.stdin, self.stdout = os.fdopen(to_stdin, "w"), os.fdopen(from_stdout)


def warm_python(
    *arguments: object, cwd: Path, env: dict[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Like `processes.python`, in a process that has torch. Arguments: a script and its own, or ``-m``, a module, its own."""
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.write(stdin)
        streams = [given, out, err]
        for stream in streams:
            stream.seek(0)
        process = ForkedProcess(
            _server().socket, arguments, cwd, environment() if env is None else env, [each.fileno() for each in streams]
        )
        status = process.wait()
        for stream in streams:
            stream.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), err.read())
