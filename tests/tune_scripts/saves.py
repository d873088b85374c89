"""Trains on a slow data set, and saves in every step. ``--how`` changes what it does, or what goes wrong."""

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


def loader_of(dataset, **settings) -> DataLoader:
    return DataLoader(dataset, batch_size=8, **settings)


def save(state, step: int, how: str) -> None:
    torch.save(state, "newest.pt")
    Path("loss.txt").write_text(f"{step}\n")
    if how == "slow-save":
        Path("state.json.tmp").write_text(f'{{"step": {step}}}')
        time.sleep(0.1)
        os.replace("state.json.tmp", "state.json")
    if how == "buffers":
        torch.save(state, f=(kept := io.BytesIO()))
        torch.load(io.BytesIO(kept.getvalue()))
        with open("opened.pt", "wb") as file:
            torch.save(state, file)
    if how == "renames":
        torch.save(state, "newest.pt.tmp")
        os.replace("newest.pt.tmp", "newest.pt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="")
    how = parser.parse_args().how
    torch.set_num_threads(1)
    if how == "crash":
        raise SystemExit("there is no data set in /data")
    if how == "no-batch":
        loader_of(Slow())
        return
    items = {"stream": Stream, "main-only": MainOnly}.get(how, Slow)()
    train = loader_of(items, shuffle=None if how == "stream" else True)
    held_out = loader_of(Slow())
    model = nn.Linear(8, 2)
    optimizer = QuickSGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for _, (items, _labels) in zip(range(2), held_out):
            model(items)
    for step, (items, labels) in enumerate(train):
        if how == "late-crash" and step == 40:
            raise RuntimeError("diverged")
        loss = nn.functional.cross_entropy(model(items), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        save(model.state_dict(), step, how)
    Path("done.txt").write_text("")


if __name__ == "__main__":
    main()
