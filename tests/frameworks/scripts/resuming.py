"""What the scripts share that are started twice: the first attempt raises in step ten, the second one goes on.

The checkpoint is of step eight. The second attempt ends after sixteen steps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

SAVED, FAILS, LAST = 8, 10, 16
STEP_SECONDS = 0.05
FOLDER = Path(sys.argv[1])
AGAIN = (FOLDER / "resume").exists()


def trains(step: int) -> None:
    """In step ``step`` of the whole training, from 1."""
    time.sleep(STEP_SECONDS)
    if step == FAILS and not AGAIN:
        (FOLDER / "resume").touch()
        raise ValueError("as told")
