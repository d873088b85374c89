"""Jobs and servers of the stack tests: processes that are started as a user would start them, and what they answer."""

import json
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import psutil
import pytest

from telemetry.node.board import Board
from telemetry.util.identity import identify
from tests.faults.processes import log_lines, ranks_in, report, report_text

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("train_ddp.py")
REQUIRED = os.environ.get("TELEMETRY_TEST_REQUIRE_STACK") == "1"
SLOW_RANK = 2
TOKEN = "TEST_STACK_TOKEN"
NODE = identify(None, None, {}).node


def wait_for(what, probe, seconds=30.0, every=0.05):
    """The first true answer of ``probe``; what it raises counts as none. Past the deadline the test fails."""
    deadline, last = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        try:
            last = probe()
            if last:
                return last
        except (OSError, ValueError, KeyError, AssertionError) as error:
            last = error
        time.sleep(every)
    pytest.fail(f"{what}: not within {seconds:g} s; last seen: {last!r}")


def get(url, seconds=3.0):
    with urllib.request.urlopen(url, timeout=seconds) as answer:
        return answer.read().decode()


def scrape(port):
    """The page at a port of this machine."""
    return get(f"http://127.0.0.1:{port}/metrics")


class Job:
    """One training job, of one process or several."""

    def __init__(self, processes, run_dir, port, until):
        self.processes = processes
        self.run_dir = run_dir
        self.port = port
        self.until = until
        self.board = Board(run_dir.name, str(run_dir), NODE).path

    @property
    def stderr(self):
        return "".join(path.read_text() for path in sorted(self.run_dir.parent.glob(f"{self.run_dir.name}*.stderr")))

    def logs(self):
        return log_lines(self.run_dir, running=True)

    def pids(self):
        """Process ids by rank."""
        names = [re.fullmatch(r"rank-(\d+)\.(\d+)\.jsonl", path.name) for path in self.run_dir.glob("logs/*.jsonl")]
        return {int(name[1]): int(name[2]) for name in names}

    def targets(self):
        """The one target file there is, read."""
        (path,) = self.run_dir.glob("targets/*.json")
        return json.loads(path.read_text())

    def running(self):
        return all(process.poll() is None for process in self.processes)

    def wait(self, seconds=30.0):
        return [process.wait(seconds) for process in self.processes]

    def wait_for_steps(self, ranks, port=None, seconds=60.0):
        """Until every rank shows steps on one port."""

        def all_step():
            assert self.running(), self.stderr
            steps = ranks_in(scrape(port or self.port))
            return all(steps[str(rank)] >= 3 for rank in ranks)

        wait_for(f"steps of ranks {list(ranks)} at port {port or self.port}\n{self.stderr}", all_step, seconds)

    def server(self):
        """The rank that listens on the port."""
        for rank, pid in self.pids().items():
            try:
                sockets = psutil.Process(pid).net_connections(kind="tcp")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if any(s.status == psutil.CONN_LISTEN and s.laddr.port == self.port for s in sockets):
                return rank
        return None

    def report(self):
        return report(self.run_dir)

    def report_text(self):
        return report_text(self.run_dir)


def environment(**more):
    """A user's, without what this very test run may be under."""
    foreign = re.compile(r"TELEMETRY_|TORCHELASTIC_|SLURM|PROMETHEUS_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_")
    kept = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


class Prometheus:
    """A server's query interface."""

    def __init__(self, port):
        self.port = port

    def query(self, expression):
        url = f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            return json.loads(get(url))["data"]["result"]
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from None

    def by_rank(self, expression):
        """The values of an instant vector, by rank."""
        return {int(series["metric"]["rank"]): float(series["value"][1]) for series in self.query(expression)}


def must_have(command):
    path = shutil.which(command)
    if path is None:
        packages = "prometheus, prometheus-alertmanager, victoria-metrics, slurm-wlm, munge, tmux, chromium"
        text = f"{command} is not installed (one of Debian's packages {packages} has it)"
        pytest.fail(text) if REQUIRED else pytest.skip(text)
    return path
