"""A typical training script: DDP over gloo and a DataLoader, without telemetry. With --by-hand it does without DDP.

The rank named by SLOW_RANK reads its samples slowly, until the file named by --mended appears, if one is named. Training
goes on until the file named by --until appears, or for --steps steps. With COLLECTIVES=0 the ranks train side by side and
never talk, so that one may die without the others.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.quick_optimizers import QuickSGD


class Images(Dataset):
    def __init__(self, size, seconds_per_sample, mended=""):
        self.size = size
        self.seconds_per_sample = seconds_per_sample
        self.mended = mended

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.seconds_per_sample and not os.path.exists(self.mended):
            time.sleep(self.seconds_per_sample)
        return torch.full((3, 16, 16), index / self.size), index % 10


class Device(nn.Module):
    """Takes the time of a device: half of it in the forward pass, a quarter in the backward pass and in the optimizer."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, hidden):
        time.sleep(self.seconds / 2)
        hidden.register_hook(self.rest)
        return hidden

    def rest(self, *_):
        time.sleep(self.seconds / 4)


def average_gradients(model, world_size):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size


def agreed(done, collectives):
    """Whether any rank is done. All ranks must leave the loop at the same step."""
    if not collectives:
        return done
    flag = torch.tensor(float(done))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--until", default="")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--samples", type=int, default=64, help="of each rank, in an epoch")
    parser.add_argument("--mended", default="")
    parser.add_argument("--slow-seconds", type=float, default=0.02, help="per sample, on the slow rank")
    parser.add_argument("--by-hand", action="store_true", help="average gradients without DDP")
    parser.add_argument("--pace-seconds", type=float, default=0.01, help="per step, on every rank: the device's time")
    options = parser.parse_args()

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    collectives = os.environ.get("COLLECTIVES", "1") == "1"
    slow = os.environ.get("SLOW_RANK") == str(rank)
    torch.manual_seed(0)
    if collectives:
        dist.init_process_group("gloo")

    dataset = Images(options.samples * world_size, options.slow_seconds if slow else 0.0, options.mended)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=options.workers)
    device = Device(options.pace_seconds)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), device, nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    if collectives and not options.by_hand:  # DDP imports torch._dynamo, as torch's optimizers do: 1.3 s of CPU
        model = DistributedDataParallel(model)
    kind = QuickSGD if options.by_hand or not collectives else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(device.rest)
    lossf = nn.CrossEntropyLoss()

    step, epoch, done = 0, 0, False
    while not done:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = lossf(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            if collectives and options.by_hand:
                average_gradients(model, world_size)
            optimizer.step()
            if not collectives:
                time.sleep(0.05)  # so that four ranks do not use the whole machine
            step += 1
            done = agreed(step >= options.steps or os.path.exists(options.until), collectives)
            if done:
                break
        epoch += 1
    if collectives:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
