"""A training that resumes from its checkpoint, on any number of ranks. It ends when the file named first is there.

Each rank writes its own stamps beside the checkpoint: JSON lines with ``what`` and ``at`` in Unix seconds, which
`tests.faults.attempt_scripts` turns into books. Until when it was there is in another file.
"""

import atexit
import json
import os
import struct
import sys
import threading
import time

until, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
attempt = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
stamps = open(f"{folder}/stamps-{attempt}-{rank}.jsonl", "a", buffering=1)
alive = os.open(f"{folder}/alive-{attempt}-{rank}", os.O_WRONLY | os.O_CREAT)


def stamp(what, **fields):
    stamps.write(json.dumps({"what": what, "at": time.time()} | fields) + "\n")


def live():
    while True:
        os.pwrite(alive, struct.pack("d", time.time()), 0)
        time.sleep(0.003)


def age():
    """Seconds since this process was started."""
    ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
    return float(open("/proc/uptime").read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


threading.Thread(target=live, daemon=True).start()
stamp("process", began=time.time() - age(), pid=os.getpid())
atexit.register(lambda: stamp("bye"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from tests.quick_optimizers import CountingSGD  # noqa: E402


def evaluate(net):
    net.eval()
    with torch.no_grad():
        for batch in DataLoader(torch.ones(4, 16)):
            net(batch)
            time.sleep(0.02)
    net.train()


def main():
    dist.init_process_group("gloo")
    net = torch.nn.Linear(16, 1)
    optimizer = CountingSGD(net.parameters())
    number, path = 0, f"{folder}/checkpoint.pt"
    if os.path.exists(path):
        stamp("loads")
        state = torch.load(path)
        stamp("loaded")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        number = state["step"]
    stamp("starts", step=number)
    batches = iter(DataLoader(torch.ones(1_000_000, 16)))
    done = torch.tensor(0.0)
    while not done:
        number += 1
        stamp("asks", number=number)
        batch = next(batches)
        stamp("got", number=number)
        net(batch).sum().backward()
        done = torch.tensor(float(os.path.exists(until)))
        for tensor in [done, *(parameter.grad for parameter in net.parameters())]:
            dist.all_reduce(tensor)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)
        stamp("stepped", number=number)
        if number % 20 == 10:
            stamp("evaluates")
            evaluate(net)
            stamp("evaluated")
        if number % 20 == 0 and rank == 0:
            stamp("saves")
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": number}, f"{path}.new")
            stamp("saved")
            os.replace(f"{path}.new", path)
    stamp("asks", number=number + 1)
    stamp("ends")
    dist.destroy_process_group()


main()
