"""What the stack tests stand on: jobs started as a user would start them, and a Prometheus server that scrapes them.

Starting torch four times is what takes long here, so one torchrun job and one server serve the whole session. Every
process carries a token in its environment; at the end whatever still carries it is killed, by its pid.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from importlib.util import find_spec

import psutil
import pytest

from stack.jobs import (
    NODE,
    REQUIRED,
    SCRIPT,
    SLOW_RANK,
    TOKEN,
    Job,
    Prometheus,
    environment,
    free_ports,
    get,
    must_have,
    wait_for,
)
from telemetry.publish.board import Board


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
    options = ("--interval-seconds", "0.2", "--log-interval-seconds", "2")
    job = torchrun("quartet", 4, ports["job"], options, ("--slow-seconds", "0.05"), SLOW_RANK=str(SLOW_RANK))
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
