"""A thread of the training process tokenises the next file while the training runs."""

import re
import threading

import common
import torch
from torch.utils.data import DataLoader, Dataset

TEXT = "The quick brown fox doesn't jump over 13 lazy dogs, it sleeps. " * 40
WORD = re.compile(r"[A-Za-z]+'?[a-z]*|\d+|[^\sA-Za-z\d]")


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((128,), float(index % 97))


def tokenise():
    vocabulary = {}
    while True:
        for match in WORD.finditer(TEXT):  # <- slow
            word = match.group().lower()  # <- slow
            vocabulary[word] = vocabulary.get(word, 0) + 1  # <- slow


def main():
    torch.set_num_threads(1)
    if not common.FIXED:
        threading.Thread(target=tokenise, name="tokeniser", daemon=True).start()
    loader = DataLoader(Rows(), batch_size=16, num_workers=common.workers(1))
    model = torch.nn.Sequential(*[layer for _ in range(8) for layer in (torch.nn.Linear(128, 128), torch.nn.Tanh())])
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
