"""The manifest of a snapshot, ``snapshot.json``: why it was taken, which steps it has, and where they are in the logs.

Each rank writes its part to a file of its own. Then it combines all parts that are there into the manifest, and checks
afterwards for parts that were added meanwhile. So the manifest is complete whichever rank writes it last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from telemetry.snapshot.private_folder import Folder, open_folder
from telemetry.util.files import dump_object, parse_object

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.snapshot.protocol import Plan

MANIFEST_FOLDER: Final = "about"
MANIFEST: Final = "snapshot.json"
_MAX_ATTEMPTS: Final = 8


def add_to_manifest(snapshots: Path, plan: Plan, part: dict[str, Any]) -> None:
    """Add a rank's part to the manifest of a snapshot.

    Args:
        snapshots: the folder ``RUN_DIR/snapshots``.
        plan: the plan of the snapshot.
        part: JSON values, with at least ``rank``, ``started`` and ``ended`` (ISO-8601).

    Raises:
        OSError: it cannot be written.
    """
    with (
        open_folder(snapshots) as root,
        root.sub(plan.folder) as snapshot,
        snapshot.sub(MANIFEST_FOLDER, make=True) as folder,
    ):
        folder.write(f"rank-{part['rank']}.json", dump_object(part, indent=1))
        written: list[str] = []
        for _ in range(_MAX_ATTEMPTS):
            names = _part_names(folder)
            if names == written:
                return
            manifest = _manifest(plan, [_read_part(folder, name) for name in names])
            folder.write(MANIFEST, dump_object(manifest, indent=1))
            written = names


def _manifest(plan: Plan, parts: list[dict[str, Any]]) -> dict[str, Any]:
    parts = sorted((part for part in parts if part), key=lambda part: int(part["rank"]))
    request = plan.request
    started, ended = [str(part["started"]) for part in parts], [str(part["ended"]) for part in parts]
    return {
        "id": request.id,
        "reason": request.reason,
        "kind": request.kind,
        "asked_by": request.asked_by,
        "stall": request.stall,
        "first_step": plan.first_step,
        "last_step": plan.last_step,
        "ranks_expected": list(plan.ranks),
        "log_from": min(started, default=None),
        "log_until": max(ended, default=None),
        # ISO-8601 in one form sorts as text. Ranks that count their steps differently record at different times.
        "together": not parts or max(started) <= min(ended),
        "ranks": parts,
    }


def _part_names(folder: Folder) -> list[str]:
    return [name for name in folder.names() if name.startswith("rank-") and name.endswith(".json")]


def _read_part(folder: Folder, name: str) -> dict[str, Any]:
    """A rank's part; empty where it cannot be read or has not all fields."""
    try:
        part = parse_object(folder.read(name)) or {}
    except OSError:
        return {}
    return part if isinstance(part.get("rank"), int) and "started" in part and "ended" in part else {}
