"""Detection: a loader whose workers go on from epoch to epoch. The trainer asks it for as many batches as an epoch has."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from truth import Truth

truth = Truth()


class Scenes(Dataset):
    def __len__(self) -> int:
        return 402

    def __getitem__(self, index: int):
        return {"img": torch.full((3, 64, 64), index % 255, dtype=torch.uint8), "boxes": torch.rand(index % 5 + 1, 4)}

    @staticmethod
    def collate(rows):
        return {"img": torch.stack([row["img"] for row in rows]), "boxes": torch.cat([row["boxes"] for row in rows])}


class Repeated:
    def __init__(self, sampler) -> None:
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class EndlessLoader(DataLoader):
    """Its iterator is made once."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class Trainer:
    def __init__(self) -> None:
        layers = [
            nn.Conv2d(3, 48, 3, 2),
            nn.SiLU(),
            nn.Conv2d(48, 64, 3, 2),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(14400, 4),
        ]
        self.model = nn.Sequential(*layers)
        self.averaged = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, nesterov=True, momentum=0.9)
        self.loader = EndlessLoader(Scenes(), batch_size=16, shuffle=True, num_workers=1, collate_fn=Scenes.collate)
        checks = {"batch_size": 32, "num_workers": 1, "persistent_workers": True, "collate_fn": Scenes.collate}
        self.checks = DataLoader(Scenes(), **checks)

    def train(self) -> None:
        while not truth.over():
            self.model.train()
            truth.asks()
            for batch in self.loader:
                truth.gets()
                images = batch["img"].float() / 255
                with truth.timed("forward"):
                    loss = self.model(images).square().mean() + batch["boxes"].mean()
                with truth.timed("backward"):
                    loss.backward()
                self.optimizer_step()
                truth.counts.update(steps=1, optimizer_steps=1, samples=len(images))
                truth.asks()
            truth.leaves()
            self.validate()
            truth.counts["epochs"] += 1

    def optimizer_step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        with truth.timed("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for kept, now in zip(self.averaged.parameters(), self.model.parameters(), strict=True):
                kept.mul_(0.99).add_(now, alpha=0.01)

    def validate(self) -> None:
        self.averaged.eval()
        with truth.timed("evaluation"), torch.inference_mode():
            for batch in self.checks:
                self.averaged(batch["img"].float() / 255)


if __name__ == "__main__":
    Trainer().train()
    truth.say()
