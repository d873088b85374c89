"""Scripts that show what a forked child has of the agent."""

from __future__ import annotations

# What a child can report: the agent's threads, its sockets and files in the child, and what the hooks would do.
LOOK = '''
import json, os, sys, threading


def fds():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass
    return found


def listening():
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            inodes |= {line.split()[9] for line in list(file)[1:] if line.split()[3] == "0A"}
    return [where for where in fds().values() if where.startswith("socket:[") and where[8:-1] in inodes]


def threads():
    own = sys.modules.get("telemetry.util.threads")
    names = [thread.name for thread in threading.enumerate()] + (own.running() if own else [])
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as comm:
            names.append(comm.read().strip())
    return [name for name in names if "telemetry" in name]


def look():
    api = sys.modules.get("telemetry.api")
    agent = api and api._agent
    return {
        "pid": os.getpid(),
        "threads": threads(),
        "listening": listening(),
        # But for a folder that the agent was reading just when it was forked: nobody can close that for it.
        "ours": [w for w in fds().values() if ("torch-telemetry" in w or w.endswith(".jsonl")) and not os.path.isdir(w)],
        "running": bool(agent and agent.running),
        "inactive": type(api.start("never")).__name__ if api else None,
        "finders": [type(finder).__module__ for finder in sys.meta_path if "telemetry" in type(finder).__module__],
    }


def in_child(body, seconds=60):
    """Fork; what body() returns in the child, or what went wrong there."""
    import select, signal, traceback
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
    ready, _, _ = select.select([read], [], [], seconds)
    if not ready:
        os.kill(pid, signal.SIGABRT)
        os.waitpid(pid, 0)
        return {"error": "the child hangs"}
    with os.fdopen(read, "rb") as file:
        answer = json.loads(file.read())
    os.waitpid(pid, 0)
    return answer
'''
