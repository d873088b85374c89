"""A training of one or more ranks that is killed at any moment and started again, with stamps of its own."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from tests.faults.attempt_scripts import Attempted, books_of
from tests.faults.processes import RUN, environment, wait_for, write

INTERVAL = 0.1
"""Seconds between heartbeats. The runs are a scale model: an attempt lasts seconds, not hours."""

STUCK_SECONDS = 1.5
"""The setting: only the fetch that hangs, for twice as long, and what waits for it, take so long."""

TRAIN = """
    import atexit, json, os, struct, sys, threading, time

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    name = f"{int(os.environ['ATTEMPT']) + restart}-{rank}"
    stamps = open(f"stamps-{name}.jsonl", "a", buffering=1)
    alive = os.open(f"alive-{name}", os.O_WRONLY | os.O_CREAT)

    def stamp(what, **fields):
        stamps.write(json.dumps({"what": what, "at": time.time()} | fields) + "\\n")

    def live():
        while True:
            os.pwrite(alive, struct.pack("d", time.time()), 0)
            time.sleep(0.003)

    ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
    age = float(open("/proc/uptime").read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    threading.Thread(target=live, daemon=True).start()
    stamp("process", began=time.time() - age, pid=os.getpid())
    atexit.register(lambda: stamp("bye"))

    import torch
    import torch.distributed as dist

    class Slow:  # takes its time to be saved and loaded
        def __getstate__(self):
            time.sleep(0.15)
            return {"x": 1}

        def __setstate__(self, state):
            time.sleep(0.3)

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 100_000

        def __getitem__(self, index):
            time.sleep(3.0 if index + 1 == hangs else 0.004)
            return torch.ones(16) * (index % 7)

    def evaluate():
        net.eval()
        with torch.no_grad():
            for batch in torch.utils.data.DataLoader(torch.ones(4, 16)):
                net(batch)
                time.sleep(0.02)
        net.train()

    def told(file, default):
        try:
            return open(file).read().split()
        except OSError:
            return default

    until = int(told("until", ["1000000"])[0])
    end, odd, at = told(f"end-{int(os.environ['ATTEMPT']) + restart}", ["none", "0", "0"])
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store-{name[:-2]}", rank=rank, world_size=world)
    net = torch.nn.Linear(16, 1)
    optimizer = torch.optim.Adam(net.parameters())
    number = resumed = hangs = 0
    if os.path.exists("checkpoint.pt"):
        stamp("loads")
        state = torch.load("checkpoint.pt", weights_only=False)
        stamp("loaded")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        resumed = state["step"]
    if rank == 0 and (int(os.environ["ATTEMPT"]) + restart) % 2 == 0:
        hangs = resumed + 40  # the fetch of this step of every other attempt; the other ranks wait in it
    stamp("starts", step=resumed)
    batches = iter(torch.utils.data.DataLoader(Data(), batch_size=1))
    while number < until:
        stamp("asks", number=number + 1)
        batch = next(batches)
        number += 1
        stamp("got", number=number)
        if number <= resumed:
            continue
        time.sleep(0.016)
        net(batch).sum().backward()
        if world > 1:
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        stamp("stepped", number=number)
        optimizer.zero_grad()
        if number % 20 == 10:
            stamp("evaluates", number=number)
            evaluate()
            stamp("evaluated", number=number)
        if number % 25 == 0 and rank == 0:
            stamp("saves", number=number)
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": number, "slow": Slow()}, "new.pt")
            stamp("saved", number=number)
            os.replace("new.pt", "checkpoint.pt")
        if rank == int(odd) and number == resumed + int(at):
            if end == "exception":
                raise ValueError("as told")
            if end == "status":
                sys.exit(3)
    stamp("asks", number=number + 1)
    stamp("ends")
    if world > 1:
        dist.destroy_process_group()
"""

KILLED, FAILED, FINISHED = "killed", "failed", "finished"


@dataclass
class TrueAttempt:
    """What the scripts themselves know of an attempt.

    Attributes:
        processes: each rank's.
        how: it ended.
    """

    processes: list[Attempted]
    how: str

    @property
    def begin(self) -> float:
        return min(process.begin for process in self.processes)

    @property
    def end(self) -> float:
        return max(_end(process) for process in self.processes)

    @property
    def resumed(self) -> int | None:
        """The step it began at; None if it did not come so far."""
        return next((process.resumed for process in self.processes if process.resumed is not None), None)

    def done(self, moment: float | None = None) -> int:
        """The last step that an optimizer had done at a moment, or at its end."""
        numbers = [
            stamp["number"]
            for process in self.processes
            for stamp in process.stamps
            if stamp["what"] == "stepped" and (moment is None or stamp["at"] <= moment)
        ]
        return max(numbers, default=self.resumed or 0)


class RestartingJob:
    """The processes of one run, in a folder. Each attempt is started with the same command.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = write(folder, "train.py", TRAIN)
        self.attempts: list[TrueAttempt] = []
        self.started = 0

    def start(self, ranks: int = 1, restarts: int = 0) -> subprocess.Popen[bytes]:
        """Type the command. torchrun starts several ranks, and starts them again ``restarts`` times."""
        launcher = (
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            ranks,
            "--max-restarts",
            restarts,
        )
        launched = launcher if ranks > 1 or restarts else ()
        command = [*launched, *RUN, "--interval-seconds", INTERVAL, "--log-interval-seconds", 1, "--stuck-seconds", STUCK_SECONDS,
                   self.script]  # fmt: skip
        if not launched:
            command = [*RUN, *command[len(RUN) :]]
        with (self.folder / "errors.txt").open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=self.folder,
                env=environment(ATTEMPT=str(self.started), OMP_NUM_THREADS="1"),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def tell(self, what: str, rank: int = 0, after: int = 0) -> None:
        """How the attempt that is started next, or is there, is to end by itself."""
        (self.folder / f"end-{self.started}").write_text(f"{what} {rank} {after}")

    def stamps(self, rank: int = 0) -> list[dict]:
        """Of a rank of the attempt that is there."""
        path = self.folder / f"stamps-{self.started}-{rank}.jsonl"
        try:
            text = path.read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def saw(self, what: str, times: int = 1, rank: int = 0) -> list[dict]:
        """Wait for a stamp."""

        def found() -> list[dict] | None:
            have = [stamp for stamp in self.stamps(rank) if stamp["what"] == what]
            return have if len(have) >= times else None

        return wait_for(found, f"{what} of rank {rank}, {self.errors[-2000:]}", 60)

    def kill(self, pid: int) -> float:
        """Returns when: not while a hang is just being noticed, because then it may count or not."""
        newest = self.stamps()[-1:]
        if newest and newest[0]["what"] in {"asks", "got"} and abs(time.time() - newest[0]["at"] - STUCK_SECONDS) < 0.5:
            time.sleep(1.0)
        os.kill(pid, signal.SIGKILL)
        return time.time()

    def over(self, how: str, ranks: int = 1, begin: float = 0.0, pid: int = 0, killed: dict[int, float] | None = None):
        """Note an attempt whose processes are gone. One whose agent had not started leaves nothing: its time is down.

        Args:
            how: it ended.
            ranks: how many it had.
            begin: when its only process, ``pid``, began, which may be gone too early for stamps.
            killed: when, by rank.
        """
        found = []
        for rank in range(ranks):
            stamps = self.stamps(rank)
            begin, pid = (stamps[0]["began"], stamps[0]["pid"]) if stamps else (begin, pid)
            newest = heard(self.folder / "run", pid)
            if newest is not None:
                last = (killed or {}).get(rank) or alive(self.folder / f"alive-{self.started}-{rank}")
                found.append(attempted(stamps, begin, last, newest))
        if found:
            self.attempts.append(TrueAttempt(found, how))
        self.started += 1

    @property
    def errors(self) -> str:
        """What the processes have said."""
        return (self.folder / "errors.txt").read_text(errors="replace")


def heard(run_dir: Path, pid: int) -> float | None:
    """Unix time of the newest stamp of a process's agent; None if it has left none."""
    (log,) = list(run_dir.glob(f"logs/rank-*.{pid}.jsonl")) or (None,)
    lines = [] if log is None else [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    if not lines:
        return None
    beat = run_dir / "attempts" / f"{lines[0]['life']}.beat"
    if beat.exists():
        return json.loads(beat.read_text())["unix_seconds"]
    return datetime.fromisoformat(lines[-1]["time"].replace("Z", "+00:00")).timestamp()


def attempted(stamps: list[dict], begin: float, last: float, newest: float) -> Attempted:
    """One process whose agent was there.

    Args:
        stamps: its own.
        begin: when it began.
        last: when it was there last.
        newest: Unix time of the newest stamp of its agent.
    """
    own = [stamp for stamp in stamps if stamp["what"] != "process"]
    by_itself = any(stamp["what"] == "bye" for stamp in own)
    return Attempted(begin, last, not by_itself, own, 0.0 if by_itself else max(0.0, last - newest))


def alive(path: Path) -> float:
    """When a process was there last, as it has written all the time."""
    (moment,) = struct.unpack("d", path.read_bytes())
    return moment


def true_books(
    attempts: list[TrueAttempt], *, to_the_kill: bool, stuck_seconds: float = STUCK_SECONDS
) -> dict[str, float]:
    """Seconds by category of the whole run, the mean over the ranks, from the scripts' own stamps.

    Args:
        attempts: of the run.
        to_the_kill: what a process did after its last heartbeat counts as what it was, not as down.
        stuck_seconds: as in its settings.
    """
    if to_the_kill:
        attempts = [replace(each, processes=[replace(one, tail=0.0) for one in each.processes]) for each in attempts]
    total: dict[str, float] = {}
    before: TrueAttempt | None = None
    for index, attempt in enumerate(attempts):
        kept = kept_of(attempts, index)
        if before is not None:
            _add(total, "down", max(0.0, attempt.begin - before.end))
        length = attempt.end - attempt.begin  # a process counts until its last heartbeat
        for process in attempt.processes:
            books = books_of(process, kept, stuck_seconds)
            books["startup"] += process.begin - attempt.begin
            rest = length - sum(books.values())
            finished = any(stamp["what"] == "ends" for stamp in process.stamps)
            books["other" if finished else "down"] = max(0.0, rest)
            for category, seconds in books.items():
                _add(total, category, seconds / len(attempt.processes))
        before = attempt
    return total


def kept_of(attempts: list[TrueAttempt], index: int) -> int:
    """The last step of an attempt that was not lost."""
    if attempts[index].how == FINISHED:
        return 1 << 30
    later = [
        other.resumed for other in attempts[index + 1 :] if other.resumed is not None and other.done() > other.resumed
    ]
    return min(later, default=1 << 30)


def _add(total: dict[str, float], category: str, seconds: float) -> None:
    total[category] = total.get(category, 0.0) + seconds


def _end(process: Attempted) -> float:
    return next((stamp["at"] for stamp in process.stamps if stamp["what"] == "bye"), process.end - process.tail)
