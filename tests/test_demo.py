"""The demo: a small run of it prints what was measured, and ends what it has started."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from telemetry.demo import demo_command as command
from telemetry.demo.demo_command import DemoPlan, demo
from telemetry.model.records import Advice
from tests.report_logs import START, line, totals, window, write

pytest.importorskip("PIL")
ROOT = Path(__file__).parents[1]
SMALL = {"pictures": 32, "width": 96, "height": 64}
LIGHT = {"pictures": 160, "width": 96, "height": 64, "arguments": ("--batch-size", "8")}
"""Short steps that mostly wait for storage. So a busy machine makes enough of them, too: a stall needs 20."""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Without settings from outside, with any port, and with this package wherever the tests are started."""
    for name in [name for name in os.environ if name.startswith("TELEMETRY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TELEMETRY_PORT", "0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def trainings_in(folder):
    """Living trainings whose command line names a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line and "train.py" in line:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Everything a small demo on slow storage prints, and its folder."""
    base = tmp_path_factory.mktemp("demo")
    script = Path(__file__).with_name("fakes") / "slow_storage_train.py"
    code = (
        "import pathlib, sys; from telemetry.demo import demo_command; from telemetry.demo.demo_command import DemoPlan; "
        f"demo_command.SCRIPT = pathlib.Path({str(script)!r}); "
        f"sys.exit(demo_command.demo({str(base)!r}, {DemoPlan(**LIGHT, seconds=10)!r}))"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("TELEMETRY_")}
    env |= {"TELEMETRY_PORT": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env, cwd=base, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, base


def advised_workers(text):
    """The number of workers that the report advises."""
    return re.search(r"try num_workers=(\d+): .*, predicted", text)[1]


def test_the_run_is_shown_while_it_trains(shown):
    text, base = shown
    frame = text.split("top --once", 1)[1].split("curl -s http", 1)[0]
    assert str(base / "demo-1") in frame
    assert "rank" in frame
    names = [name for name, _, _ in re.findall(r"^   (t\w+)\{(.*)\} (\S+)$", text, re.MULTILINE)]
    assert 12 <= len(names) <= 16
    assert names.count("training_time_seconds_total") == 6
    assert {"training_steps_total", "training_exposed_wait_seconds_total", "training_process_threads"} <= set(names)


def test_the_advice_on_workers_is_followed_also_where_a_stall_has_another_before_it(tmp_path):
    def advice(setting, value, gain):
        return {"action": "x", "setting": setting, "value": value, "predicted_speedup": gain, "because": "y"}

    given = [advice(None, None, None), advice("num_workers", "2", 1.56), advice(None, None, 1.3)]
    write(
        tmp_path, 0, line("run_start", **START), window(seconds=[0.1] * 100, wait=7, compute=3, steps=100),
        line("stall_open", cause="loader_on_training_thread", opened="t1", advice=given),
        line("run_end", **totals(wait=7, compute=3, steps=100)),
    )  # fmt: skip
    found = command.advised(tmp_path)
    assert (found.setting, found.value, found.predicted_speedup) == ("num_workers", "2", 1.56)


def test_its_report_and_the_advice_that_is_followed(shown):
    text, base = shown
    assert re.search(
        r"^Starved: .*\n  cause:  loader_on_training_thread.*\n(.*\n)?  do:     set num_workers=\d+", text, re.MULTILINE
    )
    assert int(re.search(r"^ +0 +\S+ +\d+ +(\d+) ", text, re.MULTILINE)[1]) > 0
    advised = advised_workers(text)
    gain = re.search(rf"5. Taking the advice, num_workers={advised}, which predicts (\d+\.\d+) times", text)[1]
    assert re.search(rf"num_workers={advised}: .*, predicted ([\d.]+ to )?{re.escape(f'{float(gain):g}')} times", text)
    assert re.search(rf"^A: demo-1, \d+ steps\nB: demo-1-{advised}-workers, \d+ steps$", text, re.MULTILINE)
    assert re.search(rf"^num_workers +0 +{advised}$", text, re.MULTILINE)
    pytest.importorskip("bokeh")
    page = base / "demo-1" / "report.html"
    assert text.rstrip().splitlines()[-1].startswith(f"{page} (")
    assert "<title>Starved" in page.read_text()


def test_commands_it_suggests_can_be_typed_and_nothing_is_left_running(shown):
    text, base = shown
    commands = [line.strip().removeprefix("$ ") for line in text.splitlines() if line.startswith("   $ ")]
    reports = [c for c in commands if " report " in c and c.endswith("--json")]
    done = subprocess.run(reports[0], shell=True, capture_output=True, text=True, cwd=base, check=True)
    assert '"run": "demo-1"' in done.stdout
    assert any(f"--num-workers {advised_workers(text)}" in c for c in commands)
    assert trainings_in(base) == []


def test_pictures_are_used_again_and_runs_get_folders_of_their_own(shown, capsys):
    base = shown[1]
    picture = next(base.glob("pictures-*/*/*.jpg"))
    before = picture.stat().st_mtime_ns
    assert demo(str(base), DemoPlan(**LIGHT, seconds=0.1)) == 0
    assert "from an earlier demo" in capsys.readouterr().out
    assert picture.stat().st_mtime_ns == before
    assert {"demo-1", "demo-2"} <= {entry.name for entry in base.iterdir()}


def test_pictures_are_the_same_each_time_and_only_missing_ones_are_drawn(tmp_path):
    from PIL import Image

    from telemetry.demo.pictures import KINDS, draw_missing

    assert draw_missing(tmp_path, 8, 96, 64) == 8
    files = sorted(tmp_path.glob("*/*.jpg"))
    before = [file.read_bytes() for file in files]
    assert len(set(before)) == 8
    assert {file.parent.name for file in files} == set(KINDS)
    with Image.open(files[0]) as picture:
        assert (picture.format, picture.size) == ("JPEG", (96, 64))
    files[3].unlink()
    assert draw_missing(tmp_path, 8, 96, 64) == 1
    assert [file.read_bytes() for file in files] == before


def test_the_script_knows_nothing_of_telemetry():
    assert "telemetry" not in command.SCRIPT.read_text()


def test_what_stops_it_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    assert demo(str(tmp_path / "file")) == 1
    assert "cannot write below" in capsys.readouterr().err
    monkeypatch.setenv("TELEMETRY_DISABLED", "1")
    assert demo(str(tmp_path / "run")) == 1
    assert "TELEMETRY_DISABLED is set" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "telemetry.demo.pictures")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert demo(str(tmp_path / "run")) == 1
    printed = capsys.readouterr()
    assert printed.err == "telemetry demo: needs pillow and numpy: pip install 'torch-telemetry[demo]'\n"
    assert printed.out == ""
    assert not (tmp_path / "run").exists()


def test_a_training_that_fails_shows_its_stderr(tmp_path, capsys, monkeypatch):
    """The first one, and the second one of a number of workers that no loader takes."""
    assert demo(str(tmp_path), DemoPlan(**SMALL, seconds=5, arguments=("--device", "nonsense"))) == 1
    first = capsys.readouterr()
    assert re.search(r"ended with exit status 1; its stderr:\n(.*\n)*RuntimeError: .*nonsense", first.err)
    advice = Advice("use workers", "num_workers", "-1", 1.5)
    monkeypatch.setattr(command, "advised", lambda run: advice)
    assert demo(str(tmp_path), DemoPlan(**SMALL, seconds=0.1)) == 1
    second = capsys.readouterr()
    assert "5. Taking the advice" in second.out
    assert re.search(r"ended with exit status 1; its stderr:\n(.*\n)*.*num_workers", second.err)
    assert "What to try" not in first.out + second.out


def test_interrupted_it_ends_the_training(tmp_path):
    # Where the tests run in the background, Ctrl-C is ignored, and whatever they start would inherit that.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"from telemetry.demo.demo_command import *; sys.exit(demo({str(tmp_path)!r}, {DemoPlan(**SMALL, seconds=60)!r}))"
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        for line in child.stdout:
            if "telemetry run" in line:
                break
        while not [pid for pid in trainings_in(tmp_path) if pid != child.pid]:
            assert child.poll() is None
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=20)
    finally:
        child.kill()
    assert child.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert trainings_in(tmp_path) == []
