"""How right the books of a run are that is restarted: ``python -m tests.faults.restart_campaign [--times 3] [--seed 1]``.

Trainings are killed at random moments, fail, leave, and are started again: by hand, by torchrun, and with another number
of ranks. They evaluate, and in every other attempt a fetch hangs for a while. The report is compared with the scripts' own
stamps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.faults.processes import RUN, environment, report, wait_for
from tests.faults.warm_python import ForkedProcess

SCRIPT = Path(__file__).with_name("restarted_training.py")
INTERVAL = 0.1
"""Seconds between heartbeats. The runs are a scale model: an attempt lasts seconds, not hours."""

STUCK_SECONDS = 1.5
"""The setting: only the fetch that hangs, for twice as long, and what waits for it, take so long."""

BEAT_LATE_SECONDS = 0.03
"""A heartbeat has a time, and counts the steps a moment later."""

KILLED, FAILED, FINISHED = "killed", "failed", "finished"
LOST = ("redone", "restore", "replay", "startup", "stuck", "down")
CATEGORIES = (
    "productive", "data_wait", "redone", "restore", "replay", "startup", "evaluation", "checkpoint", "stuck"
)  # fmt: skip
NEVER = 1 << 30

# -- what the scripts themselves know ------------------------------------------------------------------------------


@dataclass
class Process:
    """One process: when it began, when it was there last, and its stamps.

    Attributes:
        tail: seconds from its newest heartbeat to the kill: nobody knows of them. 0 if it ended by itself.
    """

    begin: float
    last: float
    tail: float
    stamps: list[dict]

    @property
    def end(self) -> float:
        """When it ended, as far as it is known."""
        return next((stamp["at"] for stamp in self.stamps if stamp["what"] == "bye"), self.last - self.tail)

    @property
    def resumed(self) -> int | None:
        """The step it began at; None if it did not come so far."""
        return next((stamp["step"] for stamp in self.stamps if stamp["what"] == "starts"), None)

    def books(self, kept: int, stuck_seconds: float) -> Counter[str]:
        """Seconds by category. The time before each stamp belongs to what went on then.

        Args:
            kept: its last step that was not lost.
            stuck_seconds: as in the settings. The script has a stamp wherever the agent sees it go on.
        """
        books: Counter[str] = Counter(dict.fromkeys(CATEGORIES, 0.0))
        at, doing, number, first, resumed = self.begin, "startup", 0, True, self.resumed or 0
        for stamp in [*self.stamps, {"what": "over", "at": self.end}]:
            what = stamp["what"]
            if what in {"process", "bye"}:
                continue
            seconds = max(0.0, stamp["at"] - at)
            stuck = doing in {"productive", "data_wait", "redone", "replay"} and seconds >= stuck_seconds
            books["stuck" if stuck else doing] += seconds
            at = stamp["at"]
            if what == "loads":
                doing = "restore"
            elif what == "loaded":
                doing = "startup"
            elif what == "asks":
                number = stamp["number"]
                waits = "replay" if number <= resumed else "data_wait" if number <= kept else "redone"
                doing, first = ("startup" if first else waits), False
            elif what in {"got", "saved", "evaluated"}:
                doing = "replay" if number <= resumed else "productive" if number <= kept else "redone"
            elif what in {"saves", "evaluates"}:
                doing = {"saves": "checkpoint", "evaluates": "evaluation"}[what]
        return books


@dataclass
class Attempt:
    """Each rank's process, and how it ended."""

    processes: list[Process]
    how: str

    @property
    def begin(self) -> float:
        return min(process.begin for process in self.processes)

    @property
    def end(self) -> float:
        return max(process.end for process in self.processes)

    @property
    def resumed(self) -> int | None:
        return next((process.resumed for process in self.processes if process.resumed is not None), None)

    def done(self, moment: float | None = None) -> int:
        """The last step that an optimizer had done at a moment, or at its end."""
        stamps = [stamp for process in self.processes for stamp in process.stamps if stamp["what"] == "stepped"]
        numbers = [stamp["number"] for stamp in stamps if moment is None or stamp["at"] <= moment]
        return max(numbers, default=self.resumed or 0)


def true_books(
    attempts: list[Attempt], *, to_the_kill: bool = False, stuck_seconds: float = STUCK_SECONDS
) -> Counter[str]:
    """Seconds by category of the whole run, the mean over the ranks.

    ``to_the_kill``: what a process did after its last heartbeat counts as what it was, not as down.
    """
    if to_the_kill:
        attempts = [replace(each, processes=[replace(one, tail=0.0) for one in each.processes]) for each in attempts]
    total: Counter[str] = Counter()
    for index, attempt in enumerate(attempts):
        if index:
            total["down"] += max(0.0, attempt.begin - attempts[index - 1].end)
        length = attempt.end - attempt.begin  # a process counts until its last heartbeat
        for process in attempt.processes:
            books = process.books(kept_of(attempts, index), stuck_seconds)
            books["startup"] += process.begin - attempt.begin
            finished = any(stamp["what"] == "ends" for stamp in process.stamps)
            books["other" if finished else "down"] += max(0.0, length - sum(books.values()))
            for category, seconds in books.items():
                total[category] += seconds / len(attempt.processes)
    return total


def kept_of(attempts: list[Attempt], index: int) -> int:
    """The last step of an attempt that was not lost."""
    if attempts[index].how == FINISHED:
        return NEVER
    later = (each for each in attempts[index + 1 :] if each.resumed is not None and each.done() > each.resumed)
    return min((each.resumed or 0 for each in later), default=NEVER)


def lost(attempts: list[Attempt], number: int) -> tuple[int, int]:
    """The lost steps of an attempt up to its last heartbeat, at least and at most."""
    attempt, kept = attempts[number], kept_of(attempts, number)
    moments = [one.last - one.tail for one in attempt.processes if one.tail]
    heard = max(moments) if len(moments) == len(attempt.processes) else None
    begun = attempt.resumed or 0
    done = [attempt.done(None if heard is None else heard + late) for late in (0.0, BEAT_LATE_SECONDS)]
    least, most = (max(0, each - max(begun, kept)) if each > begun else 0 for each in done)
    return least, most


def newest_sign(run_dir: Path, pid: int) -> float | None:
    """Unix time of the newest sign of a process's agent; None if it has left none."""
    (log,) = list(run_dir.glob(f"logs/rank-*.{pid}.jsonl")) or (None,)
    lines = [] if log is None else [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    if not lines:
        return None
    beat = run_dir / "attempts" / f"{lines[0]['life']}.beat"
    if beat.exists():
        return float(json.loads(beat.read_text())["unix_seconds"])
    return datetime.fromisoformat(lines[-1]["time"].replace("Z", "+00:00")).timestamp()


def stamps_of(folder: Path, attempt: int, rank: int = 0) -> list[dict]:
    """The stamps of a rank so far."""
    path = folder / f"stamps-{attempt}-{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def process_of(folder: Path, run_dir: Path, attempt: int, rank: int, killed: float | None = None) -> Process | None:
    """A process that is gone; None if its agent had not started: then its time is down.

    Args:
        folder: of the script. ``run_dir``: of the run.
        attempt, rank: which one.
        killed: when, if the test has done it.
    """
    stamps = stamps_of(folder, attempt, rank)
    newest = newest_sign(run_dir, stamps[0]["pid"]) if stamps else None
    if newest is None:
        return None
    (alive,) = struct.unpack("d", (folder / f"alive-{attempt}-{rank}").read_bytes())
    last = killed or alive
    by_itself = stamps[-1]["what"] == "bye"
    return Process(stamps[0]["began"], last, 0.0 if by_itself else max(0.0, last - newest), stamps)


# -- the job -------------------------------------------------------------------------------------------------------


class RestartingJob:
    """The processes of one run, in a folder. Each attempt is started with the same command.

    Args:
        folder: of the run.
        warm: start an attempt of one process with torch imported.
    """

    def __init__(self, folder: Path, *, warm: bool = False) -> None:
        self.folder, self.run_dir, self._warm = folder, folder / "run", warm
        self.attempts: list[Attempt] = []
        self.started = 0

    def start(self, ranks: int = 1, restarts: int = 0) -> Any:
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
        settings = ("--interval-seconds", INTERVAL, "--log-interval-seconds", 1, "--stuck-seconds", STUCK_SECONDS)
        command = [*map(str, (*(launcher if ranks > 1 or restarts else ()), *RUN, *settings, SCRIPT))]
        env = environment(ATTEMPT=str(self.started), OMP_NUM_THREADS="1")
        with (self.folder / "errors.txt").open("ab") as errors, open(os.devnull, "r+b") as nothing:
            streams = {"stdin": nothing.fileno(), "stdout": nothing.fileno(), "stderr": errors.fileno()}
            if self._warm:
                return ForkedProcess(command, self.folder, env, **streams)
            return subprocess.Popen(
                [sys.executable, *command], cwd=self.folder, env=env, start_new_session=True, **streams
            )

    def plan(self, end: str, after: int = 0, **more: int) -> None:
        """How the attempt that is started next, or is there, is to end or to block."""
        (self.folder / f"plan-{self.started}.json").write_text(json.dumps({"end": end, "after": after} | more))

    def until(self, more: int) -> None:
        """It ends after so many more steps."""
        steps = [stamp["number"] for stamp in self.stamps() if stamp["what"] == "stepped"]
        done = max([*steps, *(attempt.done() for attempt in self.attempts)], default=0)
        (self.folder / "until").write_text(str(done + more))

    def stamps(self, rank: int = 0) -> list[dict]:
        return stamps_of(self.folder, self.started, rank)

    def saw(self, what: str, times: int = 1, rank: int = 0) -> dict:
        """Wait for a stamp of the attempt that is there."""

        def found() -> dict | None:
            have = [stamp for stamp in self.stamps(rank) if stamp["what"] == what]
            return have[times - 1] if len(have) >= times else None

        return wait_for(found, f"{what} of rank {rank}, {self.errors[-2000:]}", 60)

    def kill(self, rank: int = 0) -> float:
        """Returns when: not while a hang is just being noticed, because then it may count or not."""
        pid, newest = self.saw("process", rank=rank)["pid"], self.stamps()[-1]
        if newest["what"] in {"asks", "got"} and abs(time.time() - newest["at"] - STUCK_SECONDS) < 0.5:
            time.sleep(1.0)
        os.kill(pid, signal.SIGKILL)
        return time.time()

    def over(self, how: str, ranks: int = 1, killed: dict[int, float] | None = None) -> None:
        """Note an attempt whose processes are gone. ``killed``: when, by rank."""
        moments = killed or {}
        found = [process_of(self.folder, self.run_dir, self.started, rank, moments.get(rank)) for rank in range(ranks)]
        if any(found):
            self.attempts.append(Attempt([process for process in found if process], how))
        self.started += 1

    def attempt(self, end: str, after: int = 0, **more: int) -> None:
        """An attempt of one process that ends by itself, or is killed where it blocks, once its agent has seen that."""
        if end != "finish":
            self.plan(end, after, **more)
        process = self.start()
        killed = {}
        if end in {"step", "checkpoint", "restore"}:
            blocked = self.saw("blocked")["at"]
            pid = self.stamps()[0]["pid"]
            wait_for(
                lambda: (newest_sign(self.run_dir, pid) or 0.0) > blocked + 0.1, "a heartbeat of the blocked process"
            )
            killed = {0: self.kill()}
        process.wait(120)
        self.over(KILLED if killed else FINISHED if end == "finish" else FAILED, killed=killed)

    @property
    def errors(self) -> str:
        """What the processes have said."""
        return (self.folder / "errors.txt").read_text(errors="replace")


# -- what happens to a run in the campaign -------------------------------------------------------------------------


def random_attempt(job: RestartingJob, end: str, chosen: random.Random) -> None:
    """One more attempt of one process. It is killed at a random moment, or ends by itself."""
    if end in {"exception", "status", "finish"}:
        job.attempt(end, chosen.randrange(30, 160), hangs_after=40 if job.started % 2 == 0 else 0)
        return
    process = job.start()
    if end == "start":
        job.saw("process")
        time.sleep(chosen.uniform(0.0, 2.5))
    elif end == "restore":
        job.saw("loads")
        time.sleep(chosen.uniform(0.0, 0.3))
    elif end == "checkpoint":
        job.saw("saves", chosen.randrange(2, 6))
        time.sleep(chosen.uniform(0.0, 0.15))
    else:
        job.saw("starts")
        time.sleep(chosen.uniform(0.5, 6.0))
    killed = {0: job.kill()}
    process.wait(60)
    job.over(KILLED, killed=killed)


def typed_again(job: RestartingJob, chosen: random.Random) -> None:
    """The same command in seven attempts, which end in all ways, in random order."""
    ends = ["step", "checkpoint", "restore", "start", "exception", "status"]
    chosen.shuffle(ends)
    for end in ["checkpoint", *ends]:
        random_attempt(job, end, chosen)
    job.until(150)
    random_attempt(job, "finish", chosen)


def kill_one_of(job: RestartingJob, ranks: int, chosen: random.Random) -> dict[int, float]:
    """Kill a random rank at a random moment, once the first checkpoint of the attempt is there."""
    job.saw("saved", chosen.randrange(1, 4))
    time.sleep(chosen.uniform(0.0, 1.0))
    odd = chosen.randrange(ranks)
    return {odd: job.kill(odd)}


def restarted_by_torchrun(job: RestartingJob, chosen: random.Random) -> None:
    """``torchrun --max-restarts 3``: two of the attempts are killed, one fails, and the last finishes."""
    ways = ["kill", "kill", "exception"]
    chosen.shuffle(ways)
    launcher = None
    for way in ways:
        if way == "exception":
            job.plan("exception", chosen.randrange(30, 120), rank=chosen.randrange(2))
        launcher = launcher or job.start(2, restarts=3)
        killed = kill_one_of(job, 2, chosen) if way == "kill" else {}
        job.saw("stepped", 20)
        if way == ways[-1]:
            job.until(150)
        for rank in range(2):
            again = job.folder / f"stamps-{job.started + 1}-{rank}.jsonl"
            wait_for(again.exists, f"the next attempt: {job.errors[-2000:]}", 60)
        job.over(KILLED if killed else FAILED, 2, killed=killed)
    assert launcher is not None
    launcher.wait(120)
    job.over(FINISHED, 2)


def elastic(job: RestartingJob, chosen: random.Random) -> None:
    """Two ranks, then one, then two again."""
    for ranks in (2, 1):
        launcher = job.start(ranks)
        killed = kill_one_of(job, ranks, chosen)
        launcher.wait(120)
        job.over(KILLED, ranks, killed=killed)
    job.until(150)
    job.start(2).wait(120)
    job.over(FINISHED, 2)


SCENARIOS: dict[str, Callable[[RestartingJob, random.Random], None]] = {
    "typed again": typed_again,
    "torchrun": restarted_by_torchrun,
    "elastic": elastic,
}

# -- the comparison ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A run: what the report says, and what the stamps say.

    Attributes:
        wall: seconds of the run, by its stamps.
        off: the difference of each category, of the wall clock and of `ettr_ratio`; the first two as a share of the wall.
        placed: whether each attempt's end and position are right.
        steps_right: of how many attempts the lost steps are exact.
    """

    wall: float
    off: dict[str, float]
    wall_off: float
    ettr_off: float
    placed: bool
    attempts: int
    steps_right: int
    books: Counter[str]
    detail: str

    @property
    def right(self) -> bool:
        """Whether all is within the goals."""
        near = all(abs(each) <= 0.01 for each in (*self.off.values(), self.wall_off)) and abs(self.ettr_off) <= 0.02
        return near and self.placed and self.steps_right == self.attempts

    def told(self) -> str:
        """In one line."""
        worst, category = max((abs(off), category) for category, off in self.off.items())
        return (
            f"{'right' if self.right else 'WRONG'}, lost steps of {self.steps_right} of {self.attempts} attempts exact, "
            f"{self.wall:.0f} s, off at most {worst:.2%} ({category}), ettr {self.ettr_off:+.2%}"
        )


def compared(job: RestartingJob) -> Comparison:
    """The report against the stamps."""
    told, books = report(job.run_dir)["job"], true_books(job.attempts)
    strict = true_books(job.attempts, to_the_kill=True)
    wall, goodput = sum(books.values()), told["goodput"]
    categories = sorted({*books, *goodput["seconds"]})
    losses = [lost(job.attempts, number) for number in range(len(job.attempts))]
    said = [each["lost_steps"] for each in told["attempts"]]
    # An attempt that was killed before it had loaded its state has no position.
    positions = [
        a.resumed is None or a.resumed == (each["resumed_from_step"] or 0)
        for a, each in zip(job.attempts, told["attempts"], strict=False)
    ]
    return Comparison(
        wall,
        {each: (goodput["seconds"].get(each, 0.0) - books[each]) / wall for each in categories},
        goodput["wall_seconds"] / wall - 1,
        goodput["ettr_ratio"] - (1 - sum(strict[category] for category in LOST) / wall),
        all(positions) and [each.how for each in job.attempts] == [each["end"] for each in told["attempts"]],
        len(job.attempts),
        sum(least <= each <= most for (least, most), each in zip(losses, said, strict=False)),
        books,
        json.dumps({"told": told, "books": books, "lost": losses, "ends": [each.how for each in job.attempts]}),
    )


def main() -> None:
    """Run the campaign and print a line for each run."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.restart_campaign")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=SCENARIOS)
    options = parser.parse_args()
    results = []
    for name in [options.only] if options.only else SCENARIOS:
        for number in range(options.times):
            with tempfile.TemporaryDirectory() as folder:
                job = RestartingJob(Path(folder))
                SCENARIOS[name](job, random.Random(f"{options.seed} {name} {number}"))
                results.append(compared(job))
            print(f"{name} {number}: {results[-1].told()}", flush=True)
            if not results[-1].right:
                print(results[-1].detail, file=sys.stderr)
    goals = "each category and the wall clock within 1 %, ettr_ratio within 2 points, lost steps exact"
    print(f"{sum(run.right for run in results)} of {len(results)} runs are within the goals: {goals}")


if __name__ == "__main__":
    main()
