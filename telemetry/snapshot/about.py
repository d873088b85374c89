"""What a snapshot says of itself, so that it can be laid over the logs.

Each rank writes its part, and then puts all parts that are there together into ``snapshot.json``. Whoever writes it
looks again afterwards: a part that came in between is put in, by one of the two or by both.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from telemetry.snapshot.folder import Folder, open_folder

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.snapshot.plan import Plan

ABOUT: Final = "about"
DESCRIPTION: Final = "snapshot.json"
_MOST_TURNS: Final = 8


def describe(snapshots: Path, plan: Plan, part: dict[str, Any]) -> None:
    """Add a rank's part to the description of a snapshot.

    Args:
        snapshots: the folder ``RUN_DIR/snapshots``.
        plan: of the snapshot.
        part: JSON values; ``rank``, ``started`` and ``ended`` (ISO-8601) among them.

    Raises:
        OSError: it cannot be written.
    """
    with open_folder(snapshots) as root, root.sub(plan.folder) as folder, folder.sub(ABOUT, make=True) as about:
        about.write(f"rank-{part['rank']}.json", _dump(part))
        seen: list[str] = []
        for _ in range(_MOST_TURNS):
            names = _parts(about)
            if names == seen:
                return
            about.write(DESCRIPTION, _dump(_whole(plan, [_load(about, name) for name in names])))
            seen = names


def _whole(plan: Plan, parts: list[dict[str, Any]]) -> dict[str, Any]:
    parts = sorted((part for part in parts if part), key=lambda part: int(part["rank"]))
    request = plan.request
    begun, over = [str(part["started"]) for part in parts], [str(part["ended"]) for part in parts]
    return {
        "id": request.id,
        "reason": request.reason,
        "kind": request.kind,
        "asked_by": request.asked_by,
        "stall": request.stall,
        "first_step": plan.first_step,
        "last_step": plan.last_step,
        "ranks_expected": list(plan.ranks),
        "log_from": min(begun, default=None),
        "log_until": max(over, default=None),
        # ISO-8601 in one form sorts as text. Ranks that count their steps differently record at different times.
        "together": not parts or max(begun) <= min(over),
        "ranks": parts,
    }


def _parts(about: Folder) -> list[str]:
    return [name for name in about.names() if name.startswith("rank-") and name.endswith(".json")]


def _load(about: Folder, name: str) -> dict[str, Any]:
    try:
        part = json.loads(about.read(name))
    except (OSError, ValueError):
        return {}
    usable = isinstance(part, dict) and isinstance(part.get("rank"), int) and "started" in part and "ended" in part
    return part if usable else {}


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"
