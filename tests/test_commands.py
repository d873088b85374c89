"""What the commands print: for mistakes of a new user, of hostile text, in any encoding; how figures are written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from telemetry._version import __version__
from telemetry.cli import main
from telemetry.util.words import (
    binary_size,
    byte_size,
    duration,
    one_line,
    percent,
    plain,
    plain_number,
    rounded_percent,
    shortened,
    table,
)
from tests.faults.processes import HANG

# -- commands that a new user gets slightly wrong: each says what to type instead -----------------------------------


def said(capsys, *arguments):
    """Status and stderr of a command that prints nothing else."""
    status = main(arguments)
    printed = capsys.readouterr()
    assert printed.out == ""
    return status, printed.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("train.py", "--name", "a b"), "train.py is no command; did you mean: telemetry run train.py --name 'a b'"),
        (("run", "python", "train.py"), "python is the interpreter, not a script: leave it out"),
        (
            ("run", "/usr/bin/python3.11", "train.py"),
            "/usr/bin/python3.11 is the interpreter, not a script: leave it out",
        ),
        (
            ("run", "torchrun", "train.py"),
            "cannot open torchrun: No such file or directory; torchrun comes first: torchrun ... -m telemetry run SCRIPT",
        ),
        (("run", "--rundir", "x", "train.py"), "there is no option --rundir; did you mean --run-dir?"),
        (("report", "x", "y"), "there is no argument y"),
    ],
)
def test_a_usage_error_says_what_to_type(capsys, tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    assert said(capsys, *arguments) == (2, f"telemetry: {told}\n")


def test_without_a_command_all_are_listed(capsys):
    status, text = said(capsys)
    assert status == 2
    assert all(f"\n    {command} " in text for command in ("run", "report", "top", "doctor"))


@pytest.mark.parametrize("command", ["run", "tune"])
def test_only_the_script_is_missing(capsys, command):
    with pytest.raises(SystemExit) as left:
        main([command])
    assert left.value.code == 2
    wanted = f"telemetry {command}: error: the following arguments are required: SCRIPT\n"
    assert capsys.readouterr().err.endswith(wanted)


def test_a_folder_that_is_no_run_folder_suggests_the_one_that_was_meant(capsys, tmp_path):
    def logs_in(folder: Path, time: int) -> Path:
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "rank-0.17.jsonl").touch()
        os.utime(folder / "logs", (time, time))
        return folder

    alone = f"telemetry: {tmp_path} is not a run folder: there is no {tmp_path / 'logs'}"
    assert said(capsys, "report", str(tmp_path)) == (1, f"{alone}\n")
    logs_in(tmp_path / "b-old", 1000)
    new = logs_in(tmp_path / "a-new", 2000)
    assert said(capsys, "report", str(tmp_path)) == (1, f"{alone}; the newest run in it is {new}\n")
    assert said(capsys, "report", str(new / "logs"))[1].endswith(f"; its run folder is {new}\n")


def test_a_missing_extra_is_named_once(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("telemetry.top.command.find_spec", lambda name: None)
    monkeypatch.setattr("telemetry.top.command._is_terminal", lambda: True)
    assert said(capsys, "top", str(tmp_path)) == (
        1,
        "telemetry: top needs textual: pip install 'torch-telemetry[top]'; `telemetry top --once` does without it\n",
    )


# -- no text of others commands the terminal, and no encoding ends a command ----------------------------------------

TITLE = "\x1b]0;owned\x07"
HOSTILE = f"{TITLE}\x9b31m\u202e\nrank 0: all is well\r"


def telemetry(*arguments, encoding="utf-8", **options):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run([sys.executable, "-m", "telemetry", *map(str, arguments)], env=environment, **options)


def not_plain(output: bytes, encoding: str) -> set[str]:
    return {c for c in output.decode(encoding) if not c.isprintable()} - {"\n"}


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    """A run that has ended, and whose every text is an attack."""
    common = dict(time="2026-01-01T00:00:00.000Z", run=HOSTILE, rank=0, local_rank=0, node=HOSTILE, pid=7)
    ledger = dict(startup=0.0, data_wait=8.0, compute=2.0, evaluation=0.0, checkpoint=0.0, other=0.0)
    advice = [dict(action=HOSTILE, setting=HOSTILE, value=HOSTILE, predicted_speedup=2.0, because=HOSTILE)]
    evidence = dict(stuck_in="data_wait", stuck_at=HOSTILE, stacks=[HOSTILE, f"{HOSTILE}\n{HOSTILE}"])
    totals = dict(steps_total=10, wall_seconds=10.0, ledger_total_seconds=ledger, exposed_wait_total_seconds=8.0)
    lines = [
        common | dict(event="run_start", started=common["time"]),
        common | dict(event="stall_open", cause=HOSTILE, opened=HOSTILE, evidence=evidence, advice=advice),
        common | dict(event="error", source="jsonl", message=HOSTILE, errors_total=1),
        common | dict(event="snapshot", path=f"snapshots/{HOSTILE}", reason=HOSTILE, first_step=1, last_step=2),
        common | dict(event="run_end") | totals,
    ]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.7.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return tmp_path


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_report_cannot_command_the_terminal(hostile_run, encoding):
    text, as_json = (telemetry("report", hostile_run, *more, encoding=encoding) for more in ((), ("--json",)))
    for done in (text, as_json):
        assert done.returncode == 0, done.stderr
        assert not_plain(done.stdout + done.stderr, encoding) == set()
        assert b"owned" in done.stdout
    assert not any(line.startswith(b"rank 0: all is well") for line in text.stdout.splitlines()), "a forged line"
    assert "owned" in json.loads(as_json.stdout)["ranks"][0]["node"]


def test_errors_of_the_commands_cannot_command_it(hostile_run, tmp_path):
    encoding = "latin-1"
    for arguments in (
        ["trace", f"no{TITLE}where\u20ac"],
        ["snapshot", hostile_run],
        ["snapshot", hostile_run, "--rank", f"{TITLE}\u20ac"],
        ["run", f"no{TITLE}where\u20ac.py"],
        ["doctor", "--run-dir", tmp_path / f"a{TITLE}\u20ac"],
        [f"{TITLE}\u20ac"],
    ):
        done = telemetry(*arguments, encoding=encoding)
        assert b"Traceback" not in done.stderr, done.stderr
        assert not_plain(done.stdout + done.stderr, encoding) == set(), arguments


def test_output_that_cannot_be_written_is_an_error_and_a_reader_that_goes_away_is_none(hostile_run):
    with open("/dev/full", "wb") as full:
        done = telemetry("report", hostile_run, stdout=full)
    assert done.returncode == 1
    assert done.stderr.decode().startswith("telemetry: the standard output cannot be written")
    assert b"Traceback" not in done.stderr
    for command in (["report", hostile_run], ["doctor", "--run-dir", hostile_run]):
        reader, writer = os.pipe()
        os.close(reader)
        assert telemetry(*command, stdout=writer).stderr == b""
        os.close(writer)


def test_text_that_is_plain_stays_as_it_is():
    assert plain("äöü € 日本 |\nb") == "äöü € 日本 |\nb"
    assert plain("a\x1b[0m\tb\x00") == "a\\x1b[0m\\tb\\x00"
    assert one_line("a\nb\r\nc") == "a b c"


# -- figures and tables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "texts"),
    [
        (duration, {None: "-", 0.0: "0", 2.5e-6: "2.5 us", 0.9999e-3: "999.9 us", -0.0125: "-12.5 ms", 1.0: "1.00 s"}),
        (byte_size, {0: "0 B", 999: "999 B", 1e3: "1 KB", 2.4e6: "2 MB", 3.2e10: "32.0 GB"}),
        (binary_size, {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 300 << 20: "300 MiB", 3 << 40: "3.0 TiB"}),
        (plain_number, {0: "0", 1.234: "1.23", 30.0: "30", 999.4: "999", 999.6: "1000", -123_456.4: "-123456",
                        1.2e-5: "0.000012", 1.2345e-9: "0.00000000123"}),
        (percent, {None: "-", 0.1234: "12.3 %"}),
        (rounded_percent, {0.0: "0 %", 0.0994: "9.9 %", 0.0996: "10 %", 0.5: "50 %"}),
    ],
)  # fmt: skip
def test_figures_have_the_unit_that_suits_them(written, texts):
    assert {value: written(value) for value in texts} == texts


def test_a_table_has_columns_of_equal_width():
    rows = [["a kernel", "1"], ["b", "1000"]]
    assert table(["name", "calls"], rows) == ["    name  calls", "a kernel      1", "       b   1000"]
    assert table(["name", "calls"], rows, names_first=True) == ["name      calls", "a kernel      1", "b          1000"]
    assert [shortened("x" * size, 10) for size in (10, 11)] == ["x" * 10, "x" * 7 + "..."]


def test_a_missing_package_is_named(tmp_path):
    """Also by the doctor, which needs it itself. The version is there without any package."""
    python = [sys.executable, "-S", "-m", "telemetry"]  # without site-packages
    env = {"PYTHONPATH": str(Path(__file__).parents[1])}
    version, doctor = (
        subprocess.run([*python, word], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANG)
        for word in ("--version", "doctor")
    )
    assert (version.returncode, version.stdout) == (0, f"telemetry {__version__}\n")
    assert doctor.returncode == 1
    assert "telemetry: the package msgspec is not installed" in doctor.stderr
