"""How often the verdict on a hang is right: ``python -m tests.faults.hang_campaign [--times 5] [--seed 1] [--only WHAT]``.

Jobs of four ranks on two emulated nodes hang in many ways, each at random ranks and steps. Right is a verdict with
the right rank, its node, the kind and, where there is one, the line. Healthy jobs accuse nobody. A whole campaign writes
its result.
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
import time
from pathlib import Path

from tests.faults.campaign_results import Campaign, Trial
from tests.faults.hanging_jobs import HangingJob, line_of
from tests.faults.processes import wait_for

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

SUSPENDED_SECONDS = 3.0


ACQUAINTED = {"AT": "25", "PAUSE": "0.1"}
"""The step at which something happens, and seconds between steps: until then each node knows the other."""


def truth(way: str, odd: int) -> list[tuple[int, str]]:
    """The ranks that are to be named, with their nodes."""
    ranks = {"all-save": range(4), "node": [rank for rank in range(4) if NODES[rank] == NODES[odd]]}.get(way, [odd])
    return [(rank, NODES[rank]) for rank in ranks]


def hang(way: str, odd: int, step: int) -> tuple[bool, float, str]:
    """One job: whether its verdict is right, seconds from the hang to it, and its sentence."""
    what, kind, line, signum = WAYS[way]
    variables = {"AT": str(step)} if way != "node" else ACQUAINTED
    with (
        tempfile.TemporaryDirectory() as folder,
        HangingJob(Path(folder), what, odd=odd, nodes=NODES, **variables) as job,
    ):
        job.reached((odd + 1) % 4 if what == "worker" else odd)
        began = time.monotonic()
        if signum is not None:
            for rank, _ in truth(way, odd):
                job.send(signum, rank)
        try:
            said = wait_for(
                lambda: next((one for one in job.hangs() if one.get("silent_ranks") == 0), None), "a verdict", 90
            )
        except AssertionError:
            return False, 90.0, f"none; {[one['verdict'] for one in job.hangs()]}"
        seconds = time.monotonic() - began
    suspects = [(suspect["rank"], suspect["node"]) for suspect in said["suspects"]]
    right = said["kind"] == kind and suspects == truth(way, odd)
    if line is not None and right:
        right = all(suspect["where"].startswith(f"train.py:{line_of(line)} (") for suspect in said["suspects"])
    return right, seconds, said["verdict"]


def healthy(what: str, odd: int) -> tuple[bool, str]:
    """One job in which nothing hangs: whether nobody is accused, and what was said."""
    suspended = what == "suspended"
    with (
        tempfile.TemporaryDirectory() as folder,
        HangingJob(Path(folder), "slow" if suspended else what, odd=odd, nodes=NODES, **ACQUAINTED) as job,
    ):
        if suspended:
            wait_for(lambda: job.logged("window"), "it goes on")
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                for rank in range(len(NODES)):
                    job.send(signum, rank)
                time.sleep(SUSPENDED_SECONDS if signum == signal.SIGSTOP else 0)
        for rank in range(len(NODES)):
            job.reached(rank, "done")
        stuck = [line["rank"] for line in job.logged("stall_open") if "stuck_in" in line["evidence"]]
        said = [line.get("verdict", "over") for line in job.hangs()]
    return not stuck and not said, f"stuck: {stuck}; {said}" if stuck or said else "nobody is accused"


ABOUT = (
    f"Jobs of four ranks on two emulated nodes hang in {len(WAYS)} ways, each at random ranks and steps. Right is a "
    "verdict with the right ranks, node and kind and, where there is one, the line. Healthy jobs are right if nobody is "
    "accused. `stuck_seconds` is 1, and the nodes' clocks of the exchange run ten times as fast as usual."
)


def main() -> None:
    """Run the campaign, print a line for each job, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hang_campaign")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[*WAYS, *HEALTHY])
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    command = f"python -m tests.faults.hang_campaign --times {options.times} --seed {options.seed}"
    campaign = Campaign("hang-campaign", "How often the verdict on a hang is right", ABOUT, command)
    for way in [options.only] if options.only else [*WAYS, *HEALTHY]:
        for _ in range(options.times):
            odd, step = chosen.randrange(4), chosen.randrange(11, 38)
            later = way == "node" or way in HEALTHY
            about = f"rank {odd} on {NODES[odd]}, step {ACQUAINTED['AT'] if later else step}"
            if way in WAYS:
                right, seconds, said = hang(way, odd, step)
                campaign.add(Trial(way, about, right, round(seconds, 1), said))
            else:
                right, said = healthy(way, odd)
                campaign.add(Trial(f"healthy: {HEALTHY[way]}", about, right, None, said))
    print(f"{sum(trial.right for trial in campaign.trials)} of {len(campaign.trials)} are right")
    if not options.only:
        print(*campaign.write(), sep="\n")


if __name__ == "__main__":
    main()
