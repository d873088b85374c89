"""Keeps and sums samples of stacks.

A sample is one look at a thread's stack, and the time that it stands for (`util.sampling`). `StackProfile` has the
time spent in each stack. A worker sends one, and the agent stores it.
"""

from __future__ import annotations

import json
import os
from typing import Final, NamedTuple

from telemetry.util.stacks import Spot, Stack

FETCH: Final = "fetch"
SAMPLER: Final = "sampler"
WAIT: Final = "wait"
STEP: Final = "step"
CHECKPOINT: Final = "checkpoint"
BETWEEN: Final = "between"
EVALUATING: Final = "evaluating"
EVALUATION_WAIT: Final = "evaluation_wait"
"""The kinds of work of which samples are taken. The sampler's are a part of those of waits; `BETWEEN`
is the time between two loops."""

MAX_STACKS: Final = 500
"""A profile has at most this many different stacks."""

OTHER_STACKS: Final[Stack] = ()
"""Stands for the stacks that are too many for a profile."""

_SEPARATORS: Final = {ord(character): "?" for character in "\t\r\n;"}
_OTHER_BYTES: Final = 128
"""These bytes are kept free for the line that sums up what was left out."""


class StackTime(NamedTuple):
    """Nanoseconds spent in a stack: of wall clock, on a core or wanting one, and with the GIL held."""

    wall_ns: int = 0
    cpu_ns: int = 0
    gil_ns: int = 0

    def plus(self, other: StackTime) -> StackTime:
        """The sum of both."""
        return StackTime(self.wall_ns + other.wall_ns, self.cpu_ns + other.cpu_ns, self.gil_ns + other.gil_ns)


class StackProfile:
    """The time spent in each stack.

    Attributes:
        times: time by stack, innermost frame first. `OTHER_STACKS` has the time of stacks that are too many.
        samples: number of samples.
    """

    __slots__ = ("samples", "times")

    def __init__(self) -> None:
        self.times: dict[Stack, StackTime] = {}
        self.samples = 0

    def add(self, stack: Stack, time: StackTime, samples: int = 1) -> None:
        """Add time in a stack, seen by this many samples."""
        self.samples += samples
        self._count(stack, time)

    def merge(self, other: StackProfile) -> None:
        """Add everything in another profile."""
        self.samples += other.samples
        for stack, time in other.times.items():
            self._count(stack, time)

    def _count(self, stack: Stack, time: StackTime) -> None:
        if stack not in self.times and len(self.times) >= MAX_STACKS:
            stack = OTHER_STACKS
        self.times[stack] = time.plus(self.times.get(stack, StackTime()))

    @property
    def wall_ns(self) -> int:
        """The time in all stacks."""
        return sum(time.wall_ns for time in self.times.values())

    def _longest_first(self) -> list[tuple[Stack, StackTime]]:
        known = [item for item in self.times.items() if item[0] != OTHER_STACKS]
        return sorted(known, key=lambda item: -item[1].wall_ns)

    def packed(self, most: int) -> bytes:
        """The profile in at most ``most`` bytes. If they are too few, short times are only summed up."""
        stacks = self._longest_first()
        kept = len(stacks)
        while True:
            files: dict[str, int] = {}
            spots: dict[Spot, int] = {}
            times = [(time, [spots.setdefault(spot, len(spots)) for spot in stack]) for stack, time in stacks[:kept]]
            other = self.times.get(OTHER_STACKS, StackTime())
            for _, time in stacks[kept:]:
                other = other.plus(time)
            if other.wall_ns:
                times.append((other, []))
            places = [(files.setdefault(spot.file, len(files)), *spot[1:]) for spot in spots]
            content = json.dumps((self.samples, [*files], places, times), separators=(",", ":")).encode()
            if len(content) <= most or not kept:
                return content
            kept = kept * 3 // 4

    @classmethod
    def unpacked(cls, content: bytes) -> StackProfile:
        """Make the profile from what `packed` has returned.

        Raises:
            ValueError: the content is damaged.
        """
        profile = cls()
        try:
            profile.samples, files, places, times = json.loads(content)
            spots = [Spot(files[file], *place) for file, *place in places]
            for time, numbers in times:
                profile._count(tuple(spots[number] for number in numbers), StackTime(*time))
        except (IndexError, TypeError) as error:
            raise ValueError("not a profile") from error
        return profile

    def folded(self, root: str, most: int) -> bytes:
        """The stacks as folded text of at most ``most`` bytes, below a frame named ``root``. The longest come first."""
        lines: list[bytes] = []
        size, other = 0, self.times.get(OTHER_STACKS, StackTime()).wall_ns
        for stack, (wall, *_) in self._longest_first():
            names = (f"{spot.function} ({spot.file.rpartition(os.sep)[2]}:{spot.line})" for spot in reversed(stack))
            frames = ";".join((root, *(name.translate(_SEPARATORS) for name in names)))
            line = f"{frames} {max(1, wall // 1000)}\n".encode("utf-8", "backslashreplace")
            if size + len(line) > most - _OTHER_BYTES:
                other += wall
                continue
            size += len(line)
            lines.append(line)
        if other >= 1000:
            lines.append(f"{root};(other) {other // 1000}\n".encode())
        return b"".join(lines)
