"""zarr-developers/zarr-python#66: each item opens its archive anew, which reads the whole directory of the archive."""

import tempfile
import zipfile
from pathlib import Path

import common
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

MEMBERS = 3000


class Tiles(Dataset):
    def __init__(self, path):
        self.path, self.archive = path, None

    def __len__(self):
        return MEMBERS

    def __getitem__(self, index):
        if not common.FIXED:
            with zipfile.ZipFile(self.path) as archive:  # <- slow
                return self.tile(archive.read(f"{index}.bin"))
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        return self.tile(self.archive.read(f"{index}.bin"))

    def tile(self, content):
        return torch.from_numpy(np.frombuffer(content, dtype=np.float32).copy())


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiles.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for index in range(MEMBERS):
                archive.writestr(f"{index}.bin", np.full(64, index, dtype=np.float32).tobytes())
        loader = DataLoader(Tiles(path), batch_size=8, shuffle=True, num_workers=common.workers(1))
        trainer, pace = common.Trainer(seconds=0.04), common.Pace()
        while not pace.over:
            for x in loader:
                trainer.step(x)
                if pace.step(len(x)):
                    break
        pace.say()


if __name__ == "__main__":
    main()
