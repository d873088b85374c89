"""One job for the tests of this folder, and a Prometheus server that scrapes it.

The job starts once: importing torch in four ranks is what takes long here.
"""

import json
import sys

import pytest

from stack.jobs import SCRIPT, SLOW_RANK, Job, Prometheus, get, must_have, wait_for
from tests.free_ports import free_ports


@pytest.fixture(scope="package")
def ports():
    """Ports by purpose. Above each there are some free ones, for jobs that find it taken."""
    first = free_ports(48)
    return {"job": first, "side_by_side": first + 16, "at_once": first + 32}


@pytest.fixture(scope="package")
def job(torchrun, ports):
    """Four ranks under torchrun, rank SLOW_RANK starving, training until told to stop."""
    options = ("--interval-seconds", "0.1", "--log-interval-seconds", "2")
    job = torchrun("quartet", 4, ports["job"], options, ("--slow-seconds", "0.05"), SLOW_RANK=str(SLOW_RANK))
    job.wait_for_steps(range(4))
    yield job
    job.until.touch()


@pytest.fixture(scope="package")
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
    yield server
    process.terminate()


@pytest.fixture(scope="package")
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
    yield job
    for rank in range(4):
        (launch.folder / f"side_by_side.stop-{rank}").touch()
