"""What a child has of the agent: for scripts that fork, and for the workers that a loader starts."""

from __future__ import annotations

import json
import os
import sys
import threading


def descriptors() -> list[str]:
    """What the open ones are."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    return found


def sockets(column: int, wanted: str) -> list[str]:
    """Descriptors of TCP sockets, by the text at the end of a column of the kernel's table: 3 has the state."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            inodes |= {line.split()[9] for line in list(file)[1:] if line.split()[column].endswith(wanted)}
    return [where for where in descriptors() if where.startswith("socket:[") and where[8:-1] in inodes]


def look() -> dict:
    """Threads of the agent, by Python and by the kernel; its sockets and files; and whether it is thought to run."""
    own, api = sys.modules.get("telemetry.safety.threads"), sys.modules.get("telemetry.api")
    names = [thread.name for thread in threading.enumerate()] + (own.running() if own else [])
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as comm:
            names.append(comm.read().strip())
    return {
        "pid": os.getpid(),
        "threads": [name for name in names if "telemetry" in name],
        "listening": sockets(3, "0A"),
        # But for a folder that the agent was reading just when it was forked: nobody can close that for it.
        "ours": [w for w in descriptors() if ("torch-telemetry" in w or w.endswith(".jsonl")) and not os.path.isdir(w)],
        "running": bool(api and api._agent and api._agent.running),
        "finders": [type(finder).__module__ for finder in sys.meta_path if "telemetry" in type(finder).__module__],
    }


NOTHING = {"threads": [], "listening": [], "ours": [], "running": False, "finders": []}


def in_child(body, seconds=60):
    """Fork; what body() returns in the child, or what went wrong there."""
    import select
    import signal
    import traceback

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = body()
        except BaseException:
            answer = {"error": traceback.format_exc()}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    if not select.select([read], [], [], seconds)[0]:
        os.kill(pid, signal.SIGABRT)
        os.waitpid(pid, 0)
        return {"error": "the child hangs"}
    with os.fdopen(read, "rb") as file:
        answer = json.loads(file.read())
    os.waitpid(pid, 0)
    return answer
