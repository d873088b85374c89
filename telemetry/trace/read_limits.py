"""The limits for reading a trace file, and the errors if it cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MIB: Final = 1 << 20


class TraceError(Exception):
    """A file cannot be read as a trace; the text says what is wrong, where, and what to do."""


class NoTraceError(TraceError):
    """The file is valid JSON, but not a trace."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits for one file. They bound the memory that a hostile file can take.

    Attributes:
        max_bytes: size of the file, uncompressed.
        max_ratio: uncompressed bytes per compressed byte. Real traces reach 30, a gzip bomb 1,000.
        max_depth: nesting of brackets, when events are read one by one. Otherwise the parser's limit of 1,024 holds.
        max_event_bytes: size of one event, and of one value beside the events.
        max_events: how many events are kept. A trace of 540,000 events took 130 MiB to analyse.
        max_name_bytes: size of all distinct names together.
    """

    max_bytes: int = 4096 * _MIB
    max_ratio: float = 250.0
    max_depth: int = 64
    max_event_bytes: int = 16 * _MIB
    max_events: int = 5_000_000
    max_name_bytes: int = 64 * _MIB
