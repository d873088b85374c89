"""How right the books of a run are that is restarted: ``python -m tests.faults.restart_campaign [--times 3] [--seed 1]``.

Trainings are killed at random moments, fail, leave, and are started again: by hand, by torchrun, and with another number
of ranks. They evaluate, and in every other attempt a fetch hangs for a while. The report is compared with the scripts' own
stamps.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.attempt_scripts import CATEGORIES
from tests.faults.processes import python, wait_for
from tests.faults.restarting_jobs import FAILED, FINISHED, KILLED, RestartingJob, kept_of, true_books

if TYPE_CHECKING:
    from collections.abc import Callable

LOST = ("redone", "restore", "replay", "startup", "stuck", "down")
ENDS = ("step", "checkpoint", "restore", "start", "exception", "status")

BEAT_LATE_SECONDS = 0.03
"""A heartbeat has a time, and counts the steps a moment later."""


# -- what happens to a run -----------------------------------------------------------------------------------------


def one_attempt(job: RestartingJob, end: str, chosen: random.Random) -> None:
    """Type the command once more, and let the attempt end in a given way."""
    if end in {"exception", "status"}:
        job.tell(end, after=chosen.randrange(30, 160))
    begin = time.time()
    process = job.start()
    if end in {"exception", "status", "finish"}:
        process.wait(120)
        job.over(FINISHED if end == "finish" else FAILED)
        return
    if end == "start":
        time.sleep(chosen.uniform(0.3, 2.5))
    elif end == "restore":
        job.saw("loads")
        time.sleep(chosen.uniform(0.0, 0.3))
    elif end == "checkpoint":
        job.saw("saves", chosen.randrange(2, 6))
        time.sleep(chosen.uniform(0.0, 0.15))
    else:
        job.saw("starts")
        time.sleep(chosen.uniform(0.5, 6.0))
    killed = job.kill(process.pid)
    process.wait(60)
    job.over(KILLED, 1, begin, process.pid, {0: killed})


def until(job: RestartingJob, steps: int) -> None:
    """The attempts that are started from now on end after so many more steps."""
    done = max((attempt.done() for attempt in job.attempts), default=0)
    (job.folder / "until").write_text(str(done + steps))


def typed_again(job: RestartingJob, chosen: random.Random) -> None:
    """The same command in seven attempts, which end in all ways, in random order."""
    ends = list(ENDS)
    chosen.shuffle(ends)
    for end in ["checkpoint", *ends]:
        one_attempt(job, end, chosen)
    until(job, 150)
    one_attempt(job, "finish", chosen)


def kill_one_of(job: RestartingJob, ranks: int, chosen: random.Random) -> tuple[int, float]:
    """Kill a random rank at a random moment, once the first checkpoint of the attempt is there."""
    job.saw("saved", chosen.randrange(1, 4))
    time.sleep(chosen.uniform(0.0, 1.0))
    odd = chosen.randrange(ranks)
    return odd, job.kill(job.saw("process", rank=odd)[0]["pid"])


def ended(job: RestartingJob, ranks: int, again: int) -> None:
    """Until the next attempt's processes are there."""
    for rank in range(ranks):
        path = job.folder / f"stamps-{again}-{rank}.jsonl"
        wait_for(path.exists, f"attempt {again}: {job.errors[-2000:]}", 60)


def restarted_by_torchrun(job: RestartingJob, chosen: random.Random) -> None:
    """``torchrun --max-restarts 3``: two of the attempts are killed, one fails, and the last finishes."""
    ways = ["kill", "kill", "exception"]
    chosen.shuffle(ways)
    launcher = None
    for number, way in enumerate(ways):
        if way == "exception":
            job.tell("exception", chosen.randrange(2), chosen.randrange(30, 120))
        launcher = launcher or job.start(2, restarts=3)
        killed: dict[int, float] = {}
        if way == "kill":
            odd, moment = kill_one_of(job, 2, chosen)
            killed[odd] = moment
        else:
            job.saw("stepped", 20)
        if number == len(ways) - 1:
            done = max(stamp["number"] for stamp in job.stamps() if stamp["what"] == "stepped")
            (job.folder / "until").write_text(str(done + 150))
        ended(job, 2, job.started + 1)
        job.over(KILLED if killed else FAILED, 2, killed=killed)
    launcher.wait(120)
    job.over(FINISHED, 2)


def elastic(job: RestartingJob, chosen: random.Random) -> None:
    """Two ranks, then one, then two again."""
    for ranks in (2, 1):
        launcher = job.start(ranks)
        odd, moment = kill_one_of(job, ranks, chosen)
        launcher.wait(120)
        job.over(KILLED, ranks, killed={odd: moment})
    until(job, 150)
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
        off: the difference of each category, as a share of the wall clock.
        to_the_kill: the largest, if what a process did after its last heartbeat does not count as down.
        wall_off: of the length of the run.
        ettr_off: of `ettr_ratio`.
        ends, positions: whether they are right.
        lost_steps: by the report; ``steps_right``: of how many attempts they are exact. ``unheard``: steps of killed
            attempts after the last heartbeat, which the report cannot know.
    """

    wall: float
    off: dict[str, float]
    to_the_kill: float
    wall_off: float
    ettr_off: float
    ends: bool
    positions: bool
    attempts: int
    lost_steps: int
    steps_right: int
    unheard: int
    detail: str

    @property
    def right(self) -> bool:
        """Whether all is within the goals."""
        near = all(abs(each) <= 0.01 for each in (*self.off.values(), self.wall_off)) and abs(self.ettr_off) <= 0.02
        return near and self.ends and self.positions and self.steps_right == self.attempts


def compared(job: RestartingJob) -> Comparison:
    """The report against the stamps."""
    found = python("-m", "telemetry", "report", "run", "--json", cwd=job.folder)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)["job"]
    books, strict = (true_books(job.attempts, to_the_kill=each) for each in (False, True))
    wall, seconds = sum(books.values()), told["goodput"]["seconds"]
    categories = sorted({*books, *seconds})
    off = {category: (seconds.get(category, 0.0) - books.get(category, 0.0)) / wall for category in categories}
    strictly = max(abs(seconds.get(category, 0.0) - strict.get(category, 0.0)) / wall for category in categories)
    ettr = 1 - sum(strict.get(category, 0.0) for category in LOST) / wall
    steps_right = lost_steps = unheard = 0
    for number, (attempt, each) in enumerate(zip(job.attempts, told["attempts"], strict=False)):
        at_least, at_most, truly = lost(job, number)
        steps_right += at_least <= each["lost_steps"] <= at_most
        lost_steps += each["lost_steps"]
        unheard = max(unheard, truly - each["lost_steps"])
    ends = [attempt.how for attempt in job.attempts]
    starts = [(attempt.resumed or 0) for attempt in job.attempts]
    resumed = [(each["resumed_from_step"] or 0) for each in told["attempts"]]
    # An attempt that was killed before it had loaded its state has no position.
    positions = all(
        a.resumed is None or was == said for a, was, said in zip(job.attempts, starts, resumed, strict=False)
    )
    return Comparison(
        wall,
        off,
        strictly,
        told["goodput"]["wall_seconds"] / wall - 1,
        told["goodput"]["ettr_ratio"] - ettr,
        ends == [each["end"] for each in told["attempts"]],
        positions,
        len(job.attempts),
        lost_steps,
        steps_right,
        unheard,
        json.dumps({"told": told, "books": books, "ends": ends, "starts": starts,
                    "lost": [lost(job, number) for number in range(len(job.attempts))]}),
    )  # fmt: skip


def lost(job: RestartingJob, number: int) -> tuple[int, int, int]:
    """The lost steps of an attempt: by its last heartbeat at least and at most, and up to the kill."""
    attempt, kept = job.attempts[number], kept_of(job.attempts, number)
    moments = [one.end - one.tail for one in attempt.processes if one.tail]
    heard = max(moments) if len(moments) == len(attempt.processes) else None
    begun = attempt.resumed or 0

    def since(moment: float | None) -> int:
        done = attempt.done(moment)
        return max(0, done - max(begun, kept)) if done > begun else 0

    return since(heard), since(None if heard is None else heard + BEAT_LATE_SECONDS), since(None)


def campaign(name: str, seed: str) -> Comparison:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        job = RestartingJob(Path(folder))
        SCENARIOS[name](job, random.Random(seed))
        return compared(job)


def table(results: dict[str, list[Comparison]]) -> list[str]:
    """Of all runs, as Markdown."""
    lines = [
        "| Runs | Attempts | Seconds | Ends and positions right | Lost steps exact | Off at most | `ettr_ratio` off at most |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        attempts = sum(run.attempts for run in runs)
        worst = max((abs(off), category) for run in runs for category, off in run.off.items())
        lines.append(
            f"| {name}, {len(runs)} | {attempts} | {sum(run.wall for run in runs):.0f} | "
            f"{sum(run.ends and run.positions for run in runs)} of {len(runs)} runs | "
            f"{sum(run.steps_right for run in runs)} of {attempts} attempts ({sum(run.lost_steps for run in runs)} steps) | "
            f"{worst[0]:.2%} of the wall clock (`{worst[1]}`) | {max(abs(run.ettr_off) for run in runs):.2%} |"
        )
    everything = [run for runs in results.values() for run in runs]
    columns = [*CATEGORIES, "down"]
    lines += ["", f"| Largest difference | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, runs in results.items():
        cells = [f"{max(abs(run.off.get(category, 0.0)) for run in runs):.2%}" for category in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    within = (
        f"{sum(run.right for run in everything)} of {len(everything)} runs are within the goals: each category and the"
    )
    strict = f"a category is off by at most {max(run.to_the_kill for run in everything):.2%} of the wall clock, and an"
    lines += ["", f"{within} wall clock within 1 %, `ettr_ratio` within 2 points, lost steps exact."]
    lines += ["If what a process did after its last heartbeat counts as what it was, and not as down,"]
    lines += [f"{strict} attempt by at most {max(run.unheard for run in everything)} lost steps."]
    return lines


def main() -> None:
    """Run the campaign and print its tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.restart_campaign")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=SCENARIOS)
    parser.add_argument("--details", type=Path, help="write what is wrong of a run into this file")
    options = parser.parse_args()
    results: dict[str, list[Comparison]] = {}
    for name in [options.only] if options.only else SCENARIOS:
        for number in range(options.times):
            run = campaign(name, f"{options.seed} {name} {number}")
            results.setdefault(name, []).append(run)
            worst = max((abs(off), category) for category, off in run.off.items())
            print(f"{name} {number}: {'right' if run.right else 'WRONG'}, {run.attempts} attempts, {run.wall:.0f} s, off "
                  f"at most {worst[0]:.2%} ({worst[1]}), ettr {run.ettr_off:+.2%}", flush=True)  # fmt: skip
            if options.details and not run.right:
                with options.details.open("a") as file:
                    file.write(run.detail + "\n")
    print("\n".join(["", *table(results)]))


if __name__ == "__main__":
    main()
