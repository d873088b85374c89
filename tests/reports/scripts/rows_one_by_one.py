"""pytorch/pytorch#106704, pytorch/pytorch#4959: rows that are in memory are fetched one by one."""

import common
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler


class Rows(Dataset):
    def __init__(self):
        self.values, self.targets = torch.randn(300_000, 16), torch.randn(300_000)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index], self.targets[index]  # <- slow


def main():
    torch.set_num_threads(1)
    rows = Rows()
    if common.FIXED:
        loader = DataLoader(rows, sampler=BatchSampler(RandomSampler(rows), 256, drop_last=False), batch_size=None)
    else:
        loader = DataLoader(rows, batch_size=256, shuffle=True, num_workers=common.workers(0))
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    pace = common.Pace()
    while not pace.over:
        for values, targets in loader:
            loss = (model(values).squeeze(1) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if pace.step(len(values)):
                break
    pace.say()


if __name__ == "__main__":
    main()
