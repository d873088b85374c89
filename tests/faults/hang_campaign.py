"""How often the verdict on a hang is right: ``python -m tests.faults.hang_campaign [--times 5] [--seed 1] [--only WHAT]``.

Jobs of four ranks on two emulated nodes hang in many ways, each at random ranks and steps. Right is a verdict with
the right rank, its node, the kind and, where there is one, the line. Healthy jobs accuse nobody. `stuck_seconds` is 1, and
the nodes' clocks of the exchange run ten times as fast as usual. A whole campaign writes its result. The tests take the
job from here.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks import machine
from tests.campaign import RESULTS, Goal, Table
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
    from telemetry.agent import job_hang
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
        elif what == "alone":
            with torch.no_grad():
                for _ in DataLoader(range(4), batch_size=1):
                    dist.broadcast(torch.ones(3), 0)  # the collective of one
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
    job_hang._PATIENCE_SECONDS = 6.0
    peers._SILENT_SECONDS = 6.0
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


class HangingJob(contextlib.ExitStack):
    """Ranks as real processes.

    Args:
        folder: of the test.
        what: what goes wrong on rank ``odd``, see `JOB`.
        nodes: name of the node of each rank.
        variables: of the environment of all ranks.
    """

    def __init__(self, folder: Path, what: str, *, odd: int, nodes: tuple[str, ...], **variables: str) -> None:
        super().__init__()
        self.run_dir, self.odd = folder / "run", odd
        script = write(folder, "train.py", JOB)
        write(folder, "site-packages/torch/distributed/unnoticed.py", UNNOTICED)
        self.ranks = []
        for rank, node in enumerate(nodes):
            about = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(nodes)), "TELEMETRY_NODE": node}
            rest = (rank, len(nodes), odd, what, folder, STUCK_SECONDS)
            child = WarmChild(script, *rest, cwd=folder, env=environment(OMP_NUM_THREADS="1", **about, **variables))
            self.ranks.append(self.enter_context(child))

    def reached(self, rank: int | None = None, what: str = "reached") -> None:
        """Wait until a rank is where it goes wrong, or says something else."""
        child = self.ranks[self.odd if rank is None else rank]
        while child.line() != what:
            pass

    def send(self, signum: signal.Signals, *ranks: int) -> None:
        for rank in ranks or [self.odd]:
            self.ranks[rank].send(signum)

    def suspend(self, seconds: float) -> None:
        """As a machine that is suspended: all ranks stop for so long."""
        everyone = range(len(self.ranks))
        self.send(signal.SIGSTOP, *everyone)
        time.sleep(seconds)
        self.send(signal.SIGCONT, *everyone)

    def logged(self, event: str, **fields: object) -> list[dict]:
        return events(self.run_dir, event, running=True, **fields)

    def verdict(self, kind: str) -> dict:
        """The first line in the log that names this kind."""
        return wait_for(lambda: next(iter(self.logged("hang", kind=kind)), None), f"a hang of kind {kind}")

    def accused(self) -> list:
        """Whoever is said to be stuck, once all ranks are done."""
        for rank in range(len(self.ranks)):
            self.reached(rank, "done")
        stuck = [line["rank"] for line in self.logged("stall_open") if "stuck_in" in line["evidence"]]
        return [*stuck, *(line.get("verdict", "over") for line in self.logged("hang"))]


# -- the campaign --------------------------------------------------------------------------------------------------

NODES = ("n1", "n1", "n2", "n2")

WAYS: dict[str, tuple[str, str, str | None, signal.Signals | None]] = {
    "fetch": ("fetch", "fetch", "the fetch", None),
    "worker": ("worker", "fetch", "the fetch", None),
    "compute": ("compute", "compute", "the compute", None),
    "ddp": ("ddp", "compute", "the compute", None),
    "lock": ("lock", "compute", "the lock", None),
    "gil": ("gil", "compute", None, None),
    "checkpoint": ("checkpoint", "phase", "the checkpoint", None),
    "evaluation": ("evaluation", "phase", "the evaluation", None),
    "all-save": ("all_save", "phase", "the checkpoint", None),
    "left": ("left", "rank_left", "after the loop", None),
    "barrier": ("barrier", "rank_left", "after the loop, in a barrier", None),
    "ended": ("end", "rank_left", None, None),
    "killed": ("signal", "rank_gone", None, signal.SIGKILL),
    "node": ("signal", "rank_gone", None, signal.SIGKILL),
    "stopped": ("signal", "rank_stopped", None, signal.SIGSTOP),
    "order": ("order", "mismatch", "the other collective", None),
    "alone": ("alone", "mismatch", "the collective of one", None),
}
"""What the script does, and the kind, the line and the signal that go with it."""

HEALTHY = {
    "evaluate": "a long evaluation on all ranks",
    "one_evaluates": "a long evaluation on one rank",
    "compile": "a slow first step",
    "debugger": "a debugger",
    "slow": "uneven steps",
    "suspended": "all processes stopped and continued",
}
"""Controls, in which nothing hangs."""

ACQUAINTED = {"AT": "25", "PAUSE": "0.1"}
"""The step at which something happens, and seconds between steps: until then each node knows the other."""

SUSPENDED_SECONDS = 3.0


@dataclass(frozen=True)
class Trial:
    """One job, and what was said of it.

    Attributes:
        way: what was done. ``truth``: to which rank, on which node.
        right: whether the verdict is right. ``seconds``: from what was done to the verdict; None where there is to be none.
        said: the verdict, or what there was instead of one.
    """

    way: str
    truth: str
    right: bool
    seconds: float | None
    said: str

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f"{self.seconds:.1f} s"
        return f"{self.way:16} {self.truth:24} {seconds:>8}  {self.said}{'' if self.right else '  <-- WRONG'}"


def hang(way: str, odd: int, step: int) -> Trial:
    """One job that hangs."""
    what, kind, line, signum = WAYS[way]
    variables = {"AT": str(step)} if way != "node" else ACQUAINTED
    if way == "ddp":  # torch 2.9 has the recorder for gloo, but off
        variables["TORCH_FR_BUFFER_SIZE"] = "2000"
    ranks = {"all-save": [0, 1, 2, 3], "node": [r for r in range(4) if NODES[r] == NODES[odd]]}.get(way, [odd])
    trial = partial(Trial, way, f"rank {odd} on {NODES[odd]}, step {variables['AT']}")
    with tempfile.TemporaryDirectory() as name, HangingJob(Path(name), what, odd=odd, nodes=NODES, **variables) as job:
        job.reached((odd + 1) % 4 if what == "worker" else odd)
        began = time.monotonic()
        if signum is not None:
            job.send(signum, *ranks)
        try:
            said = wait_for(lambda: next(iter(job.logged("hang", silent_ranks=0)), None), "a verdict", 90)
        except AssertionError:
            return trial(False, 90.0, f"none; {[one['verdict'] for one in job.logged('hang')]}")
        seconds = round(time.monotonic() - began, 1)
    suspects = [(suspect["rank"], suspect["node"]) for suspect in said["suspects"]]
    right = said["kind"] == kind and suspects == [(rank, NODES[rank]) for rank in ranks]
    if line is not None and right:
        right = all(suspect["where"].startswith(f"train.py:{line_of(line)} (") for suspect in said["suspects"])
    return trial(right, seconds, said["verdict"])


def healthy(way: str, odd: int) -> Trial:
    """One job in which nothing hangs."""
    what = "slow" if way == "suspended" else way
    with tempfile.TemporaryDirectory() as name, HangingJob(Path(name), what, odd=odd, nodes=NODES, **ACQUAINTED) as job:
        if way == "suspended":
            wait_for(lambda: job.logged("window"), "it goes on")
            job.suspend(SUSPENDED_SECONDS)
        accused = job.accused()
    truth = f"rank {odd} on {NODES[odd]}, step {ACQUAINTED['AT']}"
    return Trial(f"healthy: {HEALTHY[way]}", truth, not accused, None, str(accused) if accused else "nobody is accused")


def table(described: dict, trials: Sequence[Trial]) -> Table:
    """A row for each way."""
    rows = []
    for way in dict.fromkeys(trial.way for trial in trials):
        some = [trial for trial in trials if trial.way == way]
        longest = max((trial.seconds for trial in some if trial.seconds is not None), default=None)
        right = f"{sum(trial.right for trial in some)} of {len(some)}"
        rows.append([way, right, "" if longest is None else f"{longest:.1f}"])
    goal = Goal(
        "the verdict has the right ranks, node, kind and line", sum(t.right for t in trials), len(trials), "jobs"
    )
    headings = ("what", "right", "longest time to the verdict, s")
    return Table("How often the verdict on a hang is right", described, [goal], headings, rows)


def main() -> None:
    """Run the campaign, print a line for each job, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hang_campaign")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[*WAYS, *HEALTHY])
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    described, trials = machine.describe(), []
    for way in [options.only] if options.only else [*WAYS, *HEALTHY]:
        for _ in range(options.times):
            odd, step = chosen.randrange(4), chosen.randrange(11, 38)
            trials.append(hang(way, odd, step) if way in WAYS else healthy(way, odd))
            print(trials[-1], flush=True)
    shown = table(described, trials)
    print("\n" + shown.text())
    if not options.only:
        command = f"python -m tests.faults.hang_campaign --times {options.times} --seed {options.seed}"
        counts = {"command": command, "right": sum(trial.right for trial in trials), "of": len(trials)}
        content = {**counts, "trials": [asdict(trial) for trial in trials]}
        shown.write(RESULTS, f"hang-campaign-{machine.slug(described)}", content)


if __name__ == "__main__":
    main()
