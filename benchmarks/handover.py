"""Measures what a batch costs the training thread if it is pickled, and if it is a tensor in shared memory.

    python -m benchmarks.handover

A batch of NumPy arrays is pickled, written into a pipe, read and unpickled. The bytes of a tensor are in shared memory,
and only their name is sent. But their pages must be mapped, touched for the first time and released.
`telemetry.diagnosis.advice` uses this cost to predict the speed-up of sending large tensors instead. Its figure
is the last column.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

_WARM_UP = 5
"""Batches until the worker has started."""

_LET_IT_FINISH = 0.15
"""Seconds before each batch, so that the worker finishes it: only the transfer is timed."""


class Batches(Dataset):  # type: ignore[misc]
    """Batches of a given size, as one array or as one tensor."""

    def __init__(self, size: int, *, tensors: bool) -> None:
        self.size = size
        self.tensors = tensors

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        array = np.full(self.size, index % 256, np.uint8)
        return torch.from_numpy(array) if self.tensors else array


def as_it_is(batch: Any) -> Any:
    """Return the batch unchanged. `default_convert` would make a tensor of an array."""
    return batch


def seconds_per_batch(size: int, batches: int, *, tensors: bool) -> list[float]:
    """Seconds to take a batch, to read one byte of each of its pages, and to free it."""
    iterator = iter(DataLoader(Batches(size, tensors=tensors), batch_size=None, num_workers=1, collate_fn=as_it_is))
    took = []
    for number in range(_WARM_UP + batches):
        time.sleep(_LET_IT_FINISH)
        began = time.perf_counter()
        batch = next(iterator)
        torch.as_tensor(batch)[::4096].sum()
        del batch
        if number >= _WARM_UP:
            took.append(time.perf_counter() - began)
    return took


def main() -> None:
    """Measure alternately, and print one row for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="turns for each size")
    parser.add_argument("--batches", type=int, default=20, help="of each turn and way")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| MB of a batch | ms pickled | ms as a tensor | times less | ms as a tensor, for a MB more |")
    print("|---|---|---|---|---|")
    smallest: tuple[float, float] | None = None
    for megabytes in (1, 4, 16, 48):
        pickled, tensors = [], []
        for _ in range(options.repeat):
            pickled += seconds_per_batch(megabytes * 1_000_000, options.batches, tensors=False)
            tensors += seconds_per_batch(megabytes * 1_000_000, options.batches, tensors=True)
        before, after = 1e3 * statistics.median(pickled), 1e3 * statistics.median(tensors)
        smallest = smallest or (megabytes, after)
        more = f"{(after - smallest[1]) / (megabytes - smallest[0]):.2f}" if megabytes > smallest[0] else ""
        print(f"| {megabytes} | {before:.1f} | {after:.1f} | {before / after:.1f} | {more} |")


if __name__ == "__main__":
    main()
