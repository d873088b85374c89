"""Jobs of several ranks on gloo that are made to hang, and what is written of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.faults.processes import environment, events, wait_for, write
from tests.faults.warm_python import WarmChild

STUCK_SECONDS = 1.0

UNNOTICED = """
    import os

    reading, writing = os.pipe()


    def all_reduce():
        os.read(reading, 1)
"""
"""Stands in for a collective of NCCL, which waits on when a peer dies. One of gloo raises."""

JOB = """
    import ctypes, multiprocessing, os, pdb, sys, threading, time
    import telemetry
    import torch
    import torch.distributed as dist
    from telemetry.agent import hangs
    from telemetry.node import peers
    from torch.utils.data import DataLoader, Dataset

    rank, world, odd, what = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork")
    mine = rank == odd
    lock = threading.Lock()
    lock.acquire()
    reading, writing = os.pipe()


    def say(text):
        print(text, flush=True)


    class Numbers(Dataset):
        def __len__(self):
            return AT if mine and what in {"left", "barrier"} else 40

        def __getitem__(self, index):
            if index == AT and mine and what in {"fetch", "worker"}:
                say("reached") if what == "fetch" else None
                os.read(reading, 1)  # the fetch
            return index


    class Storage:
        def write(self, data):
            os.read(reading, 1)  # the checkpoint

        def flush(self):
            pass


    def save():
        torch.save({}, Storage(), _use_new_zipfile_serialization=False)


    def in_the_step():
        say("reached")
        if what in {"compute", "ddp"}:
            time.sleep(1000)  # the compute
        elif what == "lock":
            lock.acquire()  # the lock
        elif what == "checkpoint":
            save()
        elif what == "evaluation":
            with torch.no_grad():
                for _ in DataLoader(range(4), batch_size=1):
                    os.read(reading, 1)  # the evaluation
        elif what == "order":
            dist.broadcast(torch.ones(3), 0)  # the other collective
        elif what == "gil":
            ctypes.PyDLL(None).sleep(1000)
        elif what == "signal":
            time.sleep(1000)
        elif what == "end":
            telemetry.stop()
            time.sleep(1000)


    def quiet(batch):
        if what == "evaluate" and batch == AT or what == "one_evaluates" and mine and batch == AT:
            with torch.no_grad():  # for longer than a checkpoint may stand still
                for _ in DataLoader(range(40), batch_size=1):
                    time.sleep(float(sys.argv[6]) / 4)
        elif what == "compile" and batch == 0 and mine:
            time.sleep(3 * float(sys.argv[6]))
        elif what == "debugger" and mine and batch == AT:
            lines, to_lines = os.pipe()
            debugger = pdb.Pdb(stdin=open(lines), stdout=open(os.devnull, "w"), nosigint=True, readrc=False)
            debugger.use_rawinput = False
            threading.Timer(8 * float(sys.argv[6]), os.write, (to_lines, b"continue" + bytes([10]))).start()
            debugger.set_trace()
        elif what == "slow" and mine:
            time.sleep(float(sys.argv[6]) / 2 if batch % 8 == 0 else 0)


    AT = int(os.environ.get("AT", "12"))
    QUIET = {"evaluate", "one_evaluates", "compile", "debugger", "slow"}
    peers.CYCLE_SECONDS = peers._SETTLE_SECONDS = 0.5
    hangs._PATIENCE_SECONDS = 6.0
    peers._ALIVE_SECONDS, peers._LOST_SECONDS = 4.5, 6.0
    sys.path.insert(0, sys.argv[5] + "/site-packages/torch/distributed")
    import unnoticed

    dist.init_process_group("gloo", init_method=f"file://{sys.argv[5]}/store", rank=rank, world_size=world)
    telemetry.start("run", run="r", port="off", interval_seconds=0.2, log_interval_seconds=0.5, start_line=False,
                    stuck_seconds=float(sys.argv[6]), stall_window_seconds=600)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)) if what == "ddp" else None
    for batch in DataLoader(Numbers(), batch_size=1, num_workers=int(what == "worker")):
        if int(batch) == AT and mine and what not in {"fetch", "worker", "left", "barrier", "all_save", *QUIET}:
            in_the_step()
        if what in QUIET:
            quiet(int(batch))
        if int(batch) == AT and what == "all_save":
            say("reached")
            save()
        if int(batch) == AT and what in {"signal", "end"}:
            unnoticed.all_reduce()  # the unnoticed collective
        if int(batch) == AT and what == "worker" and not mine:
            say("reached")
        if model is not None:
            model(torch.ones(1, 2)).sum().backward()
        else:
            dist.all_reduce(torch.ones(4, 8))  # the collective
        time.sleep(float(os.environ.get("PAUSE", "0.002")))
    if mine and what == "left":
        say("reached")
        sys.stdin.readline()  # after the loop
    if mine and what == "barrier":
        say("reached")
        dist.barrier()  # after the loop, in a barrier
    if what in QUIET:
        say("done")
        sys.stdin.readline()
"""


def line_of(comment: str) -> int:
    """The line of the script that has this comment."""
    (number,) = [n for n, text in enumerate(JOB.lstrip("\n").splitlines(), 1) if text.endswith(f"# {comment}")]
    return number


class HangingJob:
    """Ranks as real processes, one node each if it has names for them.

    Args:
        folder: of the test.
        what: what goes wrong on rank ``odd``, see `JOB`.
        nodes: name of the node of each rank.
        variables: of the environment of all ranks.
    """

    def __init__(
        self,
        folder: Path,
        what: str,
        *,
        odd: int,
        nodes: tuple[str, ...],
        stuck: float = STUCK_SECONDS,
        **variables: str,
    ) -> None:
        self.run_dir, self.odd = folder / "run", odd
        script = write(folder, "train.py", JOB)
        write(folder, "site-packages/torch/distributed/unnoticed.py", UNNOTICED)
        self.ranks: list[WarmChild] = []
        for rank, node in enumerate(nodes):
            env = environment(
                RANK=str(rank),
                LOCAL_RANK="0",
                WORLD_SIZE=str(len(nodes)),
                TELEMETRY_NODE=node,
                OMP_NUM_THREADS="1",
                **variables,
            )
            rest = (rank, len(nodes), odd, what, folder, stuck)
            self.ranks.append(WarmChild(script, *rest, cwd=folder, env=env))

    def __enter__(self) -> HangingJob:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.ranks:
            child.__exit__()

    def reached(self, rank: int | None = None, what: str = "reached") -> None:
        """Wait until a rank is where it goes wrong, or says something else."""
        child = self.ranks[self.odd if rank is None else rank]
        while child.line() != what:
            pass

    def send(self, signum: signal.Signals, rank: int | None = None) -> None:
        os.kill(self.ranks[self.odd if rank is None else rank].pid, signum)

    def logged(self, event: str) -> list[dict]:
        return events(self.run_dir, event, running=True) if (self.run_dir / "logs").exists() else []

    def hangs(self) -> list[dict]:
        return self.logged("hang")

    def verdict(self, kind: str) -> dict:
        """The first line in the log that names this kind."""
        return wait_for(
            lambda: next((line for line in self.hangs() if line.get("kind") == kind), None), f"a hang of kind {kind}"
        )
