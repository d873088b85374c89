"""``python adopt.py COMMAND…``: run the command and adopt processes that outlive their parent.

The workers of a fork server are not children of the run. When the fork server ends, init would adopt them, and their
CPU time would be counted as that of other processes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from typing import Final

_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
_ORPHANS_SECONDS: Final = 5.0


def main() -> int:
    """Returns the exit status of the command, as a shell would."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    code = subprocess.run(sys.argv[1:], check=False).returncode
    deadline = time.monotonic() + _ORPHANS_SECONDS
    while _orphans_live() and time.monotonic() < deadline:
        time.sleep(0.01)
    return code if code >= 0 else 128 - code


def _orphans_live() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
