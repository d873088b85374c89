"""Train on samples from a slow server, and lose about as much time to the upload of checkpoints."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import common
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import telemetry


class Remote(Dataset):
    """Each sample is a request to a server."""

    def __init__(self, read_ms: float) -> None:
        self.seconds = read_ms / 1e3
        self.picture = torch.rand(3, 64, 64)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return self.picture, index % 10


def checkpoint(model: nn.Module, folder: Path, upload_ms: float) -> None:
    with telemetry.phase("checkpoint"):
        torch.save(model.state_dict(), folder / "newest.pt")
        time.sleep(upload_ms / 1e3)  # an upload


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--read-ms", type=float, default=4.0, help="per sample")
    parser.add_argument("--checkpoint-every", type=int, default=5, help="steps")
    parser.add_argument("--upload-ms", type=float, default=500.0)
    options = parser.parse_args()
    loader = DataLoader(Remote(options.read_ms), options.batch_size, **common.loader_settings(options))
    model = common.picture_network(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pace = common.Pace(options)
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        for step, (pictures, labels) in enumerate(loader, 1):
            common.train_step(model, optimizer, pictures, labels)
            if step % options.checkpoint_every == 0:
                checkpoint(model, Path(folder), options.upload_ms)
            if pace.step():
                break


if __name__ == "__main__":
    main()
