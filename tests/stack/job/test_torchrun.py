"""Real jobs under the real torchrun: one port for all ranks, a second job beside the first, and the report."""

import os
import signal
import sys
import time
from datetime import datetime

import psutil
import pytest

from stack.jobs import SLOW_RANK, Job, get, scrape, wait_for
from tests.faults.processes import ranks_in, samples

pytestmark = pytest.mark.stack

CATEGORIES = {"startup", "data_wait", "compute", "evaluation", "checkpoint", "other"}


def check_report(report, ranks):
    """Checks that hold for every report, however the run ended."""
    assert [rank["rank"] for rank in report["ranks"]] == list(ranks)
    assert [rank["local_rank"] for rank in report["ranks"]] == list(ranks)
    for rank in report["ranks"]:
        assert rank["steps"] > 0
        assert set(rank["ledger"]) == CATEGORIES
        assert sum(rank["ledger"].values()) == pytest.approx(rank["wall_seconds"], rel=0.01)
        assert rank["step_seconds"]["p50"] > 0
    assert len({rank["node"] for rank in report["ranks"]}) == 1


def runs_in(page):
    return {labels["run"] for found in samples(page).values() for labels, _ in found}


def check_verdict(report):
    ratios = {rank["rank"]: rank["exposed_wait_ratio"] for rank in report["ranks"]}
    assert max(ratios, key=ratios.get) == SLOW_RANK
    assert ratios[SLOW_RANK] > 0.5
    assert max(ratio for rank, ratio in ratios.items() if rank != SLOW_RANK) < 0.2
    assert f"rank {SLOW_RANK}" in report["verdict"]


def test_one_port_serves_all_ranks(job):
    seen = scrape(job.port)

    assert sorted(ranks_in(seen)) == ["0", "1", "2", "3"]
    assert runs_in(seen) == {job.run_dir.name}
    assert sorted(job.pids()) == [0, 1, 2, 3]
    listening = {
        (rank, s.laddr.port)
        for rank, pid in job.pids().items()
        for s in psutil.Process(pid).net_connections(kind="tcp")
        if s.status == psutil.CONN_LISTEN and s.laddr.ip == "127.0.0.1"
    }
    assert [port for _, port in listening].count(job.port) == 1
    said = [line for line in job.stderr.splitlines() if line.startswith("telemetry")]
    url, logs = f"http://127.0.0.1:{job.port}/metrics", job.run_dir / "logs"
    assert said == [f"telemetry: run {job.run_dir.name}, rank 0: metrics at {url}, logs in {logs}"]


def test_report_of_a_running_job(job):
    first = {rank["rank"]: rank for rank in job.report()["ranks"]}

    def grown():
        report = job.report()
        return all(rank["wall_seconds"] > first[rank["rank"]]["wall_seconds"] for rank in report["ranks"]) and report

    report = wait_for("a report that has grown", grown, every=0.5)
    assert report["run"] == job.run_dir.name
    check_report(report, range(4))
    check_verdict(report)
    # Long enough under way, the starved rank has stalled; the others, if they have, for its sake.
    own = {SLOW_RANK: "loader_on_training_thread"}
    assert all(stall["cause"] == own.get(stall["rank"], "straggler") for stall in report["stalls"])
    reasons = {snapshot["reason"] for snapshot in report["snapshots"]}
    assert reasons <= {"loader_on_training_thread", "straggler"}
    assert job.report_text().count("is running") == 4


@pytest.fixture(scope="module")
def second_job(job, torchrun):
    """Another job on the node, whose port is taken."""
    second = torchrun("second", 2, job.port, ("--log-interval-seconds", "0.5"), ("--by-hand",), SLOW_RANK="1")
    wait_for("a target file", lambda: second.targets(), 60)
    return second


def test_second_job_takes_the_next_port(job, second_job):
    (target,) = second_job.targets()
    host, _, port = target["targets"][0].rpartition(":")
    assert host == "127.0.0.1"
    assert job.port < int(port) < job.port + 16
    second_job.wait_for_steps(range(2), int(port))

    seen = scrape(int(port))
    assert (runs_in(seen), sorted(ranks_in(seen))) == ({"second"}, ["0", "1"])
    assert runs_in(scrape(job.port)) == {job.run_dir.name}
    assert job.targets()[0]["targets"] == [f"127.0.0.1:{job.port}"]

    told = [line for line in second_job.logs() if line["event"] == "error" and line["source"] == "endpoint"]
    assert [line["message"] for line in told] == [
        f"port {job.port} is taken; the metrics of this run are at port {port}"
    ]
    assert f"metrics at http://127.0.0.1:{port}/metrics" in second_job.stderr
    urls = {line["metrics_url"] for line in second_job.logs() if line["event"] == "run_start"}
    assert urls == {f"http://127.0.0.1:{port}/metrics"}


def test_report_after_sigkill_of_all_ranks(second_job):
    port = int(second_job.targets()[0]["targets"][0].rpartition(":")[2])
    second_job.wait_for_steps(range(2), port)
    wait_for("windows of both", lambda: [rank["steps"] > 0 for rank in second_job.report()["ranks"]] == [True, True])
    starts = {line["rank"]: line["started"] for line in second_job.logs() if line["event"] == "run_start"}
    killed = time.time()
    for pid in second_job.pids().values():
        os.kill(pid, signal.SIGKILL)
    second_job.wait()

    report = second_job.report()
    check_report(report, range(2))
    assert "rank 1" in report["verdict"]
    for rank in report["ranks"]:  # from the agent's start to the newest line
        started = datetime.fromisoformat(starts[rank["rank"]].replace("Z", "+00:00")).timestamp()
        assert killed - started - 5 < rank["wall_seconds"] < killed - started + 1
    wait_for("the end to be told", lambda: second_job.report_text().count("did not end by itself") == 2, every=0.3)
    assert not any(line["event"] == "run_end" for line in second_job.logs())


# The job that every test above looks at ends here: nothing that needs it running may follow. It uses the cores.


@pytest.fixture(scope="module")
def ended_job(job):
    pids = job.pids()
    assert job.running(), job.stderr
    job.until.touch()
    assert job.wait() == [0], job.stderr
    wait_for("the ranks to be gone", lambda: not any(psutil.pid_exists(pid) for pid in pids.values()))
    return job


def test_clean_end_leaves_no_target_and_no_noise(ended_job):
    assert list(ended_job.run_dir.glob("targets/*")) == []
    with pytest.raises(OSError):
        get(f"http://127.0.0.1:{ended_job.port}/metrics")
    ends = [line for line in ended_job.logs() if line["event"] == "run_end"]
    assert sorted(line["rank"] for line in ends) == [0, 1, 2, 3]
    assert {(line["log_lines_dropped"], line["dropped_steps_total"]) for line in ends} == {(0, 0)}
    assert all(set(line["errors_total"]) <= {"nvml"} for line in ends), ends
    start, end = (line for line in ended_job.stderr.splitlines() if line.startswith("telemetry"))
    assert "metrics at http" in start
    assert f"rank {SLOW_RANK} spent" in end
    assert "Traceback" not in ended_job.stderr


def test_report_of_an_ended_job(ended_job):
    report = ended_job.report()

    check_report(report, range(4))
    check_verdict(report)
    walls = [rank["wall_seconds"] for rank in report["ranks"]]
    assert max(walls) - min(walls) < 0.1 * max(walls)
    steps = [rank["steps"] for rank in report["ranks"]]
    assert max(steps) - min(steps) <= 1
    text = ended_job.report_text()
    assert report["verdict"].partition(". ")[0] in text
    assert "is running" not in text
    assert "did not end" not in text


AT_ONCE = """
import os, sys, time, telemetry, telemetry.agent.agent, structlog, psutil, prometheus_client
start = float(sys.argv[2])
time.sleep(max(0, start - 0.02 - time.time()))
while time.time() < start: pass
telemetry.start(sys.argv[1], port=int(sys.argv[3]), start_line=False)
time.sleep(0.5)
telemetry.stop()
"""


def test_ranks_that_start_and_end_at_once_agree_on_the_port(launch, ports):
    for attempt in range(3):
        run_dir, start = launch.folder / f"at_once_{attempt}", time.time() + 1.5
        processes = [
            launch(
                [sys.executable, "-c", AT_ONCE, str(run_dir), str(start), str(ports["at_once"])],
                f"at_once_{attempt}-{rank}", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4",
            )
            for rank in range(4)
        ]  # fmt: skip
        at_once = Job(processes, run_dir, ports["at_once"], None)
        assert at_once.wait() == [0] * 4, at_once.stderr

        urls = [line["metrics_url"] for line in at_once.logs() if line["event"] == "run_start"]
        assert len(urls) == 4
        assert len(set(urls)) == 1
        assert urls[0] is not None
        assert list(run_dir.glob("targets/*")) == []
        assert not at_once.board.exists()
        assert at_once.stderr == ""
