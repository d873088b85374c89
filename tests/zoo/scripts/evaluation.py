"""Train in epochs with an evaluation after each, over a loader with workers of its own and slow storage behind it."""

from __future__ import annotations

import time
from contextlib import nullcontext

import common
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset


class HeldOut(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.003)
        return torch.full((3, 64, 64), index / self.length), index % 10


def evaluate(model, loader) -> float:
    model.eval()
    right = sum(int((predicted(model, pictures) == labels).sum()) for pictures, labels in loader)
    model.train()
    return right / len(loader.dataset)


def predicted(model, pictures):
    with torch.no_grad():
        return model(pictures).argmax(1)


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--samples", type=int, default=1600, help="of an epoch")
    parser.add_argument("--around", choices=("function", "model"), default="function", help="where gradients are off")
    options = parser.parse_args()
    data = TensorDataset(torch.rand(options.samples, 3, 64, 64), torch.randint(0, 10, (options.samples,)))
    loader = DataLoader(data, options.batch_size, shuffle=True)
    held_out = DataLoader(HeldOut(400), options.batch_size, num_workers=options.num_workers)
    model = common.picture_network(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pace = common.Pace(options)
    while True:
        for pictures, labels in loader:
            common.train_step(model, optimizer, pictures, labels)
            if pace.step():
                return
        with torch.inference_mode() if options.around == "function" else nullcontext():
            right = evaluate(model, held_out)
        print(f"{100 * right:.0f} % right", flush=True)


if __name__ == "__main__":
    main()
