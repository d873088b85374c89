"""Others delete or rename the agent's files and folders during a run; the working folder is removed."""

from __future__ import annotations

import os
import re
import shutil

import pytest

from faults.processes import environment, events, log_lines, python, run_script, without_start_line, write
from telemetry.agent.log import LogFile

HEAD = b'{"event": "run_start"}\n'


@pytest.fixture
def log(tmp_path):
    file = LogFile(tmp_path / "logs" / "rank-0.7.jsonl", 1 << 20, 3, lambda: HEAD)
    for _ in range(3):
        assert file.write(b"{}\n")
    assert file.replace_if_removed() is None
    return file


def test_a_log_that_is_deleted_is_begun_anew_and_its_lines_counted(log):
    log.path.unlink()
    assert log.replace_if_removed() == ("the log file was deleted by others: a new one begins", 3)
    assert log.write(b'{"after": 1}\n')
    assert log.path.read_bytes() == HEAD + b'{"after": 1}\n'
    assert log.dropped == 3
    assert log.replace_if_removed() is None


def test_a_run_folder_that_is_deleted_comes_back(log):
    shutil.rmtree(log.path.parent)
    assert log.replace_if_removed()[1] == 3
    assert log.path.read_bytes() == HEAD


@pytest.mark.parametrize("create", [False, True])
def test_a_log_that_is_renamed_loses_nothing(create, log):
    """As logrotate does, with and without ``create``."""
    old = log.path.with_suffix(".jsonl.1")
    log.path.rename(old)
    if create:
        log.path.touch()
    assert log.write(b'{"between": 1}\n')
    assert log.replace_if_removed() == ("the log file was renamed by others: a new one begins", 0)
    assert log.write(b'{"after": 1}\n')
    assert old.read_bytes() == b"{}\n" * 3 + b'{"between": 1}\n'
    assert log.path.read_bytes() == HEAD + b'{"after": 1}\n'
    assert log.dropped == 0


def test_a_log_that_is_emptied_has_its_first_line_again(log):
    """As logrotate does with ``copytruncate``."""
    os.truncate(log.path, 0)
    assert log.replace_if_removed() == ("the log file was emptied by others: a new one begins", 0)
    assert log.path.read_bytes() == HEAD


def test_a_folder_that_cannot_be_made_again_is_tried_with_every_line(log):
    shutil.rmtree(log.path.parent)
    log.path.parent.write_text("a file where the folder was")
    assert log.replace_if_removed()[1] == 3
    assert not log.write(b"{}\n")
    assert log.dropped == 4
    log.path.parent.unlink()
    assert log.write(b"{}\n")


def test_the_log_and_the_target_file_of_a_run_folder_that_is_removed(tmp_path):
    run_script(
        """
        import os, shutil, telemetry
        from pathlib import Path
        from telemetry.node import endpoint
        endpoint._TARGETS_SECONDS = 0.1
        agent = telemetry.start("run", run="r", interval_seconds=0.1, log_interval_seconds=0.1, start_line=False)
        os.rename("run", "gone")  # in one piece: the agent may be about to write a file into it
        shutil.rmtree("gone")
        while not (list(Path("run").glob("logs/*")) and list(Path("run").glob("targets/*"))):
            agent._thread.join(0.01)
        telemetry.stop()
        """,
        tmp_path,
    )
    lines = log_lines(tmp_path / "run")
    assert lines[0]["event"] == "run_start"
    assert lines[0]["continued"] is True
    (end,) = events(tmp_path / "run", "run_end")
    (told,) = [line for line in events(tmp_path / "run", "error") if line["source"] == "jsonl"]
    lost = int(
        re.fullmatch(r"the log file was deleted by others: a new one begins; (\d+) lines are lost", told["message"])[1]
    )
    assert lost > 0
    assert (end["log_lines_dropped"], end["errors_total"]["jsonl"]) == (lost, lost)


# -- the working folder ------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import helper
print(sys.argv, __file__, sys.path[0], helper.__name__)
"""

IN_A_FOLDER_THAT_IS_GONE = """
import os, subprocess, sys
os.rmdir(os.getcwd())
sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
"""


def without_folder(tmp_path, *arguments, **variables):
    (tmp_path / "gone").mkdir()
    variables = {"PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path / "lib")])} | variables
    launcher = tmp_path / "launcher.py"
    return python(launcher, *arguments, cwd=tmp_path / "gone", env=environment(**variables))


@pytest.fixture
def programs(tmp_path):
    write(tmp_path, "scripts/train.py", SCRIPT)
    write(tmp_path, "scripts/helper.py", "")
    write(tmp_path, "lib/module.py", SCRIPT)
    write(tmp_path, "lib/helper.py", "")
    write(tmp_path, "launcher.py", IN_A_FOLDER_THAT_IS_GONE)
    (tmp_path / "link.py").symlink_to(tmp_path / "scripts" / "train.py")
    return tmp_path


@pytest.mark.parametrize("target", [["{}/scripts/train.py", "-x"], ["{}/link.py"], ["-m", "module", "--lr", "1"]])
@pytest.mark.parametrize("run_dir", [True, False])
def test_a_script_runs_where_the_working_folder_is_gone(target, run_dir, programs):
    target = [part.format(programs) for part in target]
    bare = without_folder(programs, *target)
    option = ["--run-dir", programs / "run"] if run_dir else []
    ours = without_folder(programs, "-m", "telemetry", "run", *option, *target)
    assert (ours.returncode, ours.stdout) == (bare.returncode, bare.stdout)
    assert bare.returncode == 0, bare.stderr
    if run_dir:
        assert without_start_line(ours.stderr) == ("", 1)
        assert events(programs / "run", "run_end")
    else:
        assert ours.stderr.startswith("telemetry: cannot start (OSError: the working folder has been removed")
        assert "set run_dir to an absolute path" in ours.stderr
        assert len(ours.stderr.splitlines()) == 1


def test_a_relative_script_is_not_found_there_either(programs):
    bare = without_folder(programs, "train.py")
    ours = without_folder(programs, "-m", "telemetry", "run", "train.py")
    assert bare.returncode == ours.returncode == 2
    assert ours.stderr == "telemetry: cannot open train.py: No such file or directory\n"


def test_a_relative_run_folder_is_none_where_there_is_no_working_folder(programs):
    ours = without_folder(programs, programs / "scripts" / "train.py", TELEMETRY_RUN_DIR="run")
    assert ours.returncode == 0
    ours = without_folder(
        programs, "-m", "telemetry", "run", programs / "scripts" / "train.py", TELEMETRY_RUN_DIR="run"
    )
    assert ours.returncode == 0
    assert "there is no run: set run_dir to an absolute path" in ours.stderr
