"""lanpa/tensorboardX#372, wandb/wandb#2268, pytorch/pytorch#43328: histograms of all weights in each step."""

import tempfile
import time

import common
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((256,), 1e-3 * (index % 97))


def main():
    torch.set_num_threads(1)
    writer = SummaryWriter(tempfile.mkdtemp())
    loader = DataLoader(Rows(), batch_size=32, num_workers=common.workers(1))
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    every = 100 if common.FIXED else 1
    pace, step = common.Pace(), 0
    for x in loader:
        time.sleep(0.02)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0:
            for name, parameter in model.named_parameters():
                writer.add_histogram(name, parameter, step)  # <- slow
                writer.add_histogram(f"{name}.grad", parameter.grad, step)  # <- slow
        step += 1
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
