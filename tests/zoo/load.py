"""Load of the machine by other processes during a run. On a busy machine an unexpected cause may be the true one."""

from __future__ import annotations

import os
import re
import resource
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    busy: float
    stolen: float
    pressed: float | None
    ours: float


class Load:
    """The load since this object was made, see `since`."""

    def __init__(self) -> None:
        self._start = _read()

    def since(self) -> dict[str, float]:
        """Since this was made: mean cores used by others, and the shares of the time stolen and under CPU pressure."""
        before, after = self._start, _read()
        passed = max(after.at - before.at, 1e-9)
        busy = (after.busy - before.busy - (after.ours - before.ours)) / passed
        said = {
            "others_cores": round(max(0.0, busy), 2),
            "stolen_ratio": round((after.stolen - before.stolen) / passed / (os.cpu_count() or 1), 3),
            "load_average": round(os.getloadavg()[0], 2),
        }
        if before.pressed is not None and after.pressed is not None:
            said["cpu_pressure_ratio"] = round((after.pressed - before.pressed) / passed, 3)
        return said


def _read() -> _Reading:
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _wait, irq, soft, steal = map(
        int, Path("/proc/stat").read_text(encoding="ascii").split()[1:9]
    )
    pressed = None
    with suppress(OSError):
        found = re.search(r"some .*total=(\d+)", Path("/proc/pressure/cpu").read_text(encoding="ascii"))
        pressed = int(found[1]) / 1e6 if found else None
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return _Reading(
        at=time.monotonic(),
        busy=(user + nice + system + irq + soft) / ticks,
        stolen=steal / ticks,
        pressed=pressed,
        ours=sum(usage.ru_utime + usage.ru_stime for usage in own),
    )
