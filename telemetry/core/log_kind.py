"""What the log writes for a field of a sample. A window has several samples, and one line.

A field of a sample names its kind: ``energy_joules: float = field(metadata=NEWEST)``. If it names none, a number is
averaged; of everything else the newest value is written.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

LOG_KIND: Final = "log"

MEAN: Final[Mapping[str, str]] = MappingProxyType({LOG_KIND: "mean"})
"""The mean of the samples: a state, such as a ratio or a size."""

NEWEST: Final[Mapping[str, str]] = MappingProxyType({LOG_KIND: "newest"})
"""The newest value that is known: a counter over the run, or a number whose mean makes no sense (a worker's number)."""

SKIP: Final[Mapping[str, str]] = MappingProxyType({LOG_KIND: "skip"})
"""Nothing: it grows during the run, and so would every log line."""
