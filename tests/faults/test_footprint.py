"""What the agent adds to a process: a few modules and threads, and no change to anything that the script can see."""

from __future__ import annotations

import os

import pytest

from tests.faults.processes import (
    quiet,
    run,
    with_driver,
)

UNWANTED = (
    "pydantic", "rich", "textual", "pandas", "duckdb", "twisted", "sqlalchemy", "pyarrow", "matplotlib",
    "better_exceptions", "colorama", "requests", "aiohttp", "tornado", "yaml", "jinja2", "IPython", "tensorboard",
    "pytest", "setuptools", "pkg_resources", "click", "typer", "attr", "urllib3", "grpc", "opentelemetry", "numpy", "torch", "sqlite3",
    "tkinter", "unittest", "pdb", "xmlrpc",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What a process with torch and numpy has of the agent while it runs, and after the stop."""
    source = """
        import sys
        import numpy, torch
        from tests.faults.inside import own_threads, steps, tell, until
        modules = set(sys.modules)
        import telemetry
        agent = telemetry.start("run", interval_seconds=0.1, log_interval_seconds=0.1, start_line=False)
        for _ in torch.utils.data.DataLoader([1, 2, 3]):
            pass
        until(lambda: steps() == 3 and '"host"' in agent.event_log.file.path.read_text())
        found = {"ours": own_threads(), "modules": sorted(set(sys.modules) - modules)}
        telemetry.stop()
        hooks = len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks)
        tell(found | {"left": own_threads(), "hooks_left": hooks})
        """
    return run(tmp_path_factory.mktemp("trained"), source)


def test_the_threads_of_a_rank_that_serves(trained):
    assert (trained["ours"], trained["left"]) == (["telemetry-agent", "telemetry-endpoint"], [])
    assert trained["hooks_left"] == 1, "for the next agent: a script may stop this one while torch goes through them"


def test_modules_beyond_torch(trained):
    roots = {name.split(".")[0] for name in trained["modules"]}
    assert roots & set(UNWANTED) <= {"torch"}, "the loop itself may load more of torch"
    assert {"telemetry", "msgspec"} <= roots
    assert not {"prometheus_client", "structlog", "psutil"} & roots, "ours is not in the script's way"
    for command in ("telemetry.cli", "telemetry.report", "telemetry.demo", "telemetry.doctor", "argparse"):
        assert command not in trained["modules"]


@pytest.mark.parametrize("port", ["0", "off"])
def test_modules_of_a_process_without_torch(port, tmp_path):
    """``telemetry run`` leaves importing torch to the script."""
    source = f"""
        import os, sys
        from tests.faults.inside import own_threads, steps, until
        before = set(sys.modules)
        import telemetry
        first = {{name for name in set(sys.modules) - before if name.startswith("telemetry")}}
        assert not first & {{"telemetry.agent", "telemetry.node", "telemetry.sources", "telemetry.model.records"}}, first
        assert len(os.listdir("/proc/self/task")) == 1
        telemetry.start("run")
        assert own_threads() == ["telemetry-agent"] + ["telemetry-endpoint"] * ({port!r} == "0")
        if not (pid := os.fork()):
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        list(telemetry.watch([1, 2, 3]))
        until(lambda: steps() == 3)
        telemetry.stop()
        loaded = {{name.split(".")[0] for name in set(sys.modules) - before}}
        assert not loaded & set({UNWANTED!r}), loaded & set({UNWANTED!r})
        """
    run(tmp_path, source, env=quiet(TELEMETRY_PORT=port))


# -- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", [True, False])
def test_the_nvml_thread_is_there_with_a_driver_only(driver, tmp_path):
    if not driver and os.path.exists("/proc/driver/nvidia"):
        pytest.skip("this machine has a driver")
    source = """
        import sys, telemetry
        from telemetry.safety import threads
        from tests.faults.inside import page, until
        telemetry.start("run")
        up = 'telemetry_collector_up{collector="nvml",rank="0",run="run"} ' + sys.argv[1]
        until(lambda: up in page() and ("telemetry-nvml" in threads.running()) == (sys.argv[1] == "1.0"))
        """
    run(tmp_path, source, "1.0" if driver else "0.0", env=with_driver(tmp_path) if driver else None)
