"""Trains on a GPU and fails: ``python -m tests.cuda.failing caught|uncaught|in_capture|assertion``.

``caught``: an allocation fails, and the training goes on. ``in_capture``: the same while a graph is captured.
``assertion``: a kernel fails, and with it all later calls of CUDA.
"""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader

from tests.data_sets import Numbers


def too_large() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def captured() -> None:
    """Capture a graph in which an allocation fails. torch may want another memory pool then: only the error counts."""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            too_large()
    except RuntimeError:
        pass


def main() -> None:
    kind = sys.argv[1]
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for number in DataLoader(Numbers(150, 0.01), batch_size=1):
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 100:
            if kind == "uncaught":
                too_large()
            elif kind == "caught":
                try:
                    too_large()
                except torch.cuda.OutOfMemoryError:
                    print("smaller batches")
            elif kind == "in_capture":
                captured()
            else:
                torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")]
                while True:  # a stand-in fails at one of the next launches
                    model(torch.ones(8, 64, device="cuda"))
                    torch.cuda.synchronize()
    print("done", flush=True)
    time.sleep(0.2)  # so that torch's threads are at rest when Python ends


if __name__ == "__main__":
    main()
