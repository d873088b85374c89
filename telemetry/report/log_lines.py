"""The lines of a log file and the heartbeat of a process, read and checked. Both may be damaged or still be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from telemetry.report.log_schema import HEARTBEAT, checked, checked_fields
from telemetry.util.clock import iso_time
from telemetry.util.files import parse_object, read_small

if TYPE_CHECKING:
    from pathlib import Path


def parsed(raw: bytes) -> tuple[dict[str, Any] | None, int] | None:
    """A line of a log; None if it is empty or no object.

    Returns:
        Its fields, None if it cannot be read; and how many were left out because of a wrong type.
    """
    try:
        line = orjson.loads(raw)
    except ValueError:
        return (None, 0) if raw.strip() else None
    if not isinstance(line, dict):
        return None
    sound, wrong = checked(line)
    return sound, len(wrong)


def heartbeat(folder: Path, life: str) -> dict[str, Any] | None:
    """The newest heartbeat of a process, with its ``time`` as in a log line; None without a sound one.

    Args:
        folder: ``attempts`` in the run folder.
        life: tells the process from others.
    """
    try:
        found = parse_object(read_small(folder / f"{life}.beat")) or {}
    except OSError:
        return None
    beat, _wrong = checked_fields(found, HEARTBEAT)
    if beat.get("life") != life or not beat.keys() >= {"unix_seconds", "ledger_total_seconds", "wall_seconds"}:
        return None
    return beat | {"time": iso_time(beat["unix_seconds"])}
