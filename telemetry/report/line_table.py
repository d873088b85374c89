"""The lines that a stall spent its time in, with their source text."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from telemetry.util.files import open_regular
from telemetry.util.text import one_line, percent, shortened, table

_MAX_FILE_BYTES: Final = 1 << 22
_MAX_TEXT: Final = 60
_OF: Final = {
    "fetch": "of the time in fetches",
    "wait": "of the waits for batches",
    "sampler": "of the time in the sampler",
    "step": "of the time in steps",
    "checkpoint": "of the time in checkpoints",
}


def line_table(stall: dict[str, Any]) -> list[str]:
    """A heading, and a row for each line. Empty if no lines are known.

    Args:
        stall: an entry of ``stalls``, as `summarize` returns it.
    """
    lines = stall["evidence"].get("lines")
    if not lines:
        return []
    rows = [
        [
            percent(line["share_ratio"]),
            f"{line['file'].rpartition(os.sep)[2]}:{line['line']}",
            str(line["function"] or "-"),
            str(line["calls"] or "-"),
            _source(line["file"], line["line"], stall["opened"]) or "-",
        ]
        for line in lines
    ]
    of = _OF.get(stall["evidence"].get("lines_of", ""), "of the time")
    shown = table([of, "line", "in", "calls"], [row[:4] for row in rows])
    texts = ["source", *(row[4] for row in rows)]  # aligned to the left, so it is no column of the table
    return [f"  {line}  {text}" for line, text in zip(shown, texts, strict=True)]


def _source(file: str, line: int, opened: str) -> str | None:
    """The text of a line; None if the file is not there or was changed after the stall had opened."""
    path = Path(file)
    if path.suffix != ".py" or not path.is_absolute():
        return None
    try:
        if path.stat().st_mtime > datetime.fromisoformat(opened.replace("Z", "+00:00")).timestamp():
            return None
        found = open_regular(path)
        if found is None:
            return None
        with found:
            content = found.read(_MAX_FILE_BYTES)
    except (OSError, ValueError):
        return None
    lines = content.decode("utf-8", "replace").splitlines()
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return shortened(one_line(text), _MAX_TEXT) or None
