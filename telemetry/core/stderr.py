"""Writes the few lines of the agent to the training's stderr."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any


def say(text: str) -> bool:
    """Write one line to stderr immediately or not at all. Never blocks, never raises, leaves nothing in a buffer.

    Python writes its buffer again when it exits. On a full disk that fails, and Python exits with status 120. So the
    line is written directly to the descriptor. A ``sys.stderr`` that is not a file of Python's own, as in a notebook,
    gets the line as text.

    Args:
        text: one line; characters that cannot be printed are shown as ``?``.

    Returns:
        Whether it was written.
    """
    line = "".join(c if c.isprintable() else "?" for c in text) + "\n"
    stream: Any = sys.stderr
    if stream is None:
        return False
    try:
        number = stream.fileno() if isinstance(stream, io.TextIOWrapper) else None
    except (OSError, ValueError):  # a buffer in memory, or closed
        number = None
    try:
        if number is not None:
            return _write(stream, number, line.encode(stream.encoding or "utf-8", "backslashreplace"))
        stream.write(line)
        stream.flush()
    except Exception:
        return False
    return True


def _write(stream: Any, number: int, line: bytes) -> bool:
    # A pipe that nobody reads would block, and one whose reader is gone may end the process (SIGPIPE).
    ready = select.poll()
    ready.register(number, select.POLLOUT)
    if [state for _, state in ready.poll(0)] != [select.POLLOUT]:
        return False
    stream.flush()  # first what the script has already written
    return os.write(number, line) == len(line)
