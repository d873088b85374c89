"""Train on a folder of photographs: Pillow decodes and augments each, as most first scripts do it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import common
import numpy as np
import samples
import torch
from PIL import Image, ImageEnhance
from torch.utils.data import DataLoader, Dataset, RandomSampler


class PictureFolder(Dataset):
    def __init__(self, paths: list[Path], size: int) -> None:
        self.paths = paths
        self.size = size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as file:
            picture = file.convert("RGB")
        left, top = (int(torch.randint(0, side // 4, ())) for side in picture.size)
        picture = picture.resize((self.size, self.size), box=(left, top, *picture.size))
        picture = ImageEnhance.Color(picture).enhance(float(torch.rand(())) + 0.5)
        if torch.rand(()) < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255, index % 10


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--picture-width", type=int, default=640)
    parser.add_argument("--size", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        paths = samples.write_photographs(Path(folder), 100, options.picture_width, options.picture_width * 3 // 4)
        dataset = PictureFolder(paths, options.size)
        sampler = RandomSampler(dataset, replacement=True, num_samples=1_000_000)
        loader = DataLoader(dataset, batch_size=options.batch_size, sampler=sampler, **common.loader_settings(options))
        common.train(loader, options)


if __name__ == "__main__":
    main()
