"""Called by `tests.lines.planted_kinds`: the hot line is two calls down, in this file."""

from __future__ import annotations

import zlib


def prepare(data: bytes) -> int:
    """Calls the function with the hot line."""
    return _shrunk(data)


def _shrunk(data: bytes) -> int:
    small = zlib.compress(data, 6)  # hot: helper
    return len(small)
