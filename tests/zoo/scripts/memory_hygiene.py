"""Train with the whole data set as Python objects in memory, and collect garbage now and then "to be safe".

With ``--callback`` a list of callbacks runs after every step and one of them collects, with ``--timer SECONDS`` a thread
of its own does, with ``--in-sampler`` the batch sampler; without any of them it is the loop.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import common
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler


class Annotated(Dataset):
    """A picture for each record; the records are kept as they were parsed."""

    def __init__(self, count: int) -> None:
        self.records: list[dict[str, Any]] = [
            {"name": f"record-{n}", "box": [n, n + 1.0, n + 2.0, n + 3.0], "tags": {"label": n % 10}}
            for n in range(count)
        ]
        self.pictures = torch.rand(128, 3, 64, 64)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pictures[index % len(self.pictures)], self.records[index]["tags"]["label"]


class Tidy(BatchSampler):
    """Collects garbage as it draws every so many batches."""

    collect_every = 10

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(super().__iter__()):
            if number % self.collect_every == 0:
                gc.collect()
            yield batch


def collect_now_and_then(seconds: float, over: threading.Event) -> None:
    while not over.wait(seconds):
        gc.collect()


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--records", type=int, default=400_000)
    parser.add_argument("--collect-every", type=int, default=10, help="steps")
    parser.add_argument("--callback", action="store_true")
    parser.add_argument("--in-sampler", action="store_true")
    parser.add_argument("--timer", type=float, help="seconds")
    parser.add_argument("--gc-freeze", action="store_true", help="when all is built")
    options = parser.parse_args()
    dataset = Annotated(options.records)
    settings = common.loader_settings(options)
    if options.in_sampler:
        batches = Tidy(RandomSampler(dataset), options.batch_size, drop_last=False)
        batches.collect_every = options.collect_every
        loader = DataLoader(dataset, batch_sampler=batches, **settings)
    else:
        loader = DataLoader(dataset, options.batch_size, shuffle=True, **settings)
    model = common.picture_network(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if options.gc_freeze:
        gc.collect()
        gc.freeze()
    callbacks: list[Callable[[], object]] = [gc.collect] if options.callback else []
    over = threading.Event()
    if options.timer is not None:
        threading.Thread(target=collect_now_and_then, args=[options.timer, over], daemon=True).start()
    pace = common.Pace(options)
    step = 0
    while True:
        for pictures, labels in loader:
            common.train_step(model, optimizer, pictures, labels)
            step += 1
            in_loop = options.timer is None and not options.in_sampler
            if in_loop and step % options.collect_every == 0:
                for callback in callbacks:
                    callback()
                if not callbacks:
                    gc.collect()
            if pace.step():
                over.set()
                return


if __name__ == "__main__":
    main()
