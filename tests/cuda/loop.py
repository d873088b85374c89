"""A training loop on a GPU that knows for how long the device waited for batches: it records an event around each wait.

    python -m tests.cuda.loop KIND [--workers N] [--device INDEX] [--seconds S]

Prints one line of JSON: steps, seconds of its loop, and seconds in which a wait for a batch was felt by the device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset

KINDS = ("starved", "gpu_bound", "host_bound", "accumulation", "side_stream", "graph", "graph_elsewhere", "two_devices")


class Rows(Dataset):
    """Each row takes some seconds to come."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((256,), index % 7 / 7)


class Loop:
    """A network, its optimizer, and how a step of this kind is done.

    Args:
        kind: one of `KINDS`.
        device: where the network is.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        self.kind, self.device = kind, device
        width = 1024 if kind == "gpu_bound" else 256
        depth = 24 if kind == "host_bound" else 6
        self.first = torch.nn.Linear(256, width, device=device)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width, device=device) for _ in range(depth)])
        parameters = [*self.first.parameters(), *self.model.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=1e-3, foreach=False)
        self.other = torch.device("cuda", 1) if kind == "two_devices" else device
        self.stream = torch.cuda.Stream(device) if kind == "side_stream" else None
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        if kind.startswith("graph"):
            self.x = torch.zeros(8, 256, device=device)
            if kind == "graph_elsewhere":  # another thread captures while the loop's thread waits for it
                captures = threading.Thread(target=self._capture)
                captures.start()
                captures.join()
            else:
                self._capture()

    def _capture(self) -> None:
        torch.cuda.set_device(self.device)
        aside = torch.cuda.Stream(self.device)
        with torch.cuda.stream(aside):
            self._train(self.x)
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._train(self.x)

    def _train(self, x: torch.Tensor) -> None:
        self.model(self.first(x)).square().mean().backward()

    def step(self, batch: torch.Tensor) -> None:
        self.steps += 1
        x = batch.to(self.device, non_blocking=True)
        if self.kind == "gpu_bound":
            torch.cuda._sleep(40_000_000)
        if self.other != self.device:
            torch.zeros(8, 256, device=self.other).mul_(2)
        if self.graph is not None:
            self.x.copy_(x)
            self.graph.replay()
        else:
            with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
                self._train(x)
            if self.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(self.stream)
        if self.kind != "accumulation" or self.steps % 4 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.graph is None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--context", default="fork")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=24.0)
    options = parser.parse_args()
    device = torch.device("cuda", options.device)
    row = {"gpu_bound": 0.0005, "host_bound": 0.0}.get(options.kind, 0.002)
    loader = DataLoader(
        Rows(row * max(1, options.workers)),
        batch_size=8,
        num_workers=options.workers,
        multiprocessing_context=options.context if options.workers else None,
        pin_memory=True,
    )
    loop, stream = Loop(options.kind, device), torch.cuda.current_stream(device)
    waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    batches, began, end = None, time.perf_counter(), 0.0
    while not end or time.perf_counter() < end:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        batches = batches or iter(loader)
        batch = next(batches)
        after.record(stream)
        waits.append((before, after))
        end = end or time.perf_counter() + options.seconds  # workers may take long to start
        loop.step(batch)
    seconds = time.perf_counter() - began
    torch.cuda.synchronize(device)
    exposed = sum(before.elapsed_time(after) for before, after in waits) / 1e3
    print(json.dumps({"steps": loop.steps, "loop_seconds": seconds, "exposed_seconds": exposed}), flush=True)
    del batches
    time.sleep(float(os.environ.get("REST_SECONDS", "0.2")))  # so that torch's threads are at rest when Python ends


if __name__ == "__main__":
    main()
