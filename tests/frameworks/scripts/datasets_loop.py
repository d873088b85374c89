"""Hugging Face's datasets, made in memory, behind a DataLoader."""

import os
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import common
import datasets
import torch
from torch.utils.data import DataLoader


def prepare(rows):
    time.sleep(common.SECONDS * len(rows["number"]))
    return {
        "inputs": [torch.full((4,), float(number)) for number in rows["number"]],
        "targets": [torch.tensor([1.0]) for _ in rows["number"]],
    }


def main():
    record, model = common.Record(), common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = datasets.Dataset.from_dict({"number": list(range(80))}).with_transform(prepare)
    loader = DataLoader(rows, 4, num_workers=int(sys.argv[1]))
    steps = 0
    for _ in range(3):
        for batch in loader:
            record.batch(batch["inputs"])
            common.train_step(model, optimizer, batch["inputs"], batch["targets"])
            steps += 1
        record.epoch()
    record.facts = {"len": len(loader), "type": type(loader).__name__}
    record.end(steps)


main()
