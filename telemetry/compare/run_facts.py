"""What is recorded of a run besides its pace: size, settings and environment, and where two runs differ in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.report.process_log import ProcessLog

_HEAD: Final[tuple[str, ...]] = ("world_size", "launcher", "telemetry_version", "python_version", "cpu_count")
_NOT_COMPARED: Final = frozenset({"loader_used_again"})
"""Of the loader's settings: this tells what has happened, not what was set."""

SAME_STEP: Final = ("world_size", "batch_size")
"""A step is another amount of work where these differ."""

_MAX_NAMED: Final = 8


def facts_of(processes: Sequence[ProcessLog]) -> dict[str, Any]:
    """By name: what all ranks of a run say, in one text where they differ. What nothing tells is missing."""
    named: dict[str, list[Any]] = {}
    for process in processes:
        told = {name: process.head[name] for name in _HEAD if name in process.head}
        told["node"] = process.head.get("node")
        told |= process.environment
        told |= {name: value for name, value in process.loader.items() if name not in _NOT_COMPARED}
        for name, value in told.items():
            if value is not None and value not in named.setdefault(name, []):
                named[name].append(value)
    return {name: _one(values) for name, values in named.items() if values}


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where two runs differ: ``{"what", "a", "b"}``, what makes a step another amount of work first.

    What is known of one run alone is left out: an older version may not have recorded it.
    """
    both = [name for name in a if name in b and a[name] != b[name]]
    both.sort(key=lambda name: (name not in SAME_STEP, name))
    return [{"what": name, "a": a[name], "b": b[name]} for name in both]


def _one(values: Sequence[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    texts = sorted(map(str, values))
    more = f" and {len(texts) - _MAX_NAMED} more" if len(texts) > _MAX_NAMED else ""
    return ", ".join(texts[:_MAX_NAMED]) + more
