"""Stacks with the time that was spent in each, and how they are sent and stored.

A profile is filled by the thread that samples, in a worker or in the training process. A worker sends its profile as
bytes, with each place and each path written once. On disk the stacks are folded: one line per stack, outermost frame
first, and its microseconds. Flame-graph tools and speedscope read that.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.util.stacks import Spot, Stack

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_STACKS: Final = 500
"""Maximum different stacks of a profile. The time of others is only summed up."""

_MAX_FILE: Final = 1000
"""A path that is cut names no file, so only a very long one is cut."""

_MAX_NAME: Final = 200
_UNREADABLE: Final = {ord(character): "?" for character in "\t\r\n;"}
"""These separate fields, lines and frames."""


class StackTime(NamedTuple):
    """Nanoseconds spent in a stack: of wall clock, on a core, and with the GIL held, as far as that is known."""

    wall_ns: int
    cpu_ns: int
    gil_ns: int = 0

    def plus(self, other: StackTime) -> StackTime:
        """Both together."""
        return StackTime(self.wall_ns + other.wall_ns, self.cpu_ns + other.cpu_ns, self.gil_ns + other.gil_ns)


class StackProfile:
    """The time spent in each stack.

    Attributes:
        times: by stack, innermost frame first.
        samples: number of samples.
        other_ns, other_cpu_ns: time in stacks that are not in ``times``, because there are too many.
    """

    __slots__ = ("other_cpu_ns", "other_ns", "samples", "times")

    def __init__(self) -> None:
        self.times: dict[Stack, StackTime] = {}
        self.samples = 0
        self.other_ns = 0
        self.other_cpu_ns = 0

    def add(self, stack: Stack, wall_ns: int, cpu_ns: int, samples: int = 1) -> None:
        """Add time in a stack, seen by this many samples."""
        self.samples += samples
        self._count(stack, StackTime(wall_ns, cpu_ns))

    def merge(self, other: StackProfile) -> None:
        """Add everything in another profile."""
        self.samples += other.samples
        self.other_ns += other.other_ns
        self.other_cpu_ns += other.other_cpu_ns
        for stack, time in other.times.items():
            self._count(stack, time)

    def _count(self, stack: Stack, time: StackTime) -> None:
        before = self.times.get(stack)
        if before is not None:
            self.times[stack] = before.plus(time)
        elif len(self.times) < MAX_STACKS:
            self.times[stack] = time
        else:
            self.other_ns += time.wall_ns
            self.other_cpu_ns += time.cpu_ns

    @property
    def wall_ns(self) -> int:
        """All of its time."""
        return self.other_ns + sum(time.wall_ns for time in self.times.values())

    def longest_first(self) -> list[tuple[Stack, StackTime]]:
        """The stacks and their times."""
        return sorted(self.times.items(), key=lambda item: -item[1].wall_ns)

    def packed(self, most: int) -> bytes:
        """The profile in at most ``most`` bytes. If they are too few, short times are only summed up."""
        spots: dict[Spot, int] = {}
        files: dict[str, int] = {}
        lines: list[bytes] = []
        size, other, other_cpu = 0, self.other_ns, self.other_cpu_ns
        for stack, (wall, cpu, gil) in self.longest_first():
            new = [spot for spot in dict.fromkeys(stack) if spot not in spots]
            numbers = spots | {spot: len(spots) + number for number, spot in enumerate(new)} if new else spots
            known = dict(files) if new else files
            added = [_spot_line(spot, known.setdefault(spot.file, numbers[spot]), numbers[spot]) for spot in new]
            added.append(f"s {wall} {cpu} {gil} {' '.join(str(numbers[spot]) for spot in stack)}\n".encode())
            more = sum(map(len, added))
            if size + more > most - _HEAD_BYTES:
                other, other_cpu = other + wall, other_cpu + cpu
                continue
            spots, files, size = numbers, known, size + more
            lines += added
        head = f"{self.samples} {other} {other_cpu}\n".encode()
        return b"".join((head, *lines))

    @classmethod
    def unpacked(cls, content: bytes) -> StackProfile:
        """The profile from what `packed` has returned.

        Raises:
            ValueError: the content is damaged.
        """
        profile = cls()
        spots: list[Spot] = []
        head, *lines = content.decode("utf-8", "replace").splitlines() or [""]
        try:
            profile.samples, profile.other_ns, profile.other_cpu_ns = map(int, head.split(" "))
            for line in lines:
                if line.startswith("s "):
                    wall, cpu, gil, *numbers = map(int, line.split(" ")[1:])
                    profile._count(tuple(spots[number] for number in numbers), StackTime(wall, cpu, gil))
                else:
                    *same, file, number, function, module = line.split("\t")
                    file = spots[int(file)].file if same else file
                    spots.append(Spot(file, int(number), function, module))
        except IndexError:
            raise ValueError("a stack names a place that is not there") from None
        return profile

    def folded(self, root: str, most: int) -> bytes:
        """The stacks as folded text of at most ``most`` bytes, below a frame named ``root``. The longest come first."""
        lines: list[bytes] = []
        size, other = 0, self.other_ns
        for stack, (wall, *_) in self.longest_first():
            line = ";".join((root, *_frame_names(stack))) + f" {max(1, wall // 1000)}\n"
            encoded = line.encode("utf-8", "backslashreplace")
            if size + len(encoded) > most - _HEAD_BYTES:
                other += wall
                continue
            size += len(encoded)
            lines.append(encoded)
        if other >= 1000:
            lines.append(f"{root};(other) {other // 1000}\n".encode())
        return b"".join(lines)


_HEAD_BYTES: Final = 128


def _spot_line(spot: Spot, same_file: int, number: int) -> bytes:
    """A place. One with a file that is written already begins with a tab and the number of that place."""
    file = spot.file[-_MAX_FILE:].translate(_UNREADABLE) if same_file == number else f"\t{same_file}"
    names = (spot.function[:_MAX_NAME], spot.module[-_MAX_NAME:])
    texts = (file, str(spot.line), *(name.translate(_UNREADABLE) for name in names))
    return ("\t".join(texts) + "\n").encode("utf-8", "backslashreplace")


def _frame_names(stack: Stack) -> Iterator[str]:
    for spot in reversed(stack):
        name = f"{spot.function} ({spot.file.rpartition(os.sep)[2]}:{spot.line})"
        yield name.translate(_UNREADABLE)
