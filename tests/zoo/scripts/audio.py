"""A Trainer class that trains on recordings: WAV files, NumPy spectrograms with random masks."""

from __future__ import annotations

import tempfile
import wave
from pathlib import Path

import common
import numpy as np
import samples
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Recordings(Dataset):
    """Log spectrograms of shape (3, frequencies, frames): three resolutions, stacked."""

    def __init__(self, paths: list[Path], length: int) -> None:
        self.paths = paths
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with wave.open(str(self.paths[index % len(self.paths)]), "rb") as file:
            sound = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16) / 32768
        return torch.from_numpy(np.stack([self.spectrogram(sound, size) for size in (256, 512, 1024)])), index % 10

    @staticmethod
    def spectrogram(sound: np.ndarray, size: int) -> np.ndarray:
        frames = np.lib.stride_tricks.sliding_window_view(sound, size)[:: size // 8]
        power = np.abs(np.fft.rfft(frames * np.hanning(size), axis=1)) ** 2
        start = np.random.randint(0, power.shape[0] - 8)
        power[start : start + 8] = 0
        rows = np.linspace(0, power.shape[0] - 1, 64).astype(int)
        columns = np.linspace(0, power.shape[1] - 1, 64).astype(int)
        return np.log1p(power)[np.ix_(rows, columns)].astype(np.float32)


class Trainer:
    def __init__(self, model: nn.Module, loader: DataLoader, pace: common.Pace) -> None:
        self.model = model
        self.loader = loader
        self.pace = pace
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)

    def train_step(self, batch) -> float:
        sounds, labels = batch
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(sounds), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def fit(self) -> None:
        self.model.train()
        for _ in range(1000):
            for batch in self.loader:
                self.train_step(batch)
                if self.pace.step():
                    return


def main() -> None:
    parser = common.arguments(__doc__, batch_size=12)
    parser.add_argument("--clip-seconds", type=float, default=1.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        paths = samples.write_recordings(Path(folder), 40, options.clip_seconds)
        loader = DataLoader(
            Recordings(paths, 100_000), batch_size=options.batch_size, shuffle=True, **common.loader_settings(options)
        )
        Trainer(common.picture_network(options.width), loader, common.Pace(options)).fit()


if __name__ == "__main__":
    main()
