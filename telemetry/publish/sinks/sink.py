"""What every sink must be able to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.core.sink_item import SinkItem


class SinkWaits(Exception):  # noqa: N818 - no error: the sink has nothing to write into yet
    """There is nothing to write into yet, such as no active run. The text says what is missing."""


class Sink(Protocol):
    """One library. All methods but `forget` are called on the thread of the sinks.

    Attributes:
        name: its name, as in the setting ``sinks``.
        gather_seconds: for how long items are gathered before they are written together; 0 for not at all.
    """

    name: str
    gather_seconds: float

    def write(self, items: Sequence[SinkItem]) -> None:
        """Write some items, oldest first. If it raises, all of them are written again later.

        Raises:
            SinkWaits: there is nothing to write into yet. The items are dropped.
        """

    def close(self) -> None:
        """Write what the library still holds, and close files of ours."""

    def forget(self) -> None:
        """In a forked child: close descriptors, and write nothing."""
