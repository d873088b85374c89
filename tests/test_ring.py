"""What is read from the ring is the same whether it is read at once, batch by batch, or in any pieces between."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from telemetry.hooks.batches import BatchCounts, BatchMark, BatchSizes, TrainedBatches
from telemetry.hooks.loaders import ON_THREAD, LoaderHandle
from telemetry.hooks.ring import (
    BATCH,
    BEGINS,
    JOINS,
    S_COMPUTE,
    S_DATA_WAIT,
    S_OTHER,
    STEP,
    code,
)

JOINED = code(S_DATA_WAIT, S_COMPUTE, BATCH | JOINS)
BEGUN = code(S_OTHER, S_OTHER, BEGINS)


class Lengths:
    """Tokens: batch ``n`` has ``n + 1``."""

    def of(self, number: int, batches: int) -> tuple[None, int]:
        return None, sum(range(number + 1, number + batches + 1))


def pieces(entries: list, cuts: list[int]) -> list[list]:
    """The entries in pieces, some of which are empty."""
    edges = [0, *sorted(cut % (len(entries) + 1) for cut in cuts), len(entries)]
    return [entries[first:last] for first, last in zip(edges, edges[1:], strict=False)]


@given(
    epochs=st.lists(
        st.tuples(st.integers(1, 5), st.one_of(st.none(), st.integers(1, 40)), st.integers(1, 12)), max_size=4
    ),
    cuts=st.lists(st.integers(0, 99), max_size=12),
    joined=st.sets(st.integers(0, 40)),
    replayed=st.integers(0, 2),
)
def test_samples_and_tokens(epochs, cuts, joined, replayed):
    entries: list = []
    for size, total, batches in epochs:
        mark = BatchMark(ON_THREAD, BatchCounts(BatchSizes(size, total), Lengths(), None, 0, False), 0, 0)
        for place in range(batches):
            number = len(entries)
            kind = JOINED if number in joined else STEP
            entries.append((10 * number, 10 * number + 5, kind, None if place else mark))

    def counted(parts: list[list]) -> tuple[int | None, int | None]:
        counter = TrainedBatches()
        counter.settle(replayed)
        for part in parts:
            counter.fold(part)
        return counter.samples, counter.tokens(None)

    assert counted(pieces(entries, cuts)) == counted([[entry] for entry in entries])


@given(
    epochs=st.lists(st.integers(0, 8), max_size=4),
    cuts=st.lists(st.integers(0, 99), max_size=12),
    joined=st.sets(st.integers(0, 40)),
)
def test_numbers_of_batches_and_waits(epochs, cuts, joined):
    def numbered(in_pieces: bool) -> tuple[list, int]:
        iterator = SimpleNamespace(_workers=[SimpleNamespace(pid=1)])
        loader, entries = LoaderHandle(iterator, None), []
        for epoch, batches in enumerate(epochs):
            mark = BatchMark(loader, None, 0, epoch)
            entries.append((0, 0, BEGUN, mark))
            for place in range(batches):
                number = len(entries)
                kind = JOINED if number in joined else STEP
                entries.append((10 * number, 11 * number, kind, None if place else mark))
        followed = TrainedBatches()
        followed.settle(0)
        for part in pieces(entries, cuts) if in_pieces else [[entry] for entry in entries]:
            followed.fold(part)
        return list(loader.arrivals), followed._waits.get(loader, 0)

    assert numbered(True) == numbered(False)
