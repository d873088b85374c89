"""A plain loop that keeps its model in safetensors and its optimizer beside it: ``safetensors_resume.py FOLDER``.

It throws away the batches that were trained before, one after the other.
"""

import common
import torch
from resuming import AGAIN, FOLDER, LAST, SAVED, trains
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader


def main():
    model = common.network()
    optimizer = torch.optim.Adam(model.parameters())
    if AGAIN:
        model.load_state_dict(load_file(FOLDER / "model.safetensors"))
        optimizer.load_state_dict(torch.load(FOLDER / "optimizer.pt"))
    for step, (inputs, targets) in enumerate(DataLoader(common.Slow(80), 4), 1):
        if AGAIN and step <= SAVED:
            continue
        trains(step)
        common.train_step(model, optimizer, inputs, targets)
        if step == SAVED:
            save_file(model.state_dict(), FOLDER / "model.safetensors")
            torch.save(optimizer.state_dict(), FOLDER / "optimizer.pt")
        if step == LAST:
            break


main()
