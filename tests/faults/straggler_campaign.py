"""How often a straggler is named rightly: ``python -m tests.faults.straggler_campaign [--times 5] [--seed 1]``.

In each job, four ranks train on two emulated nodes: two torchrun agents with one run folder. First nothing is wrong.
Then all ranks of a node become a few percent slower, for longer than a minute: that opens no stall, and the rules of
Prometheus name the node. Then one thing after another goes wrong, in random order, on a random rank or node, at a random
moment and to a random degree. Right is a verdict of every waiting rank that names the rank, its node and the reason.
Nobody may be accused while nothing is wrong.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.faults.campaign_results import Campaign, Trial
from tests.faults.processes import ROOT, environment, wait_for
from tests.faults.straggling_jobs import NODES, PACE_SECONDS, StragglingJob, line_of
from tests.free_ports import free_ports
from tests.stack.jobs import Prometheus

WINDOW_SECONDS = 10.0
RULE_SECONDS = 66.0
"""How long the rules are given. They look back over one minute here, and over five as they are shipped."""

PATIENCE_SECONDS = 60.0
SLOW_NODE_RATIO = 0.03  # of the alert TrainingSlowNode
PERCENT = 0.12

NODE_IS_SLOW = "; all 2 ranks of that node are waited for, so the node is slow"
SLOW = rf"takes longer to compute a step, mostly in (think \(train\.py:{line_of('the compute')}\)|<module> \(train.py:\d+\))"
REASONS = {
    "loader": r"waits for data( \(\w+\))?",
    "compute": SLOW,
    "evaluation": r"is in an evaluation( \(\w+\))?",
    "checkpoint": r"is in a checkpoint( \(\w+\))?",
    "node": SLOW + NODE_IS_SLOW,
}
"""What each waiting rank must say of the one that it waits for. A step takes most time in the loop itself if what is
added is less."""

ABOUT = (
    "Four ranks train on two emulated nodes: two torchrun agents with one run folder. One rank has a slow loader or slow "
    "compute, evaluates or writes checkpoints while the others wait, or all ranks of a node are slower: by half a step and "
    f"more, or by {PERCENT:.0%}. Ranks, nodes, moments and degrees are random. Right is a verdict of each waiting rank with "
    "the right rank, node and reason, or of the rules of Prometheus for the few percent, and no verdict on a healthy job. "
    f"stall_window_seconds is {WINDOW_SECONDS:g}; the rules look back over one minute."
)


class Rules:
    """A Prometheus server with the shipped recording rules, which scrapes the jobs in a folder."""

    def __init__(self, folder: Path) -> None:
        rules = (ROOT / "deploy" / "prometheus" / "telemetry.recording.rules.yml").read_text(encoding="utf-8")
        rules = re.sub(r"interval: \w+", "interval: 5s", rules.replace("[5m]", "[1m]"))
        (folder / "rules.yml").write_text(rules, encoding="utf-8")
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 5s}\nrule_files: [rules.yml]\nscrape_configs:\n"
            f"  - {{job_name: job, file_sd_configs: [{{files: ['{folder}/job/run/targets/*.json'], refresh_interval: 1s}}]}}\n",
            encoding="utf-8",
        )
        (folder / "job" / "run" / "targets").mkdir(parents=True)  # it can only watch a folder that is there
        port = free_ports()
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
            env=environment(), cwd=folder,
        )  # fmt: skip
        self._server = Prometheus(port)
        wait_for(self._is_ready, "Prometheus")

    def _is_ready(self) -> bool:
        assert self._process.poll() is None
        try:
            self._server.query("vector(1)")
        except (OSError, ValueError):
            return False
        return True

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def slow_nodes(self) -> dict[str, float]:
        """The nodes of which every rank takes longer than the median, by the share of a step."""
        found = self._server.query("run_node:training_slow_node:excess_ratio")
        return {series["metric"]["node"]: float(series["value"][1]) for series in found}


class Trials:
    """What is done to one job, and what is said of it."""

    def __init__(self, job: StragglingJob, rules: Rules | None, chosen: random.Random) -> None:
        self._job, self._rules, self._random = job, rules, chosen

    def healthy(self) -> Trial:
        """A job in which nothing is wrong."""
        time.sleep(RULE_SECONDS)
        accused = [f"rank {line['rank']}: {_said(line)}" for line in self._job.logged("stall_open")]
        accused += [f"{node} is slow by {ratio:.1%}" for node, ratio in self._slow_nodes().items()]
        return Trial("healthy", "nobody", not accused, RULE_SECONDS, "; ".join(accused) or "nobody is accused")

    def percent(self) -> Trial:
        """A node that is a few percent slower."""
        node = self._random.choice(["n1", "n2"])
        ranks = tuple(rank for rank in range(len(NODES)) if NODES[rank] == node)
        self._job.order("percent", ranks, PERCENT * PACE_SECONDS)
        time.sleep(RULE_SECONDS)
        found, stalls = self._slow_nodes(), self._job.logged("stall_open")
        self._job.order("")
        said = ", ".join(f"{name} is slow by {ratio:.1%}" for name, ratio in found.items()) or "no node is slow"
        said += "".join(f"; rank {line['rank']}: {_said(line)}" for line in stalls)
        return Trial("node-percent", node, list(found) == [node] and not stalls, RULE_SECONDS, said)

    def straggler(self, way: str) -> Trial:
        """One rank is slow, or one node."""
        slow = self._random.randrange(len(NODES))
        ranks = tuple(r for r in range(len(NODES)) if NODES[r] == NODES[slow]) if way == "node" else (slow,)
        truth = f"{NODES[slow]}" if way == "node" else f"rank {slow} on {NODES[slow]}"
        waiting = set(range(len(NODES))) - set(ranks)
        self._quiet()
        time.sleep(self._random.uniform(2.0, 7.0))
        before, began = len(self._job.logged("stall_open")), time.monotonic()
        self._job.order(way, ranks, self._random.uniform(0.5, 1.5) * PACE_SECONDS)

        def opened() -> list[dict]:
            lines = sorted(self._job.logged("stall_open"), key=lambda line: line["time"])
            return lines[before:]

        try:
            wait_for(lambda: waiting <= {line["rank"] for line in opened()}, "verdicts", PATIENCE_SECONDS)
        except AssertionError:
            pass
        seconds = time.monotonic() - began
        self._job.order("")
        lines = opened()
        of_waiting = [line for line in lines if line["rank"] in waiting]
        right = {line["rank"] for line in of_waiting} == waiting and all(_right(x, way, ranks) for x in of_waiting)
        right = right and not [line for line in lines if line["rank"] in ranks and line["cause"] == "straggler"]
        wrong = [line for line in of_waiting if not _right(line, way, ranks)]
        said = "; ".join(dict.fromkeys(map(_said, wrong or of_waiting))) or "nothing"
        if waiting - {line["rank"] for line in of_waiting}:
            said += f"; nothing by ranks {sorted(waiting - {line['rank'] for line in of_waiting})}"
        return Trial(way, truth, right, round(seconds, 1), said)

    def _slow_nodes(self) -> dict[str, float]:
        nodes = self._rules.slow_nodes() if self._rules is not None else {}
        return {node: ratio for node, ratio in nodes.items() if ratio > SLOW_NODE_RATIO}

    def _quiet(self) -> None:
        """Wait until no stall is open, and until most of each window is of the healthy job again."""
        wait_for(lambda: not self._job.open_stalls(), "the stalls close", PATIENCE_SECONDS)
        time.sleep(WINDOW_SECONDS / 2)


def _said(line: dict[str, Any]) -> str:
    evidence = line["evidence"]
    if line["cause"] != "straggler":
        return str(line["cause"])
    return f"rank {evidence['straggler_rank']} on {evidence['straggler_node']} {evidence['straggler_reason']}"


def _right(line: dict[str, Any], way: str, ranks: tuple[int, ...]) -> bool:
    if line["cause"] != "straggler":
        return False
    evidence = line["evidence"]
    rank, node = evidence["straggler_rank"], evidence["straggler_node"]
    reason = REASONS[way]
    return rank in ranks and node == NODES[rank] and re.fullmatch(reason, evidence["straggler_reason"]) is not None


def main() -> None:
    """Run the campaign, print a line for each trial, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.straggler_campaign")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=REASONS, help="without healthy jobs and rules; writes no result")
    options = parser.parse_args()
    if options.only is None and shutil.which("prometheus") is None:
        sys.exit("prometheus is not installed, and names the node that is a few percent slower")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job in progress is ended, too
    chosen = random.Random(options.seed)
    campaign = Campaign("straggler-campaign", "How often a straggler is named rightly", ABOUT, "")
    with tempfile.TemporaryDirectory(prefix="stragglers-") as folder:
        for number in range(options.times):
            (Path(folder) / str(number)).mkdir()
            _one_job(Path(folder) / str(number), chosen, campaign, options.only)
            if options.only is None:  # after each job: the others take minutes
                done = f"--times {number + 1} --seed {options.seed}"
                campaign.command = f"python -m tests.faults.straggler_campaign {done}"
                campaign.write()
    print(f"{sum(trial.right for trial in campaign.trials)} of {len(campaign.trials)} are right")


def _one_job(folder: Path, chosen: random.Random, campaign: Campaign, only: list[str] | None) -> None:
    (folder / "job").mkdir()
    rules = None if only is not None else Rules(folder)
    try:
        with StragglingJob(folder / "job", window=WINDOW_SECONDS) as job:
            job.trains()
            trials = Trials(job, rules, chosen)
            if only is None:
                campaign.add(trials.healthy())
                campaign.add(trials.percent())
            for way in chosen.sample(only or list(REASONS), len(only or REASONS)):
                campaign.add(trials.straggler(way))
            job.order("end")
            for agent in job.agents:
                if agent.wait(60):
                    raise SystemExit(job.output)
    finally:
        if rules is not None:
            rules.close()


if __name__ == "__main__":
    main()
