"""The interface of a source, and the pollers that contain its failures."""

from __future__ import annotations

from typing import Final, Generic, Protocol, TypeVar

from telemetry.model.records import CollectorHealth
from telemetry.util.clock import NS, now_ns

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

_FIRST_RETRY_SECONDS: Final = 1.0
_LAST_RETRY_SECONDS: Final = 60.0
_MAX_REASON: Final = 500


class CollectorError(Exception):
    """A source has no reading. The text is the reason, for the reader of the log."""


class Collector(Protocol[T_co]):
    """One polled source. ``name`` is the value of the ``collector`` label."""

    name: str

    def read(self) -> T_co:
        """Take a reading.

        Raises:
            CollectorError: there is no reading. The text is the reason.
        """


class Poller(Generic[T]):
    """Reads a source once per tick and catches its failures.

    Attributes:
        newest: the last reading; None while the source is down, so that a stale value is never shown.
        expected: whether the last failure was a `CollectorError`, which the source raises itself.
        news: set when ``health.up`` changed in the last poll; the caller logs it.
    """

    def __init__(self, source: Collector[T]) -> None:
        self.source = source
        self.newest: T | None = None
        self.expected = True
        self.news = False
        self.health = CollectorHealth(source.name, up=None, duration_seconds=None, reason=None)
        self._retry_at_ns = 0
        self._retry_seconds = _FIRST_RETRY_SECONDS

    def poll(self) -> T | None:
        """Read the source, unless it has failed and the next retry is not due yet."""
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
        self.health = CollectorHealth(
            self.source.name, up=True, duration_seconds=(now_ns() - started) / NS, reason=None
        )
        self._retry_at_ns, self._retry_seconds = 0, _FIRST_RETRY_SECONDS
        self.newest = reading
        return reading

    def _failed(self, started: int, error: Exception) -> None:
        self.expected = isinstance(error, CollectorError)
        text = str(error) if self.expected else f"{type(error).__name__}: {error}"
        reason = text[:_MAX_REASON]
        self.news = self.health.up is not False or self.health.reason != reason
        self.newest = None
        finished = now_ns()
        self.health = CollectorHealth(
            self.source.name, up=False, duration_seconds=(finished - started) / NS, reason=reason
        )
        self._retry_at_ns = finished + int(self._retry_seconds * NS)
        self._retry_seconds = min(2 * self._retry_seconds, _LAST_RETRY_SECONDS)
