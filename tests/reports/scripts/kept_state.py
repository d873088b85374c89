"""The hidden state of a recurrent cell goes from step to step and is never detached."""

import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Notes(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((32,), 1e-3 * (index % 97))


def main():
    torch.set_num_threads(1)
    loader = DataLoader(Notes(), batch_size=16, num_workers=common.workers(1))
    cell, head = torch.nn.GRUCell(32, 64), torch.nn.Linear(64, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-6)
    pace, state = common.Pace(), torch.zeros(16, 64)
    for x in loader:
        time.sleep(0.01)
        state = cell(x, state.detach() if common.FIXED else state)
        loss = head(state).square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=not common.FIXED)  # <- slow
        optimizer.step()
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
