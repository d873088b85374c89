"""Numbers of ranks as ranges: of ten thousand ranks that do the same, one text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def ranges(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last rank of each run of neighbours."""
    found: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if found and rank == found[-1][1] + 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found


def named(ranks: Iterable[int], most: int = 6) -> str:
    """Ranks as a person reads them: ``rank 3``, ``ranks 0-2, 5``; of many ranges the first ``most``."""
    all_ranks = sorted(set(ranks))
    if len(all_ranks) == 1:
        return f"rank {all_ranks[0]}"
    found = ranges(all_ranks)
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in found[:most]]
    left = sum(last - first + 1 for first, last in found[most:])
    return f"ranks {', '.join(texts)}{f' and {left} more' if left else ''}"
