"""The training whose logs are recorded: each word on its command line is something that a real training also does."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import telemetry

WORDS = sys.argv[1].split(",")
STEPS = int(sys.argv[2])
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def read_slowly() -> None:
    time.sleep(0.02)


def decode() -> None:
    end = time.process_time() + 0.02
    while time.process_time() < end:
        pass


class Pictures(Dataset):
    """Pictures that are slow to read (``io``), or to decode (``cpu``)."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if "io" in WORDS:
            read_slowly()
        if "cpu" in WORDS:
            decode()
        return torch.ones(16)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if WORLD > 1:
        torch.distributed.init_process_group("gloo")
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpoint = "state.pt"
    if "restart" in WORDS and os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    data = DataLoader(Pictures(), batch_size=4, num_workers=0 if "main" in WORDS else 2)
    kept = []
    for step, batch in enumerate(data, 1):
        optimizer.zero_grad()
        model(batch).sum().backward()
        if WORLD > 1:
            torch.distributed.all_reduce(model.weight.grad)
        optimizer.step()
        time.sleep(0.04 if "straggler" in WORDS and RANK == 1 else 0.01)
        if "change" in WORDS and step > STEPS // 2:
            time.sleep(0.03)
        if "save" in WORDS and step % 100 == 50 and RANK == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
        if "evaluate" in WORDS and step % 100 == 80:
            with torch.no_grad(), telemetry.phase("evaluation"):
                time.sleep(0.3)
        if "snapshot" in WORDS and step == 100:
            telemetry.request_snapshot(steps=3)
        if "grow" in WORDS:
            kept.append(bytearray(os.urandom(1 << 16) * 4))
        if "kill" in WORDS and step == STEPS - 20:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang" in WORDS and RANK == 1 and step == STEPS // 2:
            signal.pause()
        if "raise" in WORDS and step == STEPS - 20:
            raise ValueError("a label is out of range")
        if step == STEPS:
            break


main()
