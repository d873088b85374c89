"""Classify documents: a collate_fn tokenises them in pure Python and pads, and the loop asks for batches by hand."""

from __future__ import annotations

import re

import common
import samples
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WORD = re.compile(r"\w+")


class Documents(Dataset):
    def __init__(self, texts: list[str], length: int) -> None:
        self.texts = texts
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.texts[index % len(self.texts)], index % 10


class Tokenizer:
    """Words into pieces, the longest known first."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.pieces = {piece: number for number, piece in enumerate(("ka", "to", "mi", "ren", "sul", "ova", "pe"), 1)}

    def tokens(self, text: str) -> list[int]:
        found: list[int] = []
        for word in WORD.findall(text):
            at = 0
            while at < len(word):
                for end in range(min(len(word), at + 4), at, -1):
                    number = self.pieces.get(word[at:end])
                    if number is not None or end == at + 1:
                        found.append(number if number is not None else 16 + ord(word[at]) % 64)
                        at = end
                        break
        return found

    def __call__(self, samples: list[tuple[str, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = torch.zeros(len(samples), self.length, dtype=torch.long)
        for row, (text, _) in enumerate(samples):
            tokens = self.tokens(text)[: self.length]
            batch[row, : len(tokens)] = torch.tensor(tokens)
        return batch, torch.tensor([label for _, label in samples])


def train_step(model, optimizer, parts):
    """One update from the gradients of several small batches."""
    optimizer.zero_grad()
    for tokens, labels in parts:
        loss = nn.functional.cross_entropy(model(tokens), labels) / len(parts)
        loss.backward()
    optimizer.step()


def main() -> None:
    parser = common.arguments(__doc__, batch_size=8)
    parser.add_argument("--words", type=int, default=1500, help="of a document")
    parser.add_argument("--length", type=int, default=128, help="tokens that are used of it")
    parser.add_argument("--accumulate", type=int, default=1, help="batches an update")
    parser.add_argument("--samples", type=int, default=1_000_000, help="of an epoch")
    options = parser.parse_args()
    loader = DataLoader(
        Documents(samples.documents(200, options.words), options.samples),
        batch_size=options.batch_size,
        shuffle=True,
        collate_fn=Tokenizer(options.length),
        drop_last=True,
        **common.loader_settings(options),
    )
    model = common.TextNetwork(options.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    pace = common.Pace(options)
    batches = iter(loader)
    over = False
    while not over:
        parts = []
        while len(parts) < options.accumulate:
            try:
                parts.append(next(batches))
            except StopIteration:
                batches = iter(loader)
        train_step(model, optimizer, parts)
        over = pace.step()


if __name__ == "__main__":
    main()
