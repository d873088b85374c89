"""A training that resumes from its checkpoint, on any number of ranks. It ends when the file named first is there.

Each rank writes its own stamps beside the checkpoint: JSON lines with ``what``, ``at`` in Unix seconds and ``step``.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

until, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
attempt = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
stamps = open(f"{folder}/stamps-{attempt}-{rank}.jsonl", "a", buffering=1)


def stamp(what, step):
    stamps.write(json.dumps({"what": what, "at": time.time(), "step": step}) + "\n")


def main():
    dist.init_process_group("gloo")
    net = torch.nn.Linear(16, 1)
    optimizer = torch.optim.Adam(net.parameters())
    step, path = 0, f"{folder}/checkpoint.pt"
    if os.path.exists(path):
        state = torch.load(path)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    stamp("starts", step)
    for batch in DataLoader(torch.ones(1_000_000, 16)):
        net(batch).sum().backward()
        done = torch.tensor(float(os.path.exists(until)))
        for tensor in [done, *(parameter.grad for parameter in net.parameters())]:
            dist.all_reduce(tensor)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)
        step += 1
        stamp("stepped", step)
        if step % 20 == 0 and rank == 0:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{path}.new")
            os.replace(f"{path}.new", path)
        if done:
            break
    stamp("ends", step)
    dist.destroy_process_group()


main()
