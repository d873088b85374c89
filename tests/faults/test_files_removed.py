"""Others delete or rename the agent's files and folders during a run; the working folder changes, or is removed."""

from __future__ import annotations

import os
import re
import shutil

import pytest

from telemetry.log.file import LogFile
from tests.faults.processes import end_of, environment, log_lines, python, run, told, without_start_line, write

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


def test_a_run_folder_that_is_removed_comes_back(tmp_path):
    source = """
        import os, shutil, telemetry
        from pathlib import Path
        from telemetry.node import endpoint
        from tests.faults.inside import until
        endpoint._TARGETS_SECONDS = 0.1
        telemetry.start("run", run="r")
        os.rename("run", "gone")  # in one piece: the agent may be about to write a file into it
        shutil.rmtree("gone")
        until(lambda: list(Path("run").glob("logs/*")) and list(Path("run").glob("targets/*")))
        assert list(telemetry.watch([1])) == [1]
        telemetry.stop()
        """
    run(tmp_path, source)
    first = log_lines(tmp_path / "run")[0]
    assert (first["event"], first["continued"]) == ("run_start", True)
    (message,) = told(tmp_path / "run", "jsonl")
    lost = re.fullmatch(r"the log file was deleted by others: a new one begins; (\d+) lines are lost", message)
    end = end_of(tmp_path / "run")
    assert end["log_lines_dropped"] == end["errors_total"]["jsonl"] == int(lost[1]) > 0


def test_a_script_that_changes_its_folder_does_not_take_our_files_along(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    source = """
        import os, telemetry
        from tests.faults.inside import log_file, until
        agent = telemetry.start("run", run="r", log_max_bytes=65536, targets_dir="targets")
        os.chdir("elsewhere")
        log_file().forget()  # as after a full disk: the next line opens it again
        until(lambda: log_file().path.exists() and log_file()._file)
        for _ in range(200):
            agent.event_log.emit("error", {"source": "test", "message": "x" * 1000})
        telemetry.stop()
        assert os.getcwd().endswith("elsewhere")
        """
    run(tmp_path, source)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert len(list((tmp_path / "run" / "logs").iterdir())) > 2, "it was rotated in its place"
    assert list((tmp_path / "targets").iterdir()) == []


# -- the working folder is gone ------------------------------------------------------------------------------------

SCRIPT = "import sys\nimport helper\nprint(sys.argv, __file__, sys.path[0], helper.__name__)\n"

LAUNCHER = """
    import os, subprocess, sys
    os.rmdir(os.getcwd())
    sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
"""


@pytest.fixture
def homeless(tmp_path):
    """Runs Python in a working folder that is removed."""
    for name in ("scripts", "lib"):
        write(tmp_path, f"{name}/helper.py", "")
        write(tmp_path, f"{name}/module.py", SCRIPT)
    (tmp_path / "link.py").symlink_to(tmp_path / "scripts" / "module.py")
    launcher = write(tmp_path, "launcher.py", LAUNCHER)
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path / "lib")])

    def ran(*arguments, **variables):
        (tmp_path / "gone").mkdir()
        arguments = [str(argument).format(tmp_path) for argument in arguments]
        return python(launcher, *arguments, cwd=tmp_path / "gone", env=environment(PYTHONPATH=path, **variables))

    return ran


@pytest.mark.parametrize("target", [["{}/link.py", "-x"], ["-m", "module", "--lr", "1"]])
def test_a_script_runs_where_the_working_folder_is_gone(target, homeless, tmp_path):
    bare = homeless(*target)
    assert bare.returncode == 0, bare.stderr
    ours = homeless("-m", "telemetry", "run", "--run-dir", "{}/run", *target)
    assert (ours.returncode, ours.stdout) == (0, bare.stdout)
    assert without_start_line(ours.stderr) == ("", 1)
    assert end_of(tmp_path / "run")
    for variables in ({}, {"TELEMETRY_RUN_DIR": "run"}):  # a relative one is none
        ours = homeless("-m", "telemetry", "run", *target, **variables)
        assert (ours.returncode, ours.stdout) == (0, bare.stdout)
        assert "set run_dir to an absolute path" in ours.stderr
        assert len(ours.stderr.splitlines()) == 1
