"""The steps, samples and tokens of this rank over all attempts of the run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from telemetry.job.rank_counts import MAX_BYTES, RankCounts, count, decoded, name_of
from telemetry.util.files import parse_object, read_small, replace_file

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.records import Totals
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity


class RunCounts:
    """Continues them from the file of the rank.

    Args:
        folder: the folder of that file and the heartbeats.
        life: of this agent.
    """

    def __init__(self, folder: Path, life: str, errors: ErrorLog) -> None:
        self._folder = folder
        self._life = life
        self._errors = errors
        self._rank: int | None = None
        self._counts: RankCounts | None = None

    @property
    def before(self) -> tuple[int, int]:
        """Samples and tokens of the attempts before this one."""
        counts = self._counts
        return (0, 0) if counts is None else (counts.samples_before, counts.tokens_before)

    @property
    def steps_before(self) -> int:
        """Training steps of the attempts before this one."""
        return 0 if self._counts is None else self._counts.steps_before

    def tick(self, identity: Identity, totals: Totals) -> None:
        """Bring them up to now. At the first time, read what is there, and write that this attempt has begun."""
        if self._counts is None or self._rank != identity.rank or self._counts.run != identity.run:
            self._rank = identity.rank
            self._counts = self._begin(identity)
            self._write()
        self._counts = replace(self._counts, samples=totals.samples or 0, tokens=totals.tokens or 0, steps=totals.steps)

    def end(self) -> None:
        """The process ends by itself."""
        self._write()

    def _begin(self, identity: Identity) -> RankCounts:
        try:
            before = decoded(read_small(self._folder / name_of(identity.rank), MAX_BYTES))
        except OSError:
            before = None
        if before is None or before.run != identity.run:
            return RankCounts(identity.run, self._life)
        return self._newer(before).next(self._life)

    def _newer(self, counts: RankCounts) -> RankCounts:
        """With the counts of the heartbeat of the process that wrote them, which is there if it was killed."""
        if not counts.life.isalnum() or counts.life == self._life:
            return counts
        try:
            beat = parse_object(read_small(self._folder / f"{counts.life}.beat").rstrip()) or {}
        except OSError:
            return counts
        return replace(
            counts,
            samples=max(counts.samples, count(beat.get("samples_total"))),
            tokens=max(counts.tokens, count(beat.get("tokens_total"))),
            steps=max(counts.steps, count(beat.get("steps_total"))),
        )

    def _write(self) -> None:
        if self._counts is None or self._rank is None:
            return
        path, content = self._folder / name_of(self._rank), self._counts.encoded()
        try:
            try:
                replace_file(path, content, 0o644)
            except FileNotFoundError:
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_file(path, content, 0o644)
        except OSError as error:
            self._errors.tell("attempts", f"the counts of this rank cannot be written: {error.strerror}")
