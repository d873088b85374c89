"""How long a script goes on: until the agent has looked at it often enough. It imports nothing of the agent or of torch."""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_listdir, _stat, _now = os.listdir, os.stat, time.monotonic  # a script may replace them
_open, _read, _close = os.open, os.read, os.close


def looked_at(looks: int = 4, *, bare: int = 3) -> Iterator[int]:
    """Count from 0 on until the agent has looked at the training so many times; without an agent, ``bare`` numbers.

    A look is a tick: it writes a line, and asks the training thread to time more of the next steps.
    """
    folder = os.path.join(os.environ["TELEMETRY_RUN_DIR"], "logs")
    log = os.path.join(folder, *_listdir(folder)) if os.path.isdir(folder) else None
    begun = size = 0
    deadline = _now() + 60
    for number in itertools.count():
        yield number
        if log is None:
            if number + 1 == bare:
                return
            continue
        if _stat(log).st_size > size:
            file = _open(log, os.O_RDONLY)
            content = _read(file, 1 << 24)
            _close(file)
            size, written = len(content), content.count(b'"event":"window"')
            begun = begun or written + 1
            if written > begun + looks:
                return
        assert _now() < deadline, "the agent does not look"
