"""Commands that a new user gets slightly wrong: each says what to type instead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from telemetry.cli import main


def said(capsys, *arguments):
    """Status and stderr of a command that prints nothing else."""
    status = main(arguments)
    printed = capsys.readouterr()
    assert printed.out == ""
    return status, printed.err


def logs_in(folder: Path) -> Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "rank-0.17.jsonl").touch()
    return folder


def test_a_script_without_run(capsys):
    assert said(capsys, "train.py", "--name", "a b") == (
        2,
        "telemetry: train.py is no command; did you mean: telemetry run train.py --name 'a b'\n",
    )


@pytest.mark.parametrize("interpreter", ["python", "python3.11", "/usr/bin/python3"])
def test_an_interpreter_in_the_place_of_the_script(capsys, interpreter):
    status, text = said(capsys, "run", interpreter, "train.py")
    assert (status, text) == (2, f"telemetry: {interpreter} is the interpreter, not a script: leave it out\n")


@pytest.mark.parametrize(
    ("launcher", "started"),
    [("torchrun", "torchrun ... -m telemetry run SCRIPT"), ("srun", "srun ... telemetry run SCRIPT")],
)
def test_a_launcher_in_the_place_of_the_script(capsys, tmp_path, monkeypatch, launcher, started):
    monkeypatch.chdir(tmp_path)
    status, text = said(capsys, "run", launcher, "train.py")
    assert status == 2
    assert text == f"telemetry: cannot open {launcher}: No such file or directory; {launcher} comes first: {started}\n"


def test_the_folder_of_several_runs_names_the_newest(capsys, tmp_path):
    old, new = logs_in(tmp_path / "b-old"), logs_in(tmp_path / "a-new")
    os.utime(old / "logs", (1000, 1000))
    os.utime(new / "logs", (2000, 2000))
    status, text = said(capsys, "report", str(tmp_path))
    assert status == 1
    assert text.endswith(f"there is no {tmp_path / 'logs'}; the newest run in it is {new}\n")


def test_the_folder_of_the_logs_names_its_run(capsys, tmp_path):
    run = logs_in(tmp_path / "run")
    status, text = said(capsys, "report", str(run / "logs"))
    assert status == 1
    assert text.endswith(f"; its run folder is {run}\n")


def test_a_folder_without_runs_suggests_nothing(capsys, tmp_path):
    assert said(capsys, "report", str(tmp_path)) == (
        1,
        f"telemetry: {tmp_path} is not a run folder: there is no {tmp_path / 'logs'}\n",
    )


def test_without_a_command_all_are_listed(capsys):
    status, text = said(capsys)
    assert status == 2
    assert all(f"\n    {command} " in text for command in ("run", "report", "top", "doctor"))


@pytest.mark.parametrize("command", ["run", "tune"])
def test_only_the_script_is_missing(capsys, command):
    with pytest.raises(SystemExit) as left:
        main([command])
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith(
        f"telemetry {command}: error: the following arguments are required: SCRIPT\n"
    )


def test_a_misspelt_option_names_the_closest(capsys):
    assert said(capsys, "run", "--rundir", "x", "train.py") == (
        2,
        "telemetry: there is no option --rundir; did you mean --run-dir?\n",
    )
    assert said(capsys, "report", "x", "y") == (2, "telemetry: there is no argument y\n")


def test_a_missing_extra_is_named_once(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("telemetry.top.command.find_spec", lambda name: None)
    monkeypatch.setattr("telemetry.top.command._is_terminal", lambda: True)
    assert said(capsys, "top", str(tmp_path)) == (
        1,
        "telemetry: top needs textual: pip install 'torch-telemetry[top]'; `telemetry top --once` does without it\n",
    )
