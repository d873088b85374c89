"""Train on rows of an SQLite database: each a compressed JSON record that becomes a picture-like array."""

from __future__ import annotations

import json
import sqlite3
import tempfile
import zlib
from pathlib import Path

import common
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

ROWS = 300


def write_database(path: Path) -> None:
    generator = np.random.default_rng(0)
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE records (number INTEGER PRIMARY KEY, content BLOB)")
        for number in range(ROWS):
            values = generator.integers(0, 256, 3 * 48 * 48).tolist()
            content = zlib.compress(json.dumps({"label": number % 10, "values": values}).encode())
            database.execute("INSERT INTO records VALUES (?, ?)", (number, content))


class Records(Dataset):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.database: sqlite3.Connection | None = None

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.database is None:  # a connection must not be shared by processes
            self.database = sqlite3.connect(self.path)
        query = "SELECT content FROM records WHERE number = ?"
        (content,) = self.database.execute(query, (index % ROWS,)).fetchone()
        record = json.loads(zlib.decompress(content))
        pixels = torch.tensor(record["values"], dtype=torch.float32).reshape(3, 48, 48) / 255
        return pixels, record["label"]


def main() -> None:
    options = common.arguments(__doc__, batch_size=32).parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        path = Path(folder) / "records.db"
        write_database(path)
        loader = DataLoader(
            Records(path), batch_size=options.batch_size, shuffle=True, **common.loader_settings(options)
        )
        common.train(loader, options)


if __name__ == "__main__":
    main()
