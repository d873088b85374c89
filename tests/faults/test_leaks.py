"""A script that leaks in a memory cgroup: the log says where, and when there is none left. The campaign has all ways."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace

import pytest

from tests.faults.leak_campaign import about
from tests.faults.leaks import MIB, WAYS, LeakingRun, NoMemoryGroupError
from tests.faults.processes import environment, wait_for


@pytest.mark.parametrize(("what", "where"), [("worker_cache", "workers")])
def test_a_leak_is_found_before_the_kernel_kills(tmp_path, what, where):
    try:
        run = LeakingRun(tmp_path, what, bytes_per_second=12 * MIB, limit_bytes=1500 * MIB)
    except NoMemoryGroupError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    with run:

        def told():
            assert run.process.poll() is None, (tmp_path / "stderr").read_text()
            found = (line for line in run.lines("window") if line.get("memory", {}).get("where"))
            return next((line for line in found if "exhausted_in_seconds" in line["memory"]), None)

        line = wait_for(told, "a window with the part that grows and the end of memory")
        run.process.kill()
        run.process.wait()
        said = line["memory"]
        assert (said["where"], said["exhausted"]) == (where, "memory")
        assert said["exhausted_in_seconds"] > 0
        done = subprocess.run(
            [sys.executable, "-m", "telemetry", "report", "run", "--json"],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True,
        )  # fmt: skip
        report = json.loads(done.stdout)
        assert report["ranks"][0]["memory"]["where"] == where


def test_the_campaign_says_what_it_ran():
    options = Namespace(times=2, seed=3, together=10, only="kept_tensors")
    told = about(options, ["kept_tensors"], (17.6, 15.4))
    assert "leak_campaign --times 2 --seed 3 --together 10 --only kept_tensors`, without `copied_list`, " in told
    assert "17.6 at the start and 15.4 at the end" in told
    options.only = None
    assert "without" not in about(options, list(WAYS), (1.0, 1.0))
