"""accelerate: a prepared loader reads one batch ahead, on the training thread."""

import sys
import tempfile

import accelerate
import common
import torch
from torch.utils.data import DataLoader


def main():
    record, accelerator = common.Record(), accelerate.Accelerator(cpu=True)
    model = common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(common.Slow(80), 4, num_workers=int(sys.argv[1]))
    check = DataLoader(common.Slow(20), 4)
    model, optimizer, loader, check = accelerator.prepare(model, optimizer, loader, check)
    steps = 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            for inputs, targets in loader:
                record.batch(inputs)
                common.train_step(model, optimizer, inputs, targets)
                steps += 1
            with torch.no_grad():
                for inputs, _ in check:
                    model(inputs)
            accelerator.save_state(folder)
            record.epoch()
    record.facts = {"len": len(loader), "type": type(loader).__name__, "iterator": type(iter(loader)).__name__}
    record.end(steps)


main()
