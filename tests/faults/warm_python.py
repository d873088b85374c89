"""Processes that have torch, and the agent, imported. That takes longer than the rest of what a rank of a small job does.

One process for each process of the tests imports them, and forks the others. For scripts that are about what a training
does, not about how its process starts: what Python and torch read from the environment at their start, such as
``PYTHONHASHSEED`` and ``OMP_NUM_THREADS``, is that of the server.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.processes import HANG, Child, environment

if TYPE_CHECKING:
    from collections.abc import Sequence


class ForkedProcess:
    """As much of `subprocess.Popen` as the tests use. Nobody else waits for it: a killed one is a zombie.

    Args:
        arguments: a script's path and its arguments, or ``-m``, a module and its arguments.
        cwd, env: of the process.
        stdin, stdout, stderr: descriptors of files; a pipe for each that is None.
        preload: a module that the process has, beside torch; by default none.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        cwd: Path,
        env: dict[str, str] | None,
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        preload: str = "",
    ) -> None:
        self._server = running_server(preload).socket
        order = {
            "arguments": [*map(str, arguments)],
            "folder": str(cwd),
            "environment": environment() if env is None else env,
        }
        theirs: list[int] = []
        if stdin is None:
            stdin, to_stdin = os.pipe()
            theirs.append(stdin)
            self.stdin = os.fdopen(to_stdin, "w")
        if stdout is None:
            from_stdout, stdout = os.pipe()
            theirs.append(stdout)
            self.stdout = os.fdopen(from_stdout)
        if stderr is None:
            from_stderr, stderr = os.pipe()
            theirs.append(stderr)
            self.stderr = os.fdopen(from_stderr)
        try:
            socket.send_fds(self._server, [json.dumps(order).encode()], [stdin, stdout, stderr])
            self.pid: int = json.loads(self._server.recv(64))
        finally:
            for end in theirs:
                os.close(end)
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        if self._status is None and self._has_ended(0.0):
            self.wait()
        return self._status

    def wait(self, timeout: float = HANG) -> int:
        """Its exit status, once it has ended. After the time limit it and its children are killed."""
        if self._status is None:
            in_time = self._has_ended(timeout)
            if not in_time:
                os.killpg(self.pid, signal.SIGKILL)
            self._server.send(json.dumps({"wait": self.pid}).encode())
            self._status = json.loads(self._server.recv(64))
            if not in_time:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self._status

    def _has_ended(self, timeout: float) -> bool:
        """Whether it has ended, after waiting for that."""
        ended = os.pidfd_open(self.pid)  # its zombie is there until the server is told to wait for it
        try:
            return bool(select.select([ended], [], [], timeout)[0])
        finally:
            os.close(ended)


class WarmServer:
    """The process that has torch. It ends when this one does: then nobody is at the other side of its socket."""

    def __init__(self, preload: str) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = Path(__file__).with_name("warm_server.py")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(script), str(theirs.fileno()), preload],
                env=environment(OMP_NUM_THREADS="1"),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.socket.settimeout(HANG)
        assert self.socket.recv(1), "it has ended before it had imported everything"


_servers: dict[str, WarmServer] = {}


def running_server(preload: str = "") -> WarmServer:
    """This process's server that has this module, too. Starts one if none is running, which takes seconds."""
    if preload not in _servers or _servers[preload].process.poll() is not None:
        _servers[preload] = WarmServer(preload)
    return _servers[preload]


class WarmChild(Child):
    """A script in a process that has torch. Otherwise like any other `Child`."""

    def __init__(self, *arguments: object, cwd: Path, env: dict[str, str] | None = None) -> None:
        self.stderr_path = cwd / f"stderr-{time.monotonic_ns()}.txt"
        with self.stderr_path.open("wb") as stderr:
            self.process = ForkedProcess(arguments, cwd, env, stderr=stderr.fileno())


def warm_python(
    *arguments: object, cwd: Path, env: dict[str, str] | None = None, stdin: str = "", timeout: float = HANG
) -> subprocess.CompletedProcess[str]:
    """Like `processes.python`, in a process that has torch."""
    process = ForkedProcess(arguments, cwd, env)
    with ThreadPoolExecutor(2) as readers, process.stdin, process.stdout, process.stderr:
        # Read to the end: until the last of its children has closed them, too.
        outputs = [readers.submit(stream.read) for stream in (process.stdout, process.stderr)]
        process.stdin.write(stdin)
        process.stdin.close()
        status = process.wait(timeout)
        stdout, stderr = (output.result(timeout) for output in outputs)
    return subprocess.CompletedProcess(arguments, status, stdout, stderr)
