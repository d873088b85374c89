"""A script that changes its surroundings, and settings that turn the agent off or are wrong."""

from __future__ import annotations

import re

import pytest

from faults.processes import (
    Child,
    environment,
    events,
    fetch,
    python,
    run_script,
    samples,
    value,
    wait_for,
    without_start_line,
    write,
)
from tests.faults.surroundings import QUIET, TRAINING

# -- the script changes things around us -------------------------------------------------------------------------


def test_a_script_that_changes_its_folder_does_not_take_our_files_along(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    run_script(
        """
        import os, telemetry
        agent = telemetry.start("run", run="r", log_max_bytes=65536, targets_dir="targets")
        os.chdir("elsewhere")
        agent.event_log.log.file.forget()  # as after a full disk: the next line opens it again
        while not (agent.event_log.log.file.path.exists() and agent.event_log.log.file._file):
            agent._thread.join(0.01)
        for _ in range(200):
            agent.event_log.emit("error", {"source": "test", "message": "x" * 1000})
        telemetry.stop()
        assert os.getcwd().endswith("elsewhere")
        """,
        tmp_path,
        env=environment(**QUIET),
    )
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert len(list((tmp_path / "run" / "logs").iterdir())) > 2, "it was rotated in its place"
    assert list((tmp_path / "targets").iterdir()) == []


def test_a_run_folder_that_is_removed_comes_back_with_the_next_file(tmp_path):
    run_script(
        """
        import os, shutil, sys, telemetry
        agent = telemetry.start("run", run="r", log_max_bytes=65536)
        os.rename("run", "gone")  # in one piece: the agent may be about to write a file into it
        shutil.rmtree("gone")
        for _ in range(100):
            agent.event_log.emit("error", {"source": "test", "message": "x" * 1000})
        assert list(telemetry.watch([1])) == [1]
        telemetry.stop()
        """,
        tmp_path,
        env=environment(**QUIET),
    )
    assert events(tmp_path / "run", "run_end")


def test_multiprocess_mode_of_prometheus_client_is_not_ours(tmp_path):
    """The variable turns metric objects into files, for servers with several processes."""
    (tmp_path / "multi").mkdir()
    env = environment(**QUIET, PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "multi"))
    with Child(write(tmp_path, "s.py", TRAINING), "run", cwd=tmp_path, env=env) as child:
        url = child.line()
        child.tell()
        wait_for(lambda: (value(fetch(url), "training_steps_total", rank="0", run="r") or 0) >= 99, "the right figures")
        assert not [labels for rows in samples(fetch(url)).values() for labels, _ in rows if "pid" in labels]
        child.tell("end")
        child.line()
        assert child.wait() == 0
        assert child.stderr == ""
    assert list((tmp_path / "multi").iterdir()) == []


# -- off, and wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["1", "true", "yes", "please"])
@pytest.mark.parametrize("how", ["start", "run"])
def test_disabled_leaves_nothing_of_us(said, how, tmp_path):
    source = """
        import os, sys, telemetry
        before = list(sys.meta_path)
        agent = telemetry.start("run", interval_seconds="no number")
        assert agent.running is False and agent.metrics_url is None
        assert list(telemetry.watch([1, 2])) == [1, 2]
        thing = object()
        assert telemetry.watch(thing) is thing
        with telemetry.step(), telemetry.phase("evaluation"):
            pass
        telemetry.stop()
        heavy = ("telemetry.agent.agent", "telemetry.hooks.tracker", "telemetry.node", "telemetry.sources", "structlog",
                 "prometheus_client", "psutil", "pynvml", "msgspec")
        assert [name for name in sys.modules if name.startswith(heavy)] == []
        assert len(os.listdir("/proc/self/task")) == 1
        assert sys.meta_path == before
        import json
        """
    write(tmp_path, "script.py", source)
    prefix = () if how == "start" else ("-m", "telemetry", "run", "--run-dir", "run", "--port", "no port")
    done = python(*prefix, "script.py", cwd=tmp_path, env=environment(TELEMETRY_DISABLED=said, TELEMETRY_PORT="bad"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.parametrize("how", ["start", "run"])
def test_without_the_gil_the_script_trains_on_without_us(how, tmp_path):
    write(tmp_path, "sitecustomize.py", "import sys\nsys._is_gil_enabled = lambda: False")
    write(
        tmp_path,
        "script.py",
        """
        import sys, telemetry
        from torch.utils.data import DataLoader
        agent = telemetry.start("run")
        assert agent.running is False
        for _ in range(2):
            print([batch.tolist() for batch in DataLoader(range(4), batch_size=2)])
        assert "telemetry.agent.agent" not in sys.modules
        """,
    )
    env = environment(TELEMETRY_START_LINE="off")
    env["PYTHONPATH"] += f":{tmp_path}"
    plain = python("script.py", cwd=tmp_path, env=env)
    assert (plain.returncode, plain.stderr.count("\n")) == (0, 1), "a start that fails is always told"
    if how == "run":
        source = (tmp_path / "script.py").read_text()
        (tmp_path / "script.py").write_text(source.replace('telemetry.start("run")', "telemetry.api.InactiveAgent()"))
    done = python(
        *(("-m", "telemetry", "run", "--run-dir", "run") if how == "run" else ()), "script.py", cwd=tmp_path, env=env
    )
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    (line,) = done.stderr.splitlines()
    assert line.startswith("telemetry: cannot start: Python's GIL is off")
    assert not (tmp_path / "run").exists()


def test_disabled_patches_no_torch(tmp_path):
    run_script(
        """
        import sys, telemetry
        telemetry.start()
        import torch
        files = [f.__code__.co_filename for f in (torch.save, torch.utils.data.DataLoader.__iter__,
                 torch.utils.data.dataloader._BaseDataLoaderIter.__next__)]
        assert not [file for file in files if "telemetry" in file]
        assert not sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
        assert "telemetry.agent.agent" not in sys.modules
        """,
        tmp_path,
        env=environment(TELEMETRY_DISABLED="1"),
    )


def test_disabled_0_is_enabled(tmp_path):
    done = run_script(
        "import telemetry\nassert telemetry.start('run').running", tmp_path, env=environment(TELEMETRY_DISABLED="0")
    )
    assert without_start_line(done.stderr) == ("", 1)


@pytest.mark.parametrize(
    ("options", "variables", "said"),
    [
        (["--port", "70000"], {}, ["port", "'70000'", "0 for any free port, or off"]),
        ([], {"TELEMETRY_PORT": "http"}, ["port", "TELEMETRY_PORT", "'http'", "a port from 1 to 65535"]),
        (["--interval-seconds", "0"], {}, ["interval_seconds", "'0'", "from 0.1 to 3600"]),
        ([], {"TELEMETRY_INTERVAL_SECONDS": "nan"}, ["interval_seconds", "'nan'", "from 0.1"]),
        (["--gpu-events", "maybe"], {}, ["gpu_events", "'maybe'", "auto | on | off"]),
        (["--patch", "2"], {}, ["patch", "'2'", "true or false"]),
        (["--run-dir", ""], {}, ["run_dir", "''", "the path of a folder"]),
        (["--stall-enter-ratio", "0.1", "--stall-exit-ratio", "0.2"], {}, ["stall_exit_ratio", "0.2", "less than"]),
        ([], {"TELEMETRY_STEP_BUCKETS": "1,1"}, ["step_buckets", "'1,1'", "increasing numbers"]),
        ([], {"TELEMETRY_RUN": " "}, ["run", "' '", "not empty"]),
        ([], {"TELEMETRY_PORT": "x" * 10_000}, ["port", "xxx...", "allowed is"]),
    ],
)
def test_a_bad_setting_is_one_clear_line_and_nothing_is_started(options, variables, said, tmp_path):
    write(tmp_path, "script.py", "print('started')")
    done = python("-m", "telemetry", "run", *options, "script.py", cwd=tmp_path, env=environment(**variables))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"telemetry: setting .+\n", done.stderr), done.stderr
    assert len(done.stderr) < 400
    assert [word for word in said if word not in done.stderr] == []
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_bad_setting_in_a_script_is_an_error_that_names_it(tmp_path):
    source = """
        import os, telemetry
        for settings in ({"port": "http"}, {"intervall_seconds": 1}, {"run_dir": 3}):
            try:
                telemetry.start(**settings)
            except telemetry.SettingError as error:
                print(error)
        assert len(os.listdir("/proc/self/task")) == 1
        assert telemetry.start("run").running
        """
    done = python(write(tmp_path, "s.py", source), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    port, misspelt, folder = done.stdout.splitlines()
    assert "port = 'http'" in port
    assert "did you mean interval_seconds?" in misspelt
    assert "run_dir = 3" in folder


def test_an_unknown_variable_is_noted_in_the_log_only(tmp_path):
    env = environment(**QUIET, TELEMETRY_INTERVALL_SECONDS="3", TELEMETRY_OPTOUT="1")
    done = run_script("import telemetry\ntelemetry.start('run')\ntelemetry.stop()", tmp_path, env=env)
    assert (done.stdout, done.stderr) == ("", "")
    told = [line["message"] for line in events(tmp_path / "run", "error") if line["source"] == "config"]
    end = events(tmp_path / "run", "run_end")[0]
    assert told == [
        "TELEMETRY_INTERVALL_SECONDS is no setting of ours and was ignored; did you mean TELEMETRY_INTERVAL_SECONDS?",
        "TELEMETRY_OPTOUT is no setting of ours and was ignored",
    ]
    assert "config" not in end["errors_total"]


def test_no_file_descriptor_is_left(tmp_path):
    source = """
        import os, resource, telemetry
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        agent = telemetry.start("run", run="r")
        opened = []
        try:
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for _ in range(6000):
            if sum(agent.errors.counts.values()) > 3:
                break
            agent._thread.join(0.01)
        assert list(telemetry.watch(list(range(10)))) == list(range(10))
        for each in opened:
            os.close(each)
        while agent.accounting.stats.steps < 10:
            agent._thread.join(0.01)
        telemetry.stop()
        """
    script = write(tmp_path, "s.py", source)
    done = python(script, cwd=tmp_path, env=environment(**QUIET))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (end,) = events(tmp_path / "run", "run_end")
    assert end["steps_total"] == 10
