"""Lightning-AI/pytorch-lightning#12344, yenchenlin/nerf-pytorch#42: autograd's anomaly mode was left on."""

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Rays(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((24,), 1e-2 * (index % 97))


def main():
    torch.set_num_threads(1)
    torch.autograd.set_detect_anomaly(not common.FIXED)
    layers = [torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.LayerNorm(96), torch.nn.GELU()) for _ in range(14)]
    model = torch.nn.Sequential(torch.nn.Linear(24, 96), *layers, torch.nn.Linear(96, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pace = common.Pace()
    for x in DataLoader(Rays(), batch_size=64, num_workers=common.workers(1)):
        loss = (model(x).sigmoid() - 0.5).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
