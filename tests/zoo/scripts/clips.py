"""Train on video clips: the collate_fn returns NumPy arrays, which travel to the training process by pickle.

With ``--tensors`` it returns tensors, which lie in shared memory.
"""

from __future__ import annotations

import common
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Clips(Dataset):
    """Clips of shape (frames, 3, side, side), cut out of films in memory."""

    def __init__(self, frames: int, side: int) -> None:
        self.films = np.random.default_rng(0).integers(0, 256, (4, 3 * frames, 3, side, side), dtype=np.uint8)
        self.frames = frames

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        start = index % (2 * self.frames)
        return self.films[index % 4, start : start + self.frames], index % 10


def stack(samples: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.stack([clip for clip, _ in samples]), np.array([label for _, label in samples])


def stack_tensors(samples: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    clips, labels = stack(samples)
    return torch.from_numpy(clips), torch.from_numpy(labels)


def train_step(model, optimizer, clips, labels):
    pictures = torch.as_tensor(clips[:, ::16, :, ::2, ::2].reshape(-1, 3, 56, 56)) / 255.0
    logits = model(pictures).reshape(len(labels), -1, 10).mean(1)
    loss = nn.functional.cross_entropy(logits, torch.as_tensor(labels))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    parser = common.arguments(__doc__, num_workers=2)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--tensors", action="store_true")
    options = parser.parse_args()
    loader = DataLoader(
        Clips(options.frames, 112),
        batch_size=options.batch_size,
        shuffle=True,
        collate_fn=stack_tensors if options.tensors else stack,
        **common.loader_settings(options),
    )
    model = common.picture_network(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pace = common.Pace(options)
    for clips, labels in loader:
        train_step(model, optimizer, clips, labels)
        if pace.step():
            break


if __name__ == "__main__":
    main()
