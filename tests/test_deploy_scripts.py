"""The scripts of deploy/ are run: the Slurm job with a stand-in for Slurm, the single-node recipe with a real server."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from stack.jobs import must_have, wait_for

from tests.free_ports import free_ports
from tests.report_logs import START, line, totals, write
from tests.test_report_attempts import Process

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"

SRUN = """#!/usr/bin/env bash
# Stands in for srun and torchrun: leaves what a job leaves behind that is killed, and waits if told to.
while [ $# -gt 0 ]; do
  case $1 in
    --targets-dir) targets=$2 ;;
  esac
  last=$1
  shift
done
mkdir -p "$targets"
touch "$targets/$TELEMETRY_RUN-0123456789ab.node1.json" "$targets/$TELEMETRY_RUN-0123456789ab.node2.json"
case $last in
  wait) exec sleep 60 ;;
  *) exit "$last" ;;
esac
"""


@pytest.fixture
def sbatch(tmp_path):
    """Starts the job script as slurmd would; another job's target file lies beside."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\nprintf 'node1\\nnode2\\n'\n"}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "slurm-71-0123456789ab.node1.json").touch()
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    started = []

    def start(argument):
        started.append(
            subprocess.Popen(
                ["bash", str(DEPLOY / "slurm" / "train.sbatch"), "train.py", argument],
                env=os.environ | slurm | {"SHARED_DIR": str(tmp_path), "PATH": f"{commands}:{os.environ['PATH']}"},
            )
        )
        return started[-1]

    start.targets = lambda: sorted(path.name for path in (tmp_path / "targets").iterdir())
    yield start
    for process in started:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("status", [0, 3])
def test_slurm_job_takes_its_target_files_away(sbatch, status):
    assert sbatch(str(status)).wait(20) == status
    assert sbatch.targets() == ["slurm-71-0123456789ab.node1.json"]


def test_slurm_job_takes_its_target_files_away_at_its_time_limit(sbatch):
    process = sbatch("wait")
    wait_for("the target files", lambda: len(sbatch.targets()) == 3)

    process.send_signal(signal.SIGTERM)

    assert process.wait(20) == 128 + signal.SIGTERM
    assert sbatch.targets() == ["slurm-71-0123456789ab.node1.json"]


def api(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=3) as answer:
        return json.load(answer)["data"]


@pytest.mark.stack
def test_single_node_monitoring(tmp_path):
    """Up: a target file is found, its rules are loaded. Down: nothing of it is left."""
    must_have("prometheus")
    port = free_ports(2)
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "run.node.json").write_text('[{"targets": ["127.0.0.1:1"], "labels": {"node": "n"}}]')
    variables = {
        "MONITORING_DIR": str(tmp_path / "monitoring"), "TELEMETRY_TARGETS_DIR": str(tmp_path / "targets"),
        "PROMETHEUS_PORT": str(port), "ALERTMANAGER_PORT": str(port + 1),
    }  # fmt: skip

    def monitoring(command):
        done = subprocess.run(
            [str(DEPLOY / "single-node" / "monitoring.sh"), command],
            env=os.environ | variables, capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        assert f"\nprometheus: http://127.0.0.1:{port}\n" in monitoring("up")
        targets = wait_for("the target", lambda: api(port, "targets")["activeTargets"], seconds=20)
        assert [target["labels"]["node"] for target in targets] == ["n"]
        groups = wait_for("the rules", lambda: api(port, "rules")["groups"], seconds=20)
        assert "telemetry_training" in {group["name"] for group in groups}
        assert "runs already" in monitoring("up")
        if shutil.which("prometheus-alertmanager") or shutil.which("alertmanager"):
            wait_for("Alertmanager", lambda: api(port, "alertmanagers")["activeAlertmanagers"], seconds=20)
    finally:
        pids = [int(path.read_text()) for path in (tmp_path / "monitoring").glob("*.pid")]
        monitoring("down")
        deadline = time.monotonic() + 20
        while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert pids
    assert not left
    assert monitoring("status").count("not running") == 2


# -- the Slurm epilog ------------------------------------------------------------------------------------------------------


def epilog(folder, run_dir, **variables):
    commands = folder / "commands"
    commands.mkdir(exist_ok=True)
    (commands / "telemetry").write_text(f'#!/bin/sh\nexec {sys.executable} -m telemetry "$@"\n')
    (commands / "telemetry").chmod(0o755)
    paths = {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(DEPLOY.parent)}
    command = ["bash", str(DEPLOY / "slurm" / "epilog.sh"), str(run_dir)]
    return subprocess.run(command, env=os.environ | paths | variables, capture_output=True, text=True, timeout=180)


def test_the_epilog_prints_the_verdict_in_three_lines(tmp_path):
    write(tmp_path, 0, line("run_start", **START), line("run_end", **totals(wait=1.0, compute=9.0, steps=9)))
    done = epilog(tmp_path, tmp_path)
    first, second, third = done.stdout.splitlines()
    assert first == "telemetry: run r: 1 attempt(s) (1 finished), 0 steps lost"
    assert second.startswith("telemetry: 0.0 GPU-hours, 82 % productive; ")
    assert third.startswith("telemetry: Healthy")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_epilog_counts_each_attempt_with_its_own_ranks(tmp_path):
    """Eight ranks for an hour, half an hour down, and four ranks for two hours."""
    for rank in range(8):
        Process(tmp_path, rank, begin=0, pid=10 + rank, world=8).window(3600).write()
    for rank in range(4):
        Process(tmp_path, rank, begin=5400, pid=20 + rank, world=4).resumed(10).end(7200)
    first, second, _ = epilog(tmp_path, tmp_path).stdout.splitlines()
    assert first == "telemetry: run r: 2 attempt(s) (1 finished, 1 killed), 3585 steps lost"
    assert second.startswith("telemetry: 20.0 GPU-hours, ")
    report = subprocess.run(
        [sys.executable, "-m", "telemetry", "report", tmp_path], capture_output=True, text=True, timeout=180
    )
    assert " were productive (" in report.stdout
    assert "GPU" not in report.stdout.replace("the GPU felt", "")


def test_the_epilog_never_fails(tmp_path):
    """Slurm drains a node whose epilog fails."""
    write(tmp_path, 0, line("run_start", **START), line("run_end", **totals(wait=1.0, compute=9.0, steps=9)))
    assert epilog(tmp_path, tmp_path / "nothing").returncode == 0
    assert epilog(tmp_path, tmp_path, SLURM_PROCID="3").stdout == "", "one task of the job prints it"
    (tmp_path / "commands" / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "commands" / "python3").chmod(0o755)
    assert epilog(tmp_path, tmp_path).returncode == 0
