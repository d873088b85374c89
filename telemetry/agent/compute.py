"""Adds up where the compute of a run goes: its parts by the timed steps, and what ``torch.compile`` compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.hooks.compute import TIMED_PARTS
from telemetry.hooks.device import BUDGET_RATIO
from telemetry.records import COMPILE, COMPUTE_PARTS, COPY
from telemetry.sources.compiles import CompilationReader
from telemetry.totals import CompileTotals
from telemetry.util.clock import NS

if TYPE_CHECKING:
    from telemetry.hooks.tracker import StepTracker
    from telemetry.totals import Totals

_STEPS_AT_A_TICK: Final = 8
"""At most so many steps in a row are timed."""

_FIRST_COST_NS: Final = 50_000.0
"""What a timed step is assumed to cost until it is known."""

_SHORTEST_SECONDS: Final = 0.001
"""Shorter steps are not timed: the hooks would take too large a part of them."""


class ComputeSplit:
    """Splits the compute of a run.

    The compute between two readings takes the shares of the steps that were timed in it. What was compiled is a part of
    its own. Then the timed steps do not count, because their passes contain it, and the shares before it stay.

    Attributes:
        seconds: seconds by part, of the compute that has been split; None before the first timed step. Without ``copy``
            if no copy was seen.
        compiles: what was compiled again. ``reason``: the check that failed in the newest one.
    """

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._reader = CompilationReader()
        self.seconds: dict[str, float] | None = None
        self.compiles = CompileTotals()
        self.reason: str | None = None
        self._compute = 0.0  # the run's compute at the last call
        self._pending = 0.0  # compute that has not been split
        self._compiled = 0.0  # compilations that have not been split from it
        self._seen = [0] * len(TIMED_PARTS)
        self._shares: list[float] = []  # of the newest timed steps
        self._may_cost_ns = 0.0  # what timed steps may cost, and have not cost yet

    def update(self, compute_seconds: float) -> None:
        """Split the compute since the last call. ``compute_seconds``: that of the run so far."""
        self._pending += max(0.0, compute_seconds - self._compute)
        self._compute = compute_seconds
        compiled = self._read_compilations()
        ns = [now - before for now, before in zip(self._tracker.compute.ns, self._seen, strict=True)]
        self._seen = [before + new for before, new in zip(self._seen, ns, strict=True)]
        if sum(ns) and not compiled:
            self._shares = [part / sum(ns) for part in ns]
        elif not compiled:
            return  # until a step has been timed
        compile_seconds = min(self._compiled, self._pending)
        self._compiled, self._pending = 0.0, self._pending - compile_seconds
        parts = self.seconds or {part: 0.0 for part in COMPUTE_PARTS if part != COPY}
        added = {COMPILE: compile_seconds}
        if self._shares:
            added |= {part: self._pending * share for part, share in zip(TIMED_PARTS, self._shares, strict=True)}
            self._pending = 0.0
        seen = [part for part in COMPUTE_PARTS if part in parts or added.get(part)]
        self.seconds = {part: parts.get(part, 0.0) + added.get(part, 0.0) for part in seen}

    def _read_compilations(self) -> bool:
        """Read what was compiled since the last call. Returns whether there was anything."""
        new = self._reader.take()
        for one in new:
            self._compiled += one.seconds
            again = dict(self.compiles.again_seconds)
            if one.again:
                again[one.function] = again.get(one.function, 0.0) + one.seconds
                self.reason = one.reason or self.reason
            self.compiles = CompileTotals(self.compiles.again + one.again, again)
        return bool(new)

    def ask(self, totals: Totals, before: Totals) -> None:
        """Time the next steps, if those between two totals were long enough."""
        tracker, steps = self._tracker, totals.steps - before.steps
        timer, on_host = tracker.compute, tracker.accelerator is None
        usable = not timer.failed and (on_host or (timer.events is not None and tracker.gpu is not None))
        compute = totals.compute_seconds - before.compute_seconds
        if not usable or not steps or compute < _SHORTEST_SECONDS * steps:
            return
        each = timer.spent_ns / timer.begun if timer.begun else _FIRST_COST_NS
        self._may_cost_ns = min(self._may_cost_ns + BUDGET_RATIO * compute * NS, _STEPS_AT_A_TICK * each)
        timer.wanted = int(self._may_cost_ns / each)
        if timer.wanted:
            self._may_cost_ns -= timer.wanted * each
            tracker.slow_path()
