"""Rows of a NumPy table are copied one by one into a dictionary of tensors."""

import common
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Table(Dataset):
    def __init__(self):
        generator = np.random.default_rng(0)
        self.numbers = generator.standard_normal((200_000, 24), dtype=np.float32)
        self.codes = generator.integers(0, 50, (200_000, 4))

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return {
            "numbers": torch.from_numpy(self.numbers[index]),  # <- slow
            "codes": torch.from_numpy(self.codes[index]),  # <- slow
        }


class WholeBatches(Table):
    def __getitems__(self, indices):
        return {"numbers": torch.from_numpy(self.numbers[indices]), "codes": torch.from_numpy(self.codes[indices])}


def main():
    torch.set_num_threads(1)
    keep = {"collate_fn": dict} if common.FIXED else {}
    table = WholeBatches() if common.FIXED else Table()
    loader = DataLoader(table, batch_size=512, shuffle=True, num_workers=common.workers(0), **keep)
    embedding, body = torch.nn.Embedding(50, 4), torch.nn.Linear(24 + 16, 1)
    optimizer = torch.optim.SGD([*embedding.parameters(), *body.parameters()], lr=1e-4)
    pace = common.Pace()
    while not pace.over:
        for batch in loader:
            x = torch.cat([batch["numbers"], embedding(batch["codes"]).flatten(1)], 1)
            loss = body(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if pace.step(len(x)):
                break
    pace.say()


if __name__ == "__main__":
    main()
