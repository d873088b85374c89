"""Tracebacks as text, to be compared. Python 3.10 cannot remove a frame of ours from one, so this removes it."""

from __future__ import annotations

import re
import sys
import traceback

FRAMES_STAY = sys.version_info < (3, 11)
"""See `telemetry.hooks.patching`."""

_OURS = re.compile(r'  File "[^"]*/telemetry/hooks/[^"]*", line .*\n    .*\n')


def traceback_of(action) -> str:
    """The traceback of what an action raises, without addresses; on Python 3.10 without our frames."""
    try:
        action()
    except BaseException:
        text = re.sub(r"\b0x[0-9a-f]+", "0x", traceback.format_exc())
        return _OURS.sub("", text) if FRAMES_STAY else text
    raise AssertionError("nothing was raised")
