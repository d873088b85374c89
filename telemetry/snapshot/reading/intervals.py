"""Sets of moments, as sorted lists of disjoint intervals ``(start, end)``."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Interval: TypeAlias = tuple[float, float]
Intervals: TypeAlias = list[Interval]

_PORTION: Final = 1 << 16
_MUCH_SHORTER: Final = 16
"""A list so many times shorter than another is looked up in it, rather than both gone through."""


def union(intervals: Iterable[Interval]) -> Intervals:
    """All moments of any intervals, in any order; those that touch become one.

    They are taken in portions, so that operators within operators do not all have to be held at once.
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
    """Of sorted intervals. One that stays as it is stays the same object: there may be millions."""
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
    """The moments that are in both."""
    if len(one) > len(other):
        one, other = other, one
    if _MUCH_SHORTER * len(one) < len(other):
        return [span for start, end in one for span in within(other, start, end)]
    return split(other, one)[0]


def difference(one: Intervals, other: Intervals) -> Intervals:
    """The moments of the first that are not in the second."""
    return split(one, other)[1]


def split(one: Intervals, other: Intervals) -> tuple[Intervals, Intervals]:
    """The moments of the first that are in the second, and those that are not."""
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
    """The moments from ``start`` to ``end``. Costs what it finds, not the length of the list."""
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
    """Whether a time is one of the moments."""
    at = bisect_right(intervals, (time, float("inf"))) - 1
    return at >= 0 and time <= intervals[at][1]


def length(intervals: Iterable[Interval]) -> float:
    """The sum of their lengths."""
    return sum(end - start for start, end in intervals)
