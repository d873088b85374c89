"""``restarted_training.py [FOLDER]``: a training, on any number of ranks, that is killed and started again.

FOLDER has its checkpoint and, for each attempt and rank, its own stamps: JSON lines with ``what`` and ``at`` in Unix
seconds. ``alive-…`` has until when it was there. ``plan-N.json`` may say how attempt N ends or blocks, and ``until`` at
which step the training ends.
"""

import atexit
import json
import os
import struct
import sys
import threading
import time

folder = sys.argv[1] if len(sys.argv) > 1 else "."
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
attempt = sum(
    int(os.environ.get(name) or 0) for name in ("ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
)
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
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from tests.quick_optimizers import CountingSGD  # noqa: E402

FETCH_SECONDS = float(os.environ.get("FETCH_SECONDS", "0.004"))
HANG_SECONDS = 3.0
SAVE_EVERY, EVALUATE_EVERY = 20, 20


def read(name, default):
    try:
        return json.load(open(f"{folder}/{name}"))
    except OSError:
        return default


def block():
    stamp("blocked")
    os.read(os.pipe()[0], 1)


plan = {"end": "", "rank": 0, "after": 0, "hangs_after": 40 if attempt % 2 == 0 else 0} | read(
    f"plan-{attempt}.json", {}
)
mine = rank == plan["rank"]
number = resumed = hangs = 0


class Slow:  # takes its time to be saved and loaded
    def __getstate__(self):
        if plan["end"] == "checkpoint" and mine and number == resumed + plan["after"]:
            block()
        time.sleep(0.15)
        return {"x": 1}

    def __setstate__(self, state):
        if plan["end"] == "restore" and mine:
            block()
        time.sleep(0.3)


class Data(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(HANG_SECONDS if index + 1 == hangs else FETCH_SECONDS)
        return torch.ones(16) * (index % 7)


def evaluate(net):
    stamp("evaluates")
    net.eval()
    with torch.no_grad():
        for batch in DataLoader(torch.ones(4, 16)):
            net(batch)
            time.sleep(0.02)
    net.train()
    stamp("evaluated")


def main():
    global number, resumed, hangs
    if world > 1:
        # A store of its own: in the launcher's, gloo finds the addresses of the attempt before.
        dist.init_process_group(
            "gloo", init_method=f"file://{os.path.abspath(folder)}/store-{attempt}", rank=rank, world_size=world
        )
    net = torch.nn.Linear(16, 1)
    optimizer = CountingSGD(net.parameters())
    if os.path.exists(f"{folder}/checkpoint.pt"):
        stamp("loads")
        state = torch.load(f"{folder}/checkpoint.pt", weights_only=False)
        stamp("loaded")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        resumed = state["step"]
    if rank == 0 and plan["hangs_after"]:
        hangs = resumed + plan["hangs_after"]  # the fetch of this step; the other ranks wait in it
    stamp("starts", step=resumed)
    batches, done = iter(DataLoader(Data(), batch_size=1)), torch.tensor(0.0)
    while not done:
        stamp("asks", number=number + 1)
        batch = next(batches)
        number += 1
        stamp("got", number=number)
        if number <= resumed:
            continue
        if plan["end"] == "step" and mine and number == resumed + plan["after"]:
            block()
        time.sleep(4 * FETCH_SECONDS)
        net(batch).sum().backward()
        done = torch.tensor(float(number >= read("until", 1 << 30)))
        for tensor in [done, *(parameter.grad for parameter in net.parameters())] if world > 1 else ():
            dist.all_reduce(tensor)
        optimizer.step()
        stamp("stepped", number=number)
        optimizer.zero_grad()
        if number % EVALUATE_EVERY == EVALUATE_EVERY // 2:
            evaluate(net)
        if number % SAVE_EVERY == 0 and rank == 0:
            stamp("saves")
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": number, "slow": Slow()}
            torch.save(state, f"{folder}/new.pt")
            stamp("saved")
            os.replace(f"{folder}/new.pt", f"{folder}/checkpoint.pt")
        if mine and number == resumed + plan["after"]:
            if plan["end"] == "exception":
                raise ValueError("as told")
            if plan["end"] == "status":
                sys.exit(3)
    stamp("asks", number=number + 1)
    stamp("ends")
    if world > 1:
        dist.destroy_process_group()


main()
