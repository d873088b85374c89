"""Trains on a slow data set, and writes results in every way that scripts do. ``--how`` changes what goes wrong."""

from __future__ import annotations

import argparse
import io
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.quick_optimizers import QuickSGD


class Slow(Dataset):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, item: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.005)
        return torch.zeros(8), item % 2


class MainOnly(Slow):
    def __getitem__(self, item: int) -> tuple[torch.Tensor, int]:
        if get_worker_info() is not None:
            raise RuntimeError("this data set cannot be used in a worker")
        return super().__getitem__(item)


class Stream(IterableDataset):
    def __iter__(self):
        dataset = Slow()
        return (dataset[item] for item in range(100_000))


class Both:
    """Batches of a data set that takes workers, each with one of a stream that gives all items in each worker."""

    def __init__(self) -> None:
        self.items = DataLoader(Slow(), batch_size=8, shuffle=True, num_workers=1)
        self.stream = DataLoader(Stream(), batch_size=2)
        if self.stream.num_workers > 1:
            raise SystemExit("the stream has several workers")

    def __iter__(self):
        return (batch for batch, _ in zip(self.items, self.stream))


def loader_of(dataset, **settings) -> DataLoader:
    return DataLoader(dataset, batch_size=8, **settings)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="")
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.how == "crash":
        raise SystemExit("there is no data set in /data")
    if options.how == "no-batch":
        loader_of(Slow())
        return
    if options.how == "rmtree":
        import shutil

        shutil.rmtree("checkpoints")
    stream = options.how == "stream"
    items = {"stream": Stream, "main-only": MainOnly}.get(options.how, Slow)()
    train = Both() if options.how == "two-loaders" else loader_of(items, **({} if stream else {"shuffle": True}))
    held_out = loader_of(Slow())
    model = nn.Linear(8, 2)
    optimizer = QuickSGD(model.parameters(), lr=0.1)
    with open("train.log", "w") as log, torch.no_grad():
        for _, (items, _labels) in zip(range(2), held_out):
            model(items)
        print("begin", file=log)
    for step, (items, labels) in enumerate(train):
        if options.how == "late-crash" and step == 40:
            raise RuntimeError("diverged")
        if step == options.steps:
            break
        loss = nn.functional.cross_entropy(model(items), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.how == "in-memory":
            kept = io.BytesIO()
            torch.save(model.state_dict(), kept)
            torch.save(optimizer.state_dict(), f=(kept_too := io.BytesIO()))
            torch.jit.save(torch.jit.script(model), scripted := io.BytesIO())
            model.load_state_dict(torch.load(io.BytesIO(kept.getvalue())))
            optimizer.load_state_dict(torch.load(io.BytesIO(kept_too.getvalue())))
            torch.jit.load(io.BytesIO(scripted.getvalue()))
        torch.save(model.state_dict(), "newest.pt.tmp")
        os.replace("newest.pt.tmp", "newest.pt")
        Path("state.json.tmp").write_text(f'{{"step": {step}}}')
        if options.how == "slow-save":
            time.sleep(0.3)
        os.replace("state.json.tmp", "state.json")
        Path("loss.txt").write_text(f"{loss.item()}\n")
    Path("done.txt").write_text(f"{len(held_out.dataset)}\n")


if __name__ == "__main__":
    main()
