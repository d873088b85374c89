"""How often a straggler is named rightly: ``python -m tests.faults.straggler_campaign [--times 5] [--seed 1]``.

In each job, four ranks train on two emulated nodes: two torchrun agents with one run folder. First nothing is wrong.
Then all ranks of a node become a few percent slower, for longer than a minute: that opens no stall, and the rules of
Prometheus name the node. Then one thing after another goes wrong, in random order, on a random rank or node, at a random
moment and to a random degree. Right is a verdict of every waiting rank that names the rank, its node and the reason.
Nobody may be accused while nothing is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
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

from tests.faults.campaign import Campaign, Trial, line_in
from tests.faults.processes import ROOT, environment, events, wait_for, write
from tests.free_ports import free_ports
from tests.stack.jobs import Prometheus

NODES = ("n1", "n1", "n2", "n2")
"""The node of each rank."""

PACE_SECONDS = 0.05
"""Time of a step on each rank without the others."""

JOB = """
    import json, os, sys, time
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    rank, pace, every = int(os.environ["RANK"]), float(sys.argv[1]), 8
    torch.set_num_threads(1)


    class Order:
        what, seconds, over, seen = "", 0.0, False, 0

        def look(self):
            stamp = os.stat("order.json").st_mtime_ns
            if stamp != self.seen:
                with open("order.json") as file:
                    order = json.load(file)
                self.what = order["what"] if rank in order["ranks"] else ""
                self.seconds, self.over, self.seen = order["seconds"], order["what"] == "end", stamp


    class Samples(Dataset):
        def __len__(self):
            return 1 << 20

        def __getitem__(self, index):
            if order.what == "loader":
                time.sleep(order.seconds)
            return torch.full((64,), index % 7 / 7)


    class SlowStorage:
        def __init__(self, seconds):
            self.seconds = seconds

        def write(self, data):
            time.sleep(self.seconds)
            self.seconds = 0.0
            return len(data)

        def flush(self):
            pass


    def think(seconds):
        time.sleep(seconds)  # the compute


    def evaluate(seconds):
        with torch.no_grad():
            for _ in DataLoader(range(8), batch_size=1):
                time.sleep(seconds / 8)


    def save(seconds):
        torch.save({}, SlowStorage(seconds), _use_new_zipfile_serialization=False)


    order = Order()
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(DataLoader(Samples(), batch_size=1)):
        order.look()
        time.sleep(pace)
        if order.what in {"compute", "node", "percent"}:
            think(order.seconds)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0 and order.what == "evaluation":
            evaluate(every * order.seconds)
        if step % every == 0 and order.what == "checkpoint":
            save(every * order.seconds)
        over = torch.tensor(float(order.over))
        dist.all_reduce(over)
        if over > 0:
            break
    dist.destroy_process_group()
"""


line_of = functools.partial(line_in, JOB)


class StragglingJob:
    """Two torchrun agents, each with a node's name and two ranks, and one run folder.

    Args:
        folder: of the job. The run folder is in it.
        window: ``stall_window_seconds``.
    """

    def __init__(self, folder: Path, *, window: float) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        script = write(folder, "train.py", JOB)
        self.order("")
        port = str(free_ports())
        self.agents = []
        for number, node in enumerate(dict.fromkeys(NODES)):
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)),
                *("--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port),
                *("-m", "telemetry", "run", "--run-dir", "run", "--stall-window-seconds", f"{window:g}"),
                *(str(script), str(PACE_SECONDS)),
            ]
            env = environment(TELEMETRY_NODE=node, OMP_NUM_THREADS="1")
            with (folder / f"{node}.txt").open("wb") as output:
                self.agents.append(
                    subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output, start_new_session=True)
                )

    def __enter__(self) -> StragglingJob:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.send_signal(signal.SIGTERM)  # it ends its ranks, which are in sessions of their own
        for agent in self.agents:
            agent.wait(60)

    @property
    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("n?.txt")))

    def order(self, what: str, ranks: tuple[int, ...] = (), seconds: float = 0.0) -> None:
        """From now on these ranks are slow in this way: by so many seconds a step, on average."""
        path = self.folder / "order.json"
        path.with_suffix(".new").write_text(json.dumps({"what": what, "ranks": ranks, "seconds": seconds}))
        os.replace(path.with_suffix(".new"), path)

    def trains(self) -> None:
        """Wait until all ranks have trained for a while."""

        def all_train() -> bool:
            assert all(agent.poll() is None for agent in self.agents), self.output
            return {line["rank"] for line in self.logged("window") if line["steps"]} == set(range(len(NODES)))

        wait_for(all_train, "all ranks train")

    def logged(self, event: str) -> list[dict]:
        return events(self.run_dir, event, running=True)

    def open_stalls(self) -> list[dict]:
        """The stalls that are open now, the newest of each rank."""
        newest: dict[int, dict] = {}
        for line in sorted([*self.logged("stall_open"), *self.logged("stall_close")], key=lambda line: line["time"]):
            newest[line["rank"]] = line
        return [line for line in newest.values() if line["event"] == "stall_open"]


# -- the campaign --------------------------------------------------------------------------------------------------

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
        with contextlib.suppress(OSError, ValueError):
            return bool(self._server.query("vector(1)"))
        return False

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

        with contextlib.suppress(AssertionError):
            wait_for(lambda: waiting <= {line["rank"] for line in opened()}, "verdicts", PATIENCE_SECONDS)
        seconds = time.monotonic() - began
        self._job.order("")
        lines = opened()
        of_waiting = [line for line in lines if line["rank"] in waiting]
        silent = waiting - {line["rank"] for line in of_waiting}
        wrong = [line for line in of_waiting if not _right(line, way, ranks)]
        accused = [line for line in lines if line["rank"] in ranks and line["cause"] == "straggler"]
        said = "; ".join(dict.fromkeys(map(_said, wrong or of_waiting))) or "nothing"
        said += f"; nothing by ranks {sorted(silent)}" if silent else ""
        return Trial(way, truth, not (silent or wrong or accused), round(seconds, 1), said)

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
    evidence = line["evidence"]
    rank = evidence.get("straggler_rank")
    named = line["cause"] == "straggler" and rank in ranks and evidence["straggler_node"] == NODES[rank]
    return named and re.fullmatch(REASONS[way], evidence["straggler_reason"]) is not None


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
    print(campaign.summary())


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
