"""What a trace file may cost to read, and the error when one cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MIB: Final = 1 << 20


class TraceError(Exception):
    """A file cannot be read as a trace; the text says what is wrong, where, and what to do."""


class NoTraceError(TraceError):
    """The file is sound JSON, but no trace."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps on one file. A hostile one is refused with memory bounded by them.

    Attributes:
        max_bytes: of the file, uncompressed.
        max_ratio: uncompressed bytes to compressed ones. Real traces reach 30; a gzip bomb 1,000.
        max_depth: brackets within brackets, where events have to be read one by one; elsewhere the parser's own
            limit of 1,024 holds.
        max_event_bytes: of one event, and of one value of the file's head.
        max_events: that are kept: a trace of 540,000 took 130 MiB to analyse.
        max_name_bytes: of all distinct names together.
    """

    max_bytes: int = 4096 * _MIB
    max_ratio: float = 250.0
    max_depth: int = 64
    max_event_bytes: int = 16 * _MIB
    max_events: int = 5_000_000
    max_name_bytes: int = 64 * _MIB
