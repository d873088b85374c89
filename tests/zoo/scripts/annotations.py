"""Train a detector: with its pictures each batch carries the raw annotations, thousands of small Python objects.

With ``--packed`` they are sent as the bytes of one tensor, and their categories as another.
"""

from __future__ import annotations

import pickle
from typing import Any

import common
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scenes(Dataset):
    def __init__(self, boxes: int) -> None:
        self.pictures = torch.rand(16, 3, 64, 64)
        self.boxes = [[self.box(number, box) for box in range(boxes)] for number in range(len(self.pictures))]

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        number = index % len(self.pictures)
        return self.pictures[number], self.boxes[number]

    @staticmethod
    def box(number: int, box: int) -> dict[str, Any]:
        corners = " ".join(f"{number * 1.5 + box / (1 + corner):.3f}" for corner in range(40))
        return {"id": f"{number}-{box}", "category": box % 10, "polygon": corners, "score": 1 / (1 + box)}


def gather(samples):
    return torch.stack([picture for picture, _ in samples]), [boxes for _, boxes in samples]


def pack(samples):
    pictures, boxes = gather(samples)
    packed = torch.frombuffer(bytearray(pickle.dumps(boxes)), dtype=torch.uint8)
    return pictures, packed, categories(boxes)


def categories(boxes):
    return torch.tensor([found[0]["category"] for found in boxes])


def train_step(model, optimizer, pictures, labels):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(pictures), labels).backward()
    optimizer.step()


def main() -> None:
    parser = common.arguments(__doc__, num_workers=1, start_method="spawn")
    parser.add_argument("--boxes", type=int, default=1200, help="of a scene")
    parser.add_argument("--packed", action="store_true")
    options = parser.parse_args()
    loader = DataLoader(
        Scenes(options.boxes),
        batch_size=options.batch_size,
        shuffle=True,
        collate_fn=pack if options.packed else gather,
        **common.loader_settings(options),
    )
    model = common.picture_network(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pace = common.Pace(options)
    for pictures, boxes, *labels in loader:
        train_step(model, optimizer, pictures, labels[0] if options.packed else categories(boxes))
        if pace.step():
            break


if __name__ == "__main__":
    main()
