"""Train on documents of very uneven length: most are short, every so often one is a book, and is parsed whole.

While a worker parses one, it hands over no file descriptor of the batches that it has finished before.
"""

from __future__ import annotations

import common
import samples
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Library(Dataset):
    def __init__(self, texts: list[str], book_every: int, pages: int) -> None:
        self.texts = texts
        self.book_every = book_every
        self.pages = pages

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pages = self.pages if index % self.book_every == 0 else 1
        tokens: list[int] = []
        for page in range(pages):
            for word in self.texts[(index + page) % len(self.texts)].split():
                tokens.append(sum(ord(letter) * 31**place for place, letter in enumerate(word)) % 4096)
        start = int(torch.randint(0, max(1, len(tokens) - 128), ()))
        return torch.tensor(tokens[start : start + 128]), index % 10


def train_step(model, optimizer, tokens, labels):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens), labels).backward()
    optimizer.step()


def main() -> None:
    parser = common.arguments(__doc__, batch_size=8, num_workers=2)
    parser.add_argument("--words", type=int, default=140, help="of a page")
    parser.add_argument("--book-every", type=int, default=150, help="samples")
    parser.add_argument("--pages", type=int, default=1500, help="of a book")
    parser.add_argument("--sharing-strategy", default="file_descriptor", choices=("file_descriptor", "file_system"))
    options = parser.parse_args()
    torch.multiprocessing.set_sharing_strategy(options.sharing_strategy)
    library = Library(samples.documents(300, options.words), options.book_every, options.pages)
    loader = DataLoader(library, batch_size=options.batch_size, **common.loader_settings(options))
    model = common.TextNetwork(options.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    pace = common.Pace(options)
    for tokens, labels in loader:
        train_step(model, optimizer, tokens, labels)
        if pace.step():
            break


if __name__ == "__main__":
    main()
