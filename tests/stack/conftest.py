"""What the stack tests stand on: jobs started as a user would start them, and a Prometheus server that scrapes them.

Starting torch four times is what takes long here, so one torchrun job and one server serve the whole session. Every
process carries a token in its environment; at the end whatever still carries it is killed, by its pid.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from telemetry.identity import identify
from telemetry.publish.board import Board

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


def free_ports(count):
    """The first of ``count`` consecutive ports that nobody has now."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        if first + count > 65535:
            continue
        taken = []
        for port in range(first, first + count):
            with socket.socket() as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    one.bind(("127.0.0.1", port))
                except OSError:
                    taken.append(port)
        if not taken:
            return first


def get(url, seconds=3.0):
    with urllib.request.urlopen(url, timeout=seconds) as answer:
        return answer.read().decode()


class Samples(list):
    """Samples of one exposition."""

    def ranks(self, name):
        return sorted(int(labels["rank"]) for sample, labels, _ in self if sample == name)

    def value(self, name, **labels):
        found = [v for n, has, v in self if n == name and labels.items() <= has.items()]
        assert len(found) == 1, f"{name}{labels}: {found}"
        return found[0]


def scrape(port):
    text = get(f"http://127.0.0.1:{port}/metrics")
    return Samples(
        (s.name, s.labels, s.value) for family in text_string_to_metric_families(text) for s in family.samples
    )


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
        """Whole lines of all logs, as objects."""
        lines = []
        for path in sorted(self.run_dir.glob("logs/rank-*.jsonl")):
            for line in path.read_bytes().split(b"\n")[:-1]:
                lines.append(json.loads(line))
        return lines

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
            seen = scrape(port or self.port)
            return all(seen.value("training_steps_total", rank=str(rank)) >= 3 for rank in ranks)

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
        out = subprocess.run(
            [sys.executable, "-m", "telemetry", "report", str(self.run_dir), "--json"],
            env=environment(), cwd=self.run_dir.parent, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert out.returncode == 0, out.stderr
        return json.loads(out.stdout)

    def report_text(self):
        out = subprocess.run(
            [sys.executable, "-m", "telemetry", "report", str(self.run_dir)],
            env=environment(), cwd=self.run_dir.parent, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert out.returncode == 0, out.stderr
        return out.stdout


def environment(**more):
    """A user's, without what this very test run may be under."""
    foreign = re.compile(r"TELEMETRY_|TORCHELASTIC_|SLURM|PROMETHEUS_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_")
    kept = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def read_samples(vector):
    """``{(label values): value}`` of an instant vector is what a test compares; keyed by rank."""
    return {int(series["metric"]["rank"]): float(series["value"][1]) for series in vector}


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
        return read_samples(self.query(expression))


def must_have(command):
    path = shutil.which(command)
    if path is None:
        packages = "prometheus, prometheus-alertmanager, victoria-metrics, slurm-wlm, munge"
        text = f"{command} is not installed (one of Debian's packages {packages} has it)"
        pytest.fail(text) if REQUIRED else pytest.skip(text)
    return path


@pytest.fixture(scope="session")
def promtool():
    return must_have("promtool")


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Starts processes with the token; none survives the session."""
    token = uuid.uuid4().hex
    folder = tmp_path_factory.mktemp("stack")

    def start(command, name, **variables):
        with open(folder / f"{name}.stdout", "wb") as out, open(folder / f"{name}.stderr", "wb") as err:
            return subprocess.Popen(
                command, env=environment(**{TOKEN: token}, **variables), cwd=folder, stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    started = []

    def keep(*args, **kwargs):
        started.append(start(*args, **kwargs))
        return started[-1]

    keep.folder, keep.token = folder, token
    try:
        yield keep
    finally:
        for _ in range(3):  # what is forked while we look is found the next time
            for process in psutil.process_iter():
                try:
                    ours = process.environ().get(TOKEN) == token
                except (psutil.Error, OSError):
                    continue
                if ours:
                    try:
                        os.kill(process.pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
        for process in started:
            process.wait(10)
        for run_dir in folder.glob("*/logs"):  # a killed job's board would stay for an hour
            shutil.rmtree(Board(run_dir.parent.name, str(run_dir.parent), NODE).path, ignore_errors=True)


@pytest.fixture(scope="session")
def torchrun(launch):
    """Starts a job with torchrun."""
    try:
        there = find_spec("torch.distributed.run") is not None
    except ImportError:
        there = False
    if not there:
        text = "torch has no torch.distributed.run"
        pytest.fail(text) if REQUIRED else pytest.skip(text)

    def start(name, ranks, port, options=(), arguments=(), **variables):
        run_dir, until = launch.folder / name, launch.folder / f"{name}.stop"
        process = launch(
            [
                sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_ports(1)),
                "-m", "telemetry", "run", "--run-dir", str(run_dir), "--port", str(port), *options,
                str(SCRIPT), "--until", str(until), *arguments,
            ],
            name, **variables,
        )  # fmt: skip
        return Job([process], run_dir, port, until)

    return start


@pytest.fixture(scope="session")
def ports():
    """Ports by purpose. Above each there are some free ones, for jobs that find it taken."""
    first = free_ports(48)
    return {"job": first, "side_by_side": first + 16, "at_once": first + 32}


@pytest.fixture(scope="session")
def job(torchrun, ports):
    """Four ranks under torchrun, rank SLOW_RANK starving, training until told to stop."""
    options = ("--interval-seconds", "0.1", "--log-interval-seconds", "2")
    job = torchrun("quartet", 4, ports["job"], options, SLOW_RANK=str(SLOW_RANK))
    job.wait_for_steps(range(4))
    return job


@pytest.fixture(scope="session")
def prometheus(launch, ports):
    """A real server: finds the torchrun job by a static target and by its target file, the other by static target."""
    binary = must_have("prometheus")
    folder, port = launch.folder, free_ports(1)
    configuration = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {"job_name": "static", "static_configs": [{"targets": [f"127.0.0.1:{ports['job']}"]}]},
            {
                "job_name": "file_sd",
                "file_sd_configs": [{"files": [f"{folder}/quartet/targets/*.json"], "refresh_interval": "1s"}],
            },
            {
                "job_name": "side_by_side",
                "file_sd_configs": [{"files": [f"{folder}/side_by_side/targets/*.json"], "refresh_interval": "1s"}],
            },
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(configuration))  # JSON is YAML
    process = launch(
        [
            binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        ],
        "prometheus",
    )  # fmt: skip
    server = Prometheus(port)

    def ready():
        assert process.poll() is None, (folder / "prometheus.stderr").read_text()
        return get(f"http://127.0.0.1:{port}/-/ready")

    wait_for("Prometheus", ready)
    return server


@pytest.fixture(scope="session")
def side_by_side(launch, ports):
    """Four ranks of a job without collectives: one may die, and the others go on."""
    run_dir, port = launch.folder / "side_by_side", ports["side_by_side"]
    processes = [
        launch(
            [
                sys.executable, "-m", "telemetry", "run", "--run-dir", str(run_dir), "--port", str(port),
                str(SCRIPT), "--workers", "1", "--until", str(launch.folder / f"side_by_side.stop-{rank}"),
            ],
            f"side_by_side-{rank}",
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4", LOCAL_WORLD_SIZE="4",
            MASTER_ADDR="127.0.0.1", MASTER_PORT="1", COLLECTIVES="0",
        )
        for rank in range(4)
    ]  # fmt: skip
    job = Job(processes, run_dir, port, launch.folder / "side_by_side.stop")
    job.wait_for_steps(range(4))
    return job
