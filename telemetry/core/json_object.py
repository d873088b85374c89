"""Small JSON objects, as ranks and processes exchange them through files."""

from __future__ import annotations

import json
from typing import Any


def parse_object(content: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None if the content is anything else, such as a line that is cut off."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def dump_object(value: dict[str, Any], *, indent: int | None = None) -> bytes:
    """A JSON object as bytes, with a line break at its end.

    Args:
        value: plain values.
        indent: spaces of each level, for a file that people read; None for one line.
    """
    return json.dumps(value, indent=indent).encode() + b"\n"
