"""MONAI's ThreadDataLoader: a thread iterates the DataLoader, and the loop waits in its queue."""

import inspect
import sys

import common
import torch
from monai.data import ThreadDataLoader


def main():
    workers, record = int(sys.argv[1]), common.Record()
    model = common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = ThreadDataLoader(common.Slow(80), batch_size=4, num_workers=workers)
    check = ThreadDataLoader(common.Slow(20), batch_size=4, num_workers=0)
    steps = 0
    for _ in range(3):
        for inputs, targets in loader:
            record.batch(inputs)
            common.train_step(model, optimizer, inputs, targets)
            steps += 1
        with torch.no_grad():
            for inputs, _ in check:
                model(inputs)
        record.epoch()
    broken = ThreadDataLoader(common.Slow(0, seconds=0), batch_size=4)
    iterator = iter(loader)
    record.facts = {
        "len": len(loader),
        "type": type(loader).__name__,
        "iterator": type(iterator).__name__,
        "state": inspect.getgeneratorstate(iterator),
        "empty": common.error_of(lambda: broken),
    }
    record.end(steps)


main()
