"""accelerate saves its state, loads it, and skips the batches that were trained: ``accelerate_resume.py FOLDER``."""

import accelerate
import common
import torch
from resuming import AGAIN, FOLDER, LAST, SAVED, trains
from torch.utils.data import DataLoader


def main():
    accelerator = accelerate.Accelerator(cpu=True)
    model = common.network()
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(common.Slow(80), 4))
    step = 0
    if AGAIN:
        accelerator.load_state(FOLDER / "out")
        step, loader = SAVED, accelerate.skip_first_batches(loader, SAVED)
    for inputs, targets in loader:
        step += 1
        trains(step)
        common.train_step(model, optimizer, inputs, targets)
        if step == SAVED:
            accelerator.save_state(FOLDER / "out")
        if step == LAST:
            break


main()
