"""pytorch/pytorch#11201, pytorch/pytorch#973: kept tensors of the workers hold a file descriptor each, until none is left."""

import resource

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return {"x": torch.full((64,), index % 97.0), "label": index % 10}


def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))  # the usual limit
    loader = DataLoader(Rows(), batch_size=16, shuffle=True, num_workers=common.workers(2))
    trainer, pace, labels = common.Trainer(64, seconds=0.01), common.Pace(), []
    for batch in loader:  # <- slow
        trainer.step(batch["x"])
        labels.append(batch["label"].clone() if common.FIXED else batch["label"])
        if pace.step(len(batch["x"])):
            break
    pace.say()


if __name__ == "__main__":
    main()
