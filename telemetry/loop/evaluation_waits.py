"""The waits of evaluations for their own loaders, from the spans in the ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from telemetry.seams.batches import BatchMark
from telemetry.seams.loaders import BatchSource, LoaderHandle
from telemetry.seams.ring import BEGINS, S_EVALUATION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.model.records import LoaderSettings
    from telemetry.seams.ring import Entry


@dataclass(slots=True)
class LoaderWaits:
    """The waits of evaluations for loaders with the same settings.

    Attributes:
        kind, settings: as of a `BatchSource`.
        batch_size: samples of a batch; None if unknown, as it is without workers.
        batches, wait_ns: batches, and the waits for them.
        iterations, start_ns: iterations that have begun. With workers, their starts and ends, and the waits for their
            first batches.
    """

    kind: str
    settings: LoaderSettings
    batch_size: int | None = None
    batches: int = 0
    wait_ns: int = 0
    iterations: int = 0
    start_ns: int = 0


class EvaluationWaits:
    """Adds up the waits of evaluations for their own loaders, by settings and batch size. Used on the agent thread."""

    def __init__(self) -> None:
        self.loaders: dict[tuple[object, ...], LoaderWaits] = {}
        self._newest: LoaderWaits | None = None
        self._begun_ns = 0  # time of an iteration's start, until its first batch shows which loader it is
        self._begins = False

    def fold(self, entries: Sequence[Entry]) -> None:
        """Count entries of the ring in their order."""
        for start, end, code, source in entries:
            if code & 7 != S_EVALUATION or end <= start:
                continue
            if code >> 3 & 7 != S_EVALUATION:  # the request that ended the iteration
                if self._newest is not None and self._newest.settings.get("num_workers"):
                    self._newest.start_ns += end - start
            elif source is None or code & BEGINS:
                self._begun_ns, self._begins = self._begun_ns + end - start, True
            else:
                self._batch(end - start, source.source if isinstance(source, BatchMark) else source)

    @property
    def costliest(self) -> LoaderWaits | None:
        """The loader that evaluations wait for most; None before the first batch."""
        return max(self.loaders.values(), key=lambda each: each.wait_ns + each.start_ns, default=None)

    def _batch(self, ns: int, source: object) -> None:
        if not isinstance(source, BatchSource):
            return
        kind, settings = source.kind, source.settings
        size = source.traits.batch_size if isinstance(source, LoaderHandle) else None
        key = kind, settings.get("num_workers"), settings.get("persistent_workers"), size
        found = self._newest = self.loaders.setdefault(key, LoaderWaits(kind, settings, size))
        begins, begun = self._begins, self._begun_ns
        self._begins, self._begun_ns = False, 0
        found.batches += 1
        found.iterations += begins
        if begins and settings.get("num_workers"):
            found.start_ns += begun + ns
        else:
            found.wait_ns += begun + ns
