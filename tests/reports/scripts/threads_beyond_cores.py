"""KTH-RPL/OpenSceneFlow#33, Unity-Technologies/ml-agents#4471: the step computes with as many threads as the host has cores."""

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((256,), 1e-3 * (index % 97))


def main():
    if common.FIXED:
        torch.set_num_threads(2)
    elif common.VARIANT == "base":
        torch.set_num_threads(32)  # the variant "environment" leaves it to OMP_NUM_THREADS
    loader = DataLoader(Rows(), batch_size=128, num_workers=common.workers(1))
    model = torch.nn.Sequential(*[layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh())])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    pace = common.Pace()
    for x in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
