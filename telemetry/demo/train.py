"""Train a small classifier on a folder of pictures, one sub-folder per class: a plain PyTorch script.

It makes a common mistake: with ``--num-workers 0``, the default here as in PyTorch, the training thread decodes the
pictures itself, and the computation waits for them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE = 64  # pixels a side after the crop
HELD_OUT_EVERY = 8  # every eighth picture is kept for the evaluation


class PictureFolder(Dataset):  # type: ignore[misc]
    """Pictures and the number of their class. ``training`` decides which of them, and how they are cropped."""

    def __init__(self, folder: Path, *, training: bool) -> None:
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        files = sorted(
            (path, label) for label, name in enumerate(self.classes) for path in folder.glob(f"{name}/*.jpg")
        )
        self.files = [file for number, file in enumerate(files) if (number % HELD_OUT_EVERY != 0) == training]
        self.training = training

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.files[index]
        with Image.open(path) as file:
            picture = file.convert("RGB")  # this is where the JPEG is decoded
        width, height = picture.size
        zoom, across, down, mirror = torch.rand(4).tolist() if self.training else (1.0, 0.0, 0.0, 1.0)
        part = 0.5 + 0.5 * zoom  # of the width and the height
        left, top = across * (1 - part) * width, down * (1 - part) * height
        box = (left, top, left + part * width, top + part * height)
        picture = picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
        if mirror < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        return pixels.float().div_(127.5).sub_(1.0), label


def make_network(classes: int) -> Any:
    """Four convolutions and a linear layer."""
    layers: list[Any] = []
    for channels_in, channels_out in ((3, 16), (16, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def train_epoch(network: Any, optimizer: Any, loader: Any, device: Any, until: float) -> float:
    """One pass over the training pictures, or less when the time is up. Returns the mean loss."""
    network.train()
    total, batches = torch.zeros((), device=device), 0
    for batch, labels in loader:
        pixels, truth = batch.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(network(pixels), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, batches = total + loss.detach(), batches + 1
        if time.monotonic() > until:
            break
    return float(total) / max(batches, 1)


def evaluate(network: Any, loader: Any, device: Any) -> float:
    """The share of the held-out pictures that the network gets right."""
    network.eval()
    right = torch.zeros((), device=device)
    with torch.no_grad():
        for batch, labels in loader:
            right += (network(batch.to(device)).argmax(1) == labels.to(device)).sum()
    return float(right) / len(loader.dataset)


def main() -> None:
    """Train, evaluate and save, epoch after epoch."""
    parser = argparse.ArgumentParser(description="Train a small classifier on a folder of pictures.")
    parser.add_argument("pictures", type=Path, help="one sub-folder of JPEG files per class")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that decode (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=25.0, help="seconds to train (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoints", type=Path, help="folder for the checkpoints (default: no checkpoints)")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # so small a network is not faster with more, and slower where cores are shared
    training, held_out = (
        DataLoader(
            PictureFolder(options.pictures, training=training),
            batch_size=options.batch_size,
            shuffle=training,
            num_workers=options.num_workers,
            persistent_workers=options.num_workers > 0,
            pin_memory=device.type == "cuda",
        )
        for training in (True, False)
    )
    network = make_network(len(training.dataset.classes)).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    epoch, until = 0, time.monotonic() + options.seconds
    while not epoch or time.monotonic() < until:
        epoch += 1
        loss = train_epoch(network, optimizer, training, device, until)
        right = evaluate(network, held_out, device)
        if options.checkpoints:
            options.checkpoints.mkdir(parents=True, exist_ok=True)
            state = {"epoch": epoch, "network": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, options.checkpoints / "newest.pt")
        print(f"epoch {epoch}: loss {loss:.3f}, {100 * right:.0f} % of the held-out pictures right", flush=True)


if __name__ == "__main__":
    main()
