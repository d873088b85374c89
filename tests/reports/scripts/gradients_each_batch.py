"""Lightning-AI/pytorch-lightning#4092: DDP reduces the gradients of each batch, although only every sixth one is a step."""

import contextlib

import common
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

ACCUMULATED = 6


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((256,), 1e-2 * (index % 97))


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Tanh()) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 1024), *layers, torch.nn.Linear(1024, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    pace, over = common.Pace(), torch.zeros(1)
    for number, x in enumerate(DataLoader(Rows(), batch_size=4, num_workers=common.workers(0)), 1):
        steps = number % ACCUMULATED == 0
        with contextlib.nullcontext() if steps or not common.FIXED else model.no_sync():
            (model(x).square().mean() / ACCUMULATED).backward()  # <- slow
        over += pace.step(len(x))
        if steps:
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(over)
            if over > 0:
                break
    if dist.get_rank() == 0:
        pace.say()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
