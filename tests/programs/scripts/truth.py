"""What a program knows of its own run: counts, and seconds by part of its training loop."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from types import TracebackType

RUN_FOR = float(os.environ.get("RUN_FOR", "20"))


class Truth:
    """Counts and stopwatches. Where a stopwatch runs is the program's choice, so it is no part of the agent's rules."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.parts: Counter[str] = Counter()
        self.evaluation_seconds = 0.0
        self._end = time.monotonic() + RUN_FOR
        self._before = 0.0
        self._timed = 0.0

    def timed(self, part: str) -> _Stopwatch:
        """A part of the training loop."""
        return _Stopwatch(self, part)

    def asks(self) -> None:
        """It asks for a batch. What it has done since it got one, and was not timed, is the rest of its step."""
        now = time.perf_counter()
        if self._before:
            self.parts["rest"] += now - self._before - self._timed
        self._before = now

    def gets(self) -> None:
        """It has the batch."""
        now = time.perf_counter()
        self.parts["wait"] += now - self._before
        self._before, self._timed = now, 0.0

    def leaves(self) -> None:
        """It leaves the loop. The last wait, in which the loader has ended, counts, too."""
        self.parts["wait"] += time.perf_counter() - self._before
        self._before = 0.0

    def over(self) -> bool:
        """Whether the program has trained for long enough."""
        return time.monotonic() >= self._end

    def add(self, part: str, seconds: float) -> None:
        """Add a part of a step."""
        self.parts[part] += seconds
        self._timed += seconds

    def say(self) -> None:
        """Write it where the runner looks for it."""
        said: dict[str, object] = {**self.counts}
        if self.evaluation_seconds:
            said["evaluation_seconds"] = self.evaluation_seconds
        if self.parts:
            said["parts"] = dict(self.parts)
        print(json.dumps(said), flush=True)
        if "TRUTH_FILE" in os.environ:
            Path(os.environ["TRUTH_FILE"]).write_text(json.dumps(said))


class _Stopwatch:
    def __init__(self, truth: Truth, part: str) -> None:
        self._truth, self._part = truth, part

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._start
        if self._part == "evaluation":
            self._truth.evaluation_seconds += seconds
        else:
            self._truth.add(self._part, seconds)
