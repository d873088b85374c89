"""Image models: four batches for an update, the rest of an epoch in a smaller one, averaged weights, mixed batches."""

import contextlib

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from truth import Truth

truth = Truth()
ACCUMULATE = 4


class Pictures(Dataset):
    def __len__(self) -> int:
        return 700

    def __getitem__(self, index: int):
        return torch.full((3, 32, 32), index / 700), index % 10


def mixed(x, target):
    share = 0.8
    labels = nn.functional.one_hot(target, 10).float()
    return x * share + x.flip(0) * (1 - share), labels * share + labels.flip(0) * (1 - share)


def main():
    layers = [nn.Conv2d(3, 24, 3), nn.GELU(), nn.Conv2d(24, 48, 3, 2), nn.GELU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(768, 10)).to(memory_format=torch.channels_last)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Pictures(), batch_size=16, shuffle=True, num_workers=1, drop_last=True, persistent_workers=True)
    checks = DataLoader(Pictures(), batch_size=64, num_workers=1, persistent_workers=True)
    criterion = nn.CrossEntropyLoss()
    while not truth.over():
        model.train()
        optimizer.zero_grad()
        truth.asks()
        for i, (x, target) in enumerate(loader):
            truth.gets()
            last = i == len(loader) - 1
            update = last or (i + 1) % ACCUMULATE == 0
            x, target = mixed(x.contiguous(memory_format=torch.channels_last), target)
            with contextlib.nullcontext():
                with truth.timed("forward"):
                    loss = criterion(model(x), target) / ACCUMULATE
                with truth.timed("backward"):
                    loss.backward()
            truth.counts.update(steps=1, samples=len(x))
            if update:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                with truth.timed("optimizer"):
                    optimizer.step()
                optimizer.zero_grad()
                averaged.update_parameters(model)
                truth.counts["optimizer_steps"] += 1
            truth.asks()
        truth.leaves()
        averaged.eval()
        with truth.timed("evaluation"), torch.no_grad():
            for x, target in checks:
                criterion(averaged(x), target)
        truth.counts["epochs"] += 1
    truth.say()


if __name__ == "__main__":
    main()
