"""A project has modules with the names of those that the agent needs: the script gets its own, and the agent is complete."""

from __future__ import annotations

import os

import pytest

from tests.faults.processes import RUN, end_of, events, python, quiet, run, write

TRAINING = """
    import time
    import torch
    from torch.utils.data import DataLoader
    from quick_optimizers import QuickSGD

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 16
        def __getitem__(self, index):
            time.sleep(0.004)
            return torch.ones(8)

    model = torch.nn.Linear(8, 1)
    optimizer = QuickSGD(model.parameters(), lr=1e-3)

    def epoch():
        for x in DataLoader(Slow(), batch_size=4):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        torch.save(model.state_dict(), "model.pt")
    """
STALLS = {
    "TELEMETRY_STALL_WINDOW_SECONDS": "1",
    "TELEMETRY_SNAPSHOT_SETTLE_SECONDS": "0",
    "TELEMETRY_SNAPSHOT_ON_STALL": "on",
}


def test_nothing_of_ours_is_imported_once_the_script_runs(tmp_path):
    """In a run with a stall, its lines and its snapshot, with scrapes, and with each call of ours."""
    write(tmp_path, "training.py", TRAINING)
    source = """
        import sys
        from training import epoch  # imports torch, which looks for parts of itself meanwhile
        import telemetry
        from tests.faults.inside import agent, log_file, page, tell, until

        OURS, TORCHS, late = f"{telemetry.__path__[0]}/", f"{sys.modules['torch'].__path__[0]}/", []

        def heard(event, details):
            frame = sys._getframe(1) if event == "import" else None
            while frame is not None and not frame.f_code.co_filename.startswith(TORCHS):
                if frame.f_code.co_filename.startswith(OURS) and "launch.py" not in frame.f_code.co_filename:
                    late.append([details[0], frame.f_code.co_filename, frame.f_lineno])
                    return
                frame = frame.f_back

        def said(event):
            return f'"event":"{event}"' in log_file().path.read_text()

        page()  # urllib
        sys.addaudithook(heard)
        while not all(map(said, ("stall_open", "stall_lines", "snapshot"))):
            epoch()
            with telemetry.phase("evaluation"):
                list(telemetry.watch([1, 2]))
            telemetry.tokens(5)
            telemetry.request_snapshot(steps=1)
            assert "training_steps_total" in page() and telemetry.metrics()
        telemetry.stop()
        tell(late)
        """
    assert run(tmp_path, source, under=RUN, env=quiet(**STALLS)) == []
    assert end_of(tmp_path / "run")["errors_total"] == {}


COMMAND = ("-c", "import sys; sys.path[0] = '/usr/bin'; from telemetry.__main__ import main; main()", "run")
"""As pip's script starts it: `python -m telemetry` would find the project's package."""

HERE = """
    import os, sys
    names = ["telemetry.seams", "psutil", "prometheus_client", "msgspec", "resource", "statistics"]
    print([__import__(name).MINE for name in names], *sys.path[:1])
    """
PROJECT = ("telemetry/__init__", "telemetry/seams", "psutil", "prometheus_client", "msgspec", "resource", "statistics")


@pytest.mark.parametrize(("module", "variable"), [(True, "PYTHONPATH"), (False, "TELEMETRY_DISABLED")])
def test_a_project_s_folder_that_is_in_the_path_twice_and_an_agent_that_is_turned_off(module, variable, tmp_path):
    for name in PROJECT:
        write(tmp_path, f"project/{name}.py", "MINE = 3")
    write(tmp_path, "project/train.py", HERE)
    project = tmp_path / "project"
    env = quiet()
    env[variable] = f"{env['PYTHONPATH']}{os.pathsep}{project}" if variable == "PYTHONPATH" else "1"
    script = ("-m", "train") if module else ("train.py",)
    done = python(*COMMAND, "--run-dir", tmp_path / "run", *script, cwd=project, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{[3] * 6} {project}\n", "")
    if variable != "TELEMETRY_DISABLED":
        assert end_of(tmp_path / "run")["errors_total"] == {}


def test_a_run_that_stalls_while_our_own_package_is_hidden(tmp_path):
    """Nothing of ours is found by its name: no record, no line, no trace."""
    for name in PROJECT:
        write(tmp_path, f"project/{name}.py", "MINE = 3")
    write(tmp_path, "project/training.py", TRAINING)
    source = """
        import os, sys, time
        from training import epoch
        import telemetry
        assert telemetry.MINE == 3
        (log,) = os.listdir("../run/logs")
        end = time.monotonic() + 60
        while '"event":"snapshot"' not in open(f"../run/logs/{log}").read():
            assert time.monotonic() < end
            epoch()
        """
    write(tmp_path, "project/train.py", source)
    done = python(*COMMAND, "--run-dir", "../run", "train.py", cwd=tmp_path / "project", env=quiet(**STALLS))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert end_of(tmp_path / "run")["errors_total"] == {}
    (stall, *_) = events(tmp_path / "run", "stall_open")
    assert stall["cause"] == "loader_on_training_thread"
    assert events(tmp_path / "run", "snapshot")[0]["path"]


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_a_start_in_a_script(first, tmp_path):
    """Whether the script has imported its own before or imports them later."""
    names = ["statistics", "resource", "pynvml", "secrets", "msgspec"]
    for name in names:
        write(tmp_path, f"{name}.py", "MINE = 3\nprint('imported')")
    theirs = f"import {', '.join(names)}\n"
    source = f"import telemetry\nrunning = telemetry.start('run').running\n{theirs}"
    source += f"print({', '.join(f'{name}.MINE' for name in names)}, running)"
    source = theirs + source if first == "theirs" else source
    done = python(write(tmp_path, "script.py", source), cwd=tmp_path, env=quiet())
    assert (done.returncode, done.stdout, done.stderr) == (0, "imported\n" * 5 + "3 3 3 3 3 True\n", "")
    assert end_of(tmp_path / "run")["errors_total"] == {}


def test_a_script_imports_prometheus_client_anew(tmp_path):
    """It decides by a variable whether values are kept in files, when it is imported."""
    source = """
        import os
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = os.getcwd()
        import prometheus_client
        prometheus_client.Counter("mine", "Mine.").inc()
        assert [name for name in os.listdir() if name.endswith(".db")]
        """
    run(tmp_path, source, under=RUN)
