"""Train on objects of a remote store, each fetched over HTTP when it is needed."""

from __future__ import annotations

import common
import numpy as np
import torch
from store_server import Behaviour, Client, remote_store
from torch.utils.data import DataLoader, Dataset


class Objects(Dataset):
    def __init__(self, client: Client, length: int) -> None:
        self.client = client
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        content = np.frombuffer(self.client.get(index)[:12288], dtype=np.uint8).reshape(3, 64, 64)
        return torch.from_numpy(content / np.float32(255)), index % 10


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--object-bytes", type=int, default=12288)
    parser.add_argument("--latency-ms", type=float, default=10.0)
    parser.add_argument("--megabytes-per-second", type=float, default=0.0, help="of one connection; 0: no limit")
    parser.add_argument("--cold-every", type=int, default=0)
    parser.add_argument("--cold-seconds", type=float, default=0.3)
    parser.add_argument("--silent-after", type=float, default=0.0)
    parser.add_argument("--silent-seconds", type=float, default=0.0)
    options = parser.parse_args()
    behaviour = Behaviour(
        object_bytes=options.object_bytes,
        latency=options.latency_ms / 1e3,
        bytes_per_second=options.megabytes_per_second * 1e6,
        cold_every=options.cold_every,
        cold_seconds=options.cold_seconds,
        silent_after=options.silent_after,
        silent_seconds=options.silent_seconds,
    )
    with remote_store(behaviour) as port:
        loader = DataLoader(
            Objects(Client(port), 1_000_000),
            batch_size=options.batch_size,
            shuffle=True,
            **common.loader_settings(options),
        )
        common.train(loader, options)


if __name__ == "__main__":
    main()
