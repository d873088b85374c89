"""One cluster for the tests of this folder: two jobs, the servers that monitor them, and a sequence of events.

The events happen once, in fixtures that depend on each other. A rank starves (`starving`), and meanwhile every query of
every dashboard is run (`answers`). Its loader is fixed (`mended`). Then the healthy run ends, and the other one is
killed (`ended`). A test requests the fixture of the event that it is about.
"""

import os
import signal
import sys
import time

import pytest
from fakes import nvml

from stack.cluster import dashboards, servers
from stack.cluster.recorded import Recorded
from stack.cluster.slurm import Slurm
from stack.jobs import SCRIPT, Job
from tests.free_ports import free_ports

STARVED, HEALTHY = "cluster-starved", "cluster-healthy"
STARVED_RANK = 2
SETTINGS = ("--log-interval-seconds", "2", "--stall-window-seconds", "2", "--gpu-hour-price", "2")
"""Its stalls are judged on the faster clock, too. It still ticks once a second, because its cost is also checked."""

SNAPSHOTS = ("--snapshot-settle-seconds", "1")
LOADER = ("--workers", "1", "--samples", "4096", "--pace-seconds", "0.05", "--slow-seconds", "0.06")
TAIL_LINES = 30


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for name, path in servers.LOGS.items():
            if not path.exists():
                continue
            lines = path.read_text(errors="replace").splitlines()
            report.sections.append((f"log of {name}", "\n".join(lines[-TAIL_LINES:])))


@pytest.fixture(scope="package")
def monitoring(launch, tmp_path_factory):
    """The servers, configured as shipped."""
    cluster = servers.Monitoring(launch, tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="package")
def slurm(launch):
    """Slurm on two emulated nodes."""
    cluster = Slurm(launch)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="package")
def starved(torchrun, launch, monitoring):
    """Four ranks under torchrun, one of which reads its samples slowly until its loader is fixed."""
    options = (*SETTINGS, *SNAPSHOTS, "--targets-dir", str(monitoring.targets))
    mended = launch.folder / f"{STARVED}.mended"
    job = torchrun(
        STARVED, 4, free_ports(8), options, ("--by-hand", *LOADER, "--mended", str(mended)), SLOW_RANK=str(STARVED_RANK)
    )
    job.mended = mended
    return job


@pytest.fixture(scope="package")
def healthy(launch, monitoring, tmp_path_factory):
    """Two healthy ranks that train independently. Each has a GPU: a fake driver is below the real NVML binding."""
    run_dir, port, until = launch.folder / HEALTHY, free_ports(8), launch.folder / f"{HEALTHY}.stop"
    gpus = [nvml.Gpu(uuid=f"GPU-{rank}0000000-0000-0000-0000-000000000000", gpm=True) for rank in range(2)]
    driver = nvml.subprocess_environment(tmp_path_factory.mktemp("driver"), nvml.State(gpus=gpus))
    processes = [
        launch(
            [
                sys.executable, "-m", "telemetry", "run", "--run-dir", str(run_dir), "--port", str(port), *SETTINGS,
                "--targets-dir", str(monitoring.targets), str(SCRIPT), *LOADER, "--until", str(until),
            ],
            f"{HEALTHY}-{rank}", **driver,
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", COLLECTIVES="0",
            MASTER_ADDR="127.0.0.1", MASTER_PORT="1", CUDA_VISIBLE_DEVICES=gpus[rank].uuid,
        )
        for rank in range(2)
    ]  # fmt: skip
    return Job(processes, run_dir, port, until)


@pytest.fixture(scope="package")
def recorded_run(monitoring):
    """A run on GPUs, recorded."""
    endpoint = Recorded(monitoring.targets)
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="package")
def starving(monitoring, starved, healthy, recorded_run):
    """The notifications after a rank starved."""
    starved.wait_for_steps(range(4))
    healthy.wait_for_steps(range(2))
    told = monitoring.told("that a rank starves", "firing", "TrainingStarving", severity="critical")
    monitoring.told("that a rank is waited for", "firing", "TrainingStraggler")
    return told


@pytest.fixture(scope="package")
def answers(monitoring, starving):
    """The answers of both stores to every query of the dashboards."""
    return {
        name: dashboards.ask_all(store.port)
        for name, store in (("prometheus", monitoring.prometheus), ("victoriametrics", monitoring.store))
    }


@pytest.fixture(scope="package")
def rules(monitoring, starving):
    """The values of each recording rule while a rank starves, and the rules as Prometheus reports them."""
    groups = monitoring.api("rules")["groups"]
    loaded = [rule for group in groups for rule in group["rules"]]
    recorded = {
        rule["name"]: monitoring.prometheus.query(rule["name"]) for rule in loaded if rule["type"] == "recording"
    }
    return loaded, recorded


@pytest.fixture(scope="package")
def mended(monitoring, starved, starving, answers, rules):
    """The notifications after its loader was fixed."""
    starved.mended.touch()
    monitoring.told("that nobody waits any more", "resolved", "TrainingStraggler")
    return monitoring.told("that the rank starves no more", "resolved", "TrainingStarving", severity="critical")


@pytest.fixture(scope="package")
def ended(monitoring, starved, healthy, mended):
    """One run ends, and the other is killed. The notifications about the kill and about the removed target file."""
    killed_at = time.time()
    healthy.until.touch()
    assert healthy.wait() == [0, 0], healthy.stderr
    for pid in starved.pids().values():
        os.kill(pid, signal.SIGKILL)
    starved.wait()
    down = monitoring.told("that a node is gone", "firing", "TelemetryEndpointDown")
    left = [path.name for path in monitoring.targets.iterdir()]
    for path in monitoring.targets.glob(f"{STARVED}-*.json"):
        path.unlink()
    up = monitoring.told("that it is no target any more", "resolved", "TelemetryEndpointDown")
    return {"at": killed_at, "down": down, "up": up, "left": left}
