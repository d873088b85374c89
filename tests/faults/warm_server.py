"""Has torch and the agent imported, and forks a process for each script that it is told of: see `warm_python`.

    python warm_server.py FD [MODULE]

It imports the module, too. It sends one byte when it has imported everything. A message at the socket is ``{"arguments", "folder", "environment"}``
with three descriptors, answered by a pid, or ``{"wait": pid}``, answered by the exit status.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import types
from pathlib import Path

import torch.distributed  # noqa: F401 - what takes long

import telemetry.agent.agent  # noqa: F401 - and what takes a quarter of a second

LARGEST_MESSAGE = 1 << 18


def serve(requests: socket.socket) -> dict:
    """Answer until the other side is gone. In a process that it has forked: returns what that is to run."""
    requests.send(b"!")
    while True:
        content, streams, _, _ = socket.recv_fds(requests, LARGEST_MESSAGE, 3)
        if not content:
            sys.exit()
        order = json.loads(content)
        if "wait" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                requests.close()
                os.setpgid(0, 0)
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                    os.close(stream)
                return order
            with contextlib.suppress(PermissionError, ProcessLookupError):  # it has done so, and has ended perhaps
                os.setpgid(answer, answer)  # the caller may kill the group right after the reply
            for stream in streams:
                os.close(stream)
        requests.send(json.dumps(answer).encode())


def become(order: dict) -> None:
    """Run a script as Python would, or a module after ``-m``."""
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    first, *rest = order["arguments"]
    if first == "-m":
        sys.argv, sys.path[0] = rest, order["folder"]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv, sys.path[0] = [first, *rest], str(Path(first).parent)
    main = types.ModuleType("__main__")
    main.__file__ = first
    sys.modules["__main__"] = main
    exec(compile(Path(first).read_bytes(), first, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    for name in filter(None, sys.argv[2:]):
        importlib.import_module(name)
    gc.freeze()  # a collection does not go through what torch has brought, so its pages stay shared
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
