"""Sets of times, as sorted lists of disjoint intervals ``(start, end)``. All functions expect and return such lists."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

TimeRange: TypeAlias = tuple[float, float]
Intervals: TypeAlias = list[TimeRange]

SECONDS_PER_US: Final = 1e-6
"""Times of a trace are microseconds, figures are seconds."""

_PORTION: Final = 1 << 16
_MUCH_SHORTER: Final = 16
"""If a list is this many times shorter than the other, its intervals are searched there by bisection."""


def union(intervals: Iterable[TimeRange]) -> Intervals:
    """The union of any intervals, in any order. Intervals that touch become one.

    The input is read in portions, so that nested operators are never all in memory at once.
    """
    left = iter(intervals)
    merged: Intervals = []
    while portion := list(islice(left, max(_PORTION, len(merged)))):
        portion += merged
        portion.sort()
        merged = _join(portion)
        portion.clear()
    return merged


def _join(intervals: Intervals) -> Intervals:
    """The union of sorted intervals. An unchanged interval stays the same object: there may be millions."""
    merged: Intervals = []
    first = intervals[0]
    end = first[1]
    for span in intervals:
        if span[0] > end:
            merged.append(first if first[1] == end else (first[0], end))
            first = span
            end = span[1]
        elif span[1] > end:
            end = span[1]
    merged.append((first[0], end))
    return merged


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """The times that are in both."""
    if len(one) > len(other):
        one, other = other, one
    if _MUCH_SHORTER * len(one) < len(other):
        return [span for start, end in one for span in within(other, start, end)]
    return split(other, one)[0]


def difference(one: Intervals, other: Intervals) -> Intervals:
    """The times in the first that are not in the second."""
    return split(one, other)[1]


def split(one: Intervals, other: Intervals) -> tuple[Intervals, Intervals]:
    """The times in the first that are in the second, and those that are not."""
    common: Intervals = []
    rest: Intervals = []
    at, count = 0, len(other)
    for begin, end in one:
        start = begin
        while at < count and other[at][1] <= start:
            at += 1
        while at < count:
            left, right = other[at]
            if left >= end:
                break
            if left > start:
                rest.append((start, left))
                start = left
            if right >= end:
                common.append((start, end))
                start = end
                break
            common.append(other[at] if start == left else (start, right))
            start = right
            at += 1
        if start < end:
            rest.append((start, end))
    return common, rest


def within(intervals: Intervals, start: float, end: float) -> Intervals:
    """The times from ``start`` to ``end``. Takes as long as the result is, not the list."""
    if end <= start:
        return []
    first = max(0, bisect_left(intervals, (start, start)) - 1)
    found: Intervals = []
    for i in range(first, len(intervals)):
        left, right = intervals[i]
        if left >= end:
            break
        if right > start:
            found.append((max(left, start), min(right, end)))
    return found


def holds(intervals: Intervals, time: float) -> bool:
    """Whether a time is in the set."""
    at = bisect_right(intervals, (time, float("inf"))) - 1
    return at >= 0 and time <= intervals[at][1]


def length(intervals: Iterable[TimeRange]) -> float:
    """The sum of the lengths of the intervals."""
    return sum(end - start for start, end in intervals)
