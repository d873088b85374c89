"""The threads that the agent adds to a process."""

from __future__ import annotations

import json
import os

from fakes import nvml

from faults.processes import (
    Child,
    environment,
    fetch,
    python,
    run_script,
    wait_for,
    write,
)
from tests.free_ports import free_ports


def test_a_rank_that_does_not_serve_has_no_thread_for_it(tmp_path):
    script = write(
        tmp_path,
        "script.py",
        """
        import json, sys, telemetry
        from telemetry.util import threads as own_threads
        agent = telemetry.start("run", run="r", start_line=False, interval_seconds=0.1)
        names = sorted(own_threads.running())
        print(json.dumps([agent.metrics_url, [name for name in names if name != "telemetry-nvml"]]), flush=True)
        sys.stdin.readline()
        """,
    )
    port = str(free_ports())
    envs = [environment(RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE="2", TELEMETRY_PORT=port) for r in (0, 1)]
    with Child(script, cwd=tmp_path, env=envs[0]) as first:
        url, threads = json.loads(first.line())
        assert threads == ["telemetry-agent", "telemetry-endpoint"]
        with Child(script, cwd=tmp_path, env=envs[1]) as second:
            assert second.line() == json.dumps([url, ["telemetry-agent"]])
            wait_for(lambda: 'rank="1"' in fetch(url), "one endpoint for both")
            second.tell()
            assert second.wait() == 0
        first.tell()
        assert first.wait() == 0


def test_without_an_endpoint_there_is_one_thread(tmp_path):
    run_script(
        """
        import telemetry
        from telemetry.util import threads as own_threads
        agent = telemetry.start("run", start_line=False, port="off")
        assert agent.metrics_url is None
        names = set(own_threads.running()) - {"telemetry-nvml"}
        assert names == {"telemetry-agent"}, names
        """,
        tmp_path,
    )


def test_the_nvml_thread_is_there_with_a_driver_only(tmp_path):
    fake = nvml.subprocess_environment(tmp_path)
    source = """
        import sys, telemetry
        from telemetry.util import threads as own_threads
        agent = telemetry.start("run", start_line=False, interval_seconds=0.1)
        def names():
            return sorted(own_threads.running())
        wanted = ["telemetry-agent", "telemetry-endpoint"] + ["telemetry-nvml"] * (sys.argv[1] == "driver")
        for _ in range(6000):
            up = agent._collectors._pollers["nvml"].health.up
            if up is (sys.argv[1] == "driver") and names() == wanted:
                break
            agent._thread.join(0.01)
        print(names(), up)
        """
    script = write(tmp_path, "script.py", source)
    with_driver = environment() | {"FAKE_NVML_STATE": fake["FAKE_NVML_STATE"]}
    with_driver["PYTHONPATH"] = os.pathsep.join([str(tmp_path), with_driver["PYTHONPATH"]])
    done = python(script, "driver", cwd=tmp_path, env=with_driver)
    assert (done.stdout, done.stderr) == ("['telemetry-agent', 'telemetry-endpoint', 'telemetry-nvml'] True\n", "")
    if not os.path.exists("/proc/driver/nvidia"):
        done = python(script, "none", cwd=tmp_path)
        assert (done.stdout, done.stderr) == ("['telemetry-agent', 'telemetry-endpoint'] False\n", "")
