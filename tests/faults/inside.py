"""What the scripts of these tests share: they run with the agent in the same process, and wait for what it does.

It imports nothing of the agent before a function needs it: some scripts are about what is imported.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time


def until(condition, seconds: float = 60.0):
    """Poll until a condition is true. Returns its value. Ends the script after the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            sys.exit(f"line {sys._getframe(1).f_lineno}: not within the deadline")
        time.sleep(0.005)
    return value


def tell(found: object) -> None:
    """Leave something for the test: what `processes.run` returns."""
    with open("results.json", "w") as file:
        json.dump(found, file)


def fill(path, size: int = 512) -> None:
    """Make a file as large as the file system has room for, in pieces of so many bytes."""
    with open(path, "ab", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(b"x" * size):
            pass


def agent():
    """The running agent."""
    from telemetry import api

    return api._agent


def steps() -> int:
    """Training steps that the agent has counted."""
    return agent().accounting.stats.steps


def errors(source: str | None = None):
    """How often a part of the agent has failed; without a name, of each part that has."""
    counts = dict(agent().errors.counts)
    return counts if source is None else counts.get(source, 0)


def log_file():
    """The agent's log: its ``path``, and the ``dropped`` lines."""
    return agent().event_log.file


def page() -> str:
    """What a scrape of this process gets."""
    import urllib.request

    with urllib.request.urlopen(agent().metrics_url) as answer:
        return answer.read().decode()


def own_threads() -> list[str]:
    """The names of the agent's threads. The one of NVML ends by itself where there is no driver."""
    from telemetry.safety import threads

    return sorted(name for name in threads.running() if name != "telemetry-nvml")
