"""How often the verdict on a hang is right: ``python -m tests.faults.hang_campaign [--times 5] [--seed 1] [--only WHAT]``.

Jobs of four ranks on two emulated nodes hang in thirteen ways, each at random ranks and steps. Right is a verdict with
the right rank, its node, the kind and, where there is one, the line. A whole campaign writes its result.
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
    "left": ("left", "rank_left", "after the loop", None),
    "barrier": ("barrier", "rank_left", "after the loop, in a barrier", None),
    "ended": ("end", "rank_left", None, None),
    "killed": ("signal", "rank_gone", None, signal.SIGKILL),
    "stopped": ("signal", "rank_stopped", None, signal.SIGSTOP),
    "order": ("order", "mismatch", "the other collective", None),
}
"""What the script does, and the kind, the line and the signal that go with it."""


def hang(way: str, odd: int, step: int) -> tuple[bool, float, str]:
    """One job: whether its verdict is right, seconds from the hang to it, and its sentence."""
    what, kind, line, signum = WAYS[way]
    with (
        tempfile.TemporaryDirectory() as folder,
        HangingJob(Path(folder), what, odd=odd, nodes=NODES, AT=str(step)) as job,
    ):
        job.reached((odd + 1) % 4 if what == "worker" else odd)
        began = time.monotonic()
        if signum is not None:
            job.send(signum)
        try:
            said = wait_for(
                lambda: next((one for one in job.hangs() if one.get("silent_ranks") == 0), None), "a verdict", 90
            )
        except AssertionError:
            return False, 90.0, f"none; {[one['verdict'] for one in job.hangs()]}"
        seconds = time.monotonic() - began
    suspects = [(suspect["rank"], suspect["node"]) for suspect in said["suspects"]]
    right = said["kind"] == kind and suspects == [(odd, NODES[odd])]
    if line is not None and right:
        right = said["suspects"][0]["where"].startswith(f"train.py:{line_of(line)} (")
    return right, seconds, said["verdict"]


ABOUT = (
    "Jobs of four ranks on two emulated nodes hang in thirteen ways, each at random ranks and steps. Right is a verdict "
    "with the right rank, node and kind and, where there is one, the line."
)


def main() -> None:
    """Run the campaign, print a line for each job, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hang_campaign")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=WAYS)
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    command = f"python -m tests.faults.hang_campaign --times {options.times} --seed {options.seed}"
    campaign = Campaign("hang-campaign", "How often the verdict on a hang is right", ABOUT, command)
    for way in [options.only] if options.only else WAYS:
        for _ in range(options.times):
            odd, step = chosen.randrange(4), chosen.randrange(11, 38)
            right, seconds, said = hang(way, odd, step)
            campaign.add(Trial(way, f"rank {odd} on {NODES[odd]}, step {step}", right, round(seconds, 1), said))
    print(f"{sum(trial.right for trial in campaign.trials)} of {len(campaign.trials)} are right")
    if not options.only:
        print(*campaign.write(), sep="\n")


if __name__ == "__main__":
    main()
