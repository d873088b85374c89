"""Training of an image classifier: meters read each step, validation and a checkpoint after each epoch. One worker decodes."""

import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from truth import Truth

truth = Truth()


class Photos(Dataset):
    """A picture is decoded for about a millisecond and a half."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        picture = torch.full((3, 96, 96), index % 255 / 255)
        for _ in range(12):
            picture = picture.sin().abs()
        return picture[:, ::3, ::3].contiguous(), index % 10


class Meter:
    def __init__(self) -> None:
        self.sum = self.count = 0.0

    def update(self, value: float, n: int = 1) -> None:
        self.sum += value * n
        self.count += n


def accuracy(output, target):
    with torch.no_grad():
        return (output.argmax(1) == target).float().mean() * 100


def train(loader, model, criterion, optimizer):
    losses, top1, data_time = Meter(), Meter(), Meter()
    model.train()
    end = time.perf_counter()
    truth.asks()
    for i, (images, target) in enumerate(loader):
        data_time.update(time.perf_counter() - end)
        truth.gets()
        with truth.timed("forward"):
            output = model(images)
            loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target).item(), images.size(0))
        optimizer.zero_grad()
        with truth.timed("backward"):
            loss.backward()
        with truth.timed("optimizer"):
            optimizer.step()
        truth.counts.update(steps=1, optimizer_steps=1, samples=images.size(0))
        if i % 10 == 0:
            print(
                f"[{i}/{len(loader)}] loss {losses.sum / losses.count:.3f} data {data_time.sum / data_time.count:.3f}"
            )
        truth.asks()
        end = time.perf_counter()
    truth.leaves()


def validate(loader, model, criterion):
    top1 = Meter()
    model.eval()
    with truth.timed("evaluation"), torch.no_grad():
        for images, target in loader:
            output = model(images)
            criterion(output, target)
            top1.update(accuracy(output, target).item(), images.size(0))
    return top1.sum / top1.count


def main():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    train_loader = DataLoader(Photos(960), batch_size=32, shuffle=True, num_workers=1)
    val_loader = DataLoader(Photos(128), batch_size=32, num_workers=1)
    with tempfile.TemporaryDirectory() as folder:
        while not truth.over():
            train(train_loader, model, criterion, optimizer)
            best = validate(val_loader, model, criterion)
            scheduler.step()
            truth.counts["epochs"] += 1
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": best}
            torch.save(state, Path(folder) / "checkpoint.pt")
    truth.say()


if __name__ == "__main__":
    main()
