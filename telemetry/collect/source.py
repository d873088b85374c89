"""What a source is, and the poller that contains it.

A source reads one thing and may fail; a poller times it, keeps its failure to itself, retries it with back-off and
says how it fares. No failure of one source is seen by another.
"""

from __future__ import annotations

from typing import Final, Generic, Protocol, TypeVar

from telemetry.clock import NS, now_ns
from telemetry.records import SourceHealth

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

_FIRST_RETRY_SECONDS: Final = 1.0
_LAST_RETRY_SECONDS: Final = 60.0
_MAX_REASON: Final = 500


class SourceError(Exception):
    """A source has no reading; the text says why, for the person who reads the log."""


class Source(Protocol[T_co]):
    """One polled source. ``name`` is the value of the ``collector`` label."""

    name: str

    def read(self) -> T_co:
        """One reading.

        Raises:
            SourceError: there is none, and why.
        """

    def close(self) -> None:
        """Give back what the source holds. Must not block."""


class Poller(Generic[T]):
    """Reads a source once a tick, contained.

    Attributes:
        newest: the last reading; None while the source is down, so that a stale value is never shown.
        expected: whether the last failure was one the source knows of (`SourceError`).
        news: set when ``health.up`` changed in the last poll; the caller logs it.
    """

    def __init__(self, source: Source[T]) -> None:
        self.source = source
        self.newest: T | None = None
        self.failures = 0
        self.expected = True
        self.news = False
        self.health = SourceHealth(source.name, up=None, duration_seconds=None, reason=None)
        self._retry_at_ns = 0
        self._retry_seconds = _FIRST_RETRY_SECONDS

    def poll(self) -> T | None:
        """Read the source, unless it failed and its time to be retried has not come."""
        self.news = False
        started = now_ns()
        if started < self._retry_at_ns:
            return None
        try:
            reading = self.source.read()
        except Exception as error:
            self._failed(started, error)
            return None
        self.news = self.health.up is not True
        self.health = SourceHealth(self.source.name, up=True, duration_seconds=(now_ns() - started) / NS, reason=None)
        self._retry_at_ns, self._retry_seconds = 0, _FIRST_RETRY_SECONDS
        self.newest = reading
        return reading

    def close(self) -> None:
        """Close the source, contained."""
        try:
            self.source.close()
        except Exception:
            self.failures += 1

    def _failed(self, started: int, error: Exception) -> None:
        self.expected = isinstance(error, SourceError)
        text = str(error) if self.expected else f"{type(error).__name__}: {error}"
        reason = text[:_MAX_REASON]
        self.news = self.health.up is not False or self.health.reason != reason
        self.failures += 1
        self.newest = None
        finished = now_ns()
        self.health = SourceHealth(
            self.source.name, up=False, duration_seconds=(finished - started) / NS, reason=reason
        )
        self._retry_at_ns = finished + int(self._retry_seconds * NS)
        self._retry_seconds = min(2 * self._retry_seconds, _LAST_RETRY_SECONDS)
