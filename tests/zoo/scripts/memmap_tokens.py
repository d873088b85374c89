"""Train a language model on a memory-mapped file of tokens, without a DataLoader, as small ones are."""

from __future__ import annotations

import tempfile
from pathlib import Path

import common
import numpy as np
import torch
from torch import nn


class Language(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.embedding = nn.Embedding(512, 2 * width)
        layer = nn.TransformerEncoderLayer(2 * width, 2, 8 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(2 * width, 512)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.body(self.embedding(tokens), mask=mask, is_causal=True))


def get_batch(path: Path, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = np.memmap(path, dtype=np.uint16, mode="r")  # anew each time, against a leak of memory
    starts = torch.randint(len(data) - length - 1, (size,))
    rows = [torch.from_numpy(data[start : start + length + 1].astype(np.int64)) for start in starts]
    tokens = torch.stack(rows)
    return tokens[:, :-1], tokens[:, 1:]


def train_step(model, optimizer, tokens, following):
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def main() -> None:
    options = common.arguments(__doc__, batch_size=8).parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        path = Path(folder) / "train.bin"
        np.random.default_rng(0).integers(0, 512, 2_000_000, dtype=np.uint16).tofile(path)
        model = Language(options.width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        pace = common.Pace(options)
        while True:
            tokens, following = get_batch(path, options.batch_size, 96)
            train_step(model, optimizer, tokens, following)
            if pace.step():
                break


if __name__ == "__main__":
    main()
