"""Train on a stream that is no DataLoader, like those of data-set hubs; telemetry is told of it with ``watch``.

With ``--num-workers`` the workers of a DataLoader read it instead.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import common
import samples
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import telemetry


class StreamingDataset:
    """Records of a compressed file of JSON lines, over and over."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[dict[str, str]]:
        while True:
            with gzip.open(self.path, "rt", encoding="utf-8") as lines:
                for line in lines:
                    yield json.loads(line)


def batches(records: Iterator[dict[str, str]], size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokenised and cut to 128 tokens."""
    while True:
        rows = []
        labels = []
        for _ in range(size):
            record = next(records)
            tokens = [sum(map(ord, word)) % 4096 for word in record["text"].split()]
            rows.append(torch.tensor(tokens[:128]))
            labels.append(int(record["label"]))
        yield torch.stack(rows), torch.tensor(labels)


class Batches(IterableDataset):
    """The same stream, for the workers of a DataLoader."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return batches(iter(StreamingDataset(self.path)), self.size)


def train_step(model, optimizer, tokens, labels):
    loss = nn.functional.cross_entropy(model(tokens), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    parser = common.arguments(__doc__, batch_size=8)
    parser.add_argument("--words", type=int, default=20_000, help="of a document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        path = Path(folder) / "records.jsonl.gz"
        with gzip.open(path, "wt", encoding="utf-8") as file:
            for number, text in enumerate(samples.documents(50, options.words)):
                file.write(json.dumps({"text": text, "label": str(number % 10)}) + "\n")
        stream: Iterable = telemetry.watch(batches(iter(StreamingDataset(path)), options.batch_size))
        if options.num_workers:
            dataset = Batches(path, options.batch_size)
            stream = DataLoader(dataset, batch_size=None, **common.loader_settings(options))
        model = common.TextNetwork(options.width)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        pace = common.Pace(options)
        for tokens, labels in stream:
            train_step(model, optimizer, tokens, labels)
            if pace.step():
                break


if __name__ == "__main__":
    main()
