"""The demo: a small run of it prints what was measured, and ends what it has started."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from telemetry.demo import command
from telemetry.demo.command import DemoOutcome, DemoPlan, Reading, demo, lines_that_matter
from telemetry.top.endpoints import ScrapeError, fetch

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


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def children_in(folder):
    """Living processes whose command line names a folder."""
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
    plan = DemoPlan(**LIGHT, seconds=10, poll_seconds=0.5)
    script = Path(__file__).with_name("fakes") / "slow_storage_train.py"
    code = (
        "import pathlib, sys; from telemetry.demo import command; from telemetry.demo.command import DemoPlan; "
        f"command.SCRIPT = pathlib.Path({str(script)!r}); sys.exit(command.demo({str(base)!r}, {plan!r}))"
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
    return re.search(r"try num_workers=(\d+), predicted", text)[1]


class TestARun:
    def test_rows_of_the_run_as_it_goes(self, shown):
        rows = [line for line in shown[0].splitlines() if re.match(r" +\d+ s +\d+ +\d+\.\d ", line)]
        steps = [int(row.split()[2]) for row in rows]
        assert steps == sorted(steps)
        assert steps[-1] > 0
        printed = (shown[1] / "demo-1" / "train.out").read_text().splitlines()
        newest = [row[row.index("epoch") :] for row in rows if "epoch" in row]
        assert set(newest) <= set(printed)
        assert newest or len(printed) < 2  # with a second epoch, there were rows since the first had ended
        assert any(re.search(r"\d+ %", row) for row in rows)  # waiting

    def test_exposition_as_it_was_scraped(self, shown):
        lines = re.findall(r"^   (t\w+)\{(.*)\} (\S+)$", shown[0], re.MULTILINE)
        names = [name for name, _, _ in lines]
        assert 12 <= len(names) <= 16
        assert names.count("training_time_seconds_total") == 6
        for name in ("training_steps_total", "training_exposed_wait_seconds_total", "training_process_threads"):
            assert name in names
        assert sum(name == "telemetry_overhead_seconds_total" for name in names) == 2

    def test_report_of_this_run(self, shown):
        text, base = shown
        assert "run demo-1" in text
        assert re.search(
            r"^Starved: .* Cause: loader_on_training_thread; try num_workers=\d+, predicted ([\d.]+ to )?[\d.]+ times",
            text,
            re.MULTILINE,
        )
        total = int(re.search(r"^ +0 +\S+ +\d+ +(\d+) ", text, re.MULTILINE)[1])
        rows = [int(row) for row in re.findall(r"^ +\d+ s +(\d+) ", text, re.MULTILINE)]
        assert total >= rows[-1] > 0
        assert list((base / "demo-1" / "logs").glob("rank-0.*.jsonl"))

    def test_the_advice_is_followed_and_both_speed_ups_are_told(self, shown):
        """The realised one is the ratio of the steps per second that are printed above it."""
        text = shown[0]
        advised = advised_workers(text)
        assert f"5. Taking the advice, num_workers={advised}" in text
        rates = re.findall(rf"^   (?:no|{advised}) workers +(\d+\.\d)$", text, re.MULTILINE)
        before, after = map(float, rates)
        predicted, realised = re.search(r"speed-up: predicted (\S+), realised (\S+)$", text, re.MULTILINE).groups()
        gain = re.escape(f"{float(predicted):g}")
        assert re.search(rf"num_workers={advised}, predicted ([\d.]+ to )?{gain} times", text)
        # The rates are printed with one decimal. On a busy machine they are small, and what is rounded off is not.
        lowest, highest = (after - 0.05) / (before + 0.05), (after + 0.05) / (before - 0.05)
        assert lowest - 0.006 < float(realised) < highest + 0.006

    def test_commands_it_suggests_can_be_typed(self, shown):
        text, base = shown
        commands = [line.strip().removeprefix("$ ") for line in text.splitlines() if line.startswith("   $ ")]
        reports = [c for c in commands if " report " in c and c.endswith("--json")]
        done = subprocess.run(reports[0], shell=True, capture_output=True, text=True, cwd=base, check=True)
        assert '"run": "demo-1"' in done.stdout
        assert any(f"--num-workers {advised_workers(text)}" in c for c in commands)

    def test_it_ends_with_the_report_as_a_page(self, shown):
        pytest.importorskip("bokeh")
        text, base = shown
        last = text.rstrip().splitlines()[-1]
        page = base / "demo-1" / "report.html"
        assert last.startswith(f"{page} (")
        assert "<title>Starved" in page.read_text()

    def test_nothing_of_it_is_left_running(self, shown):
        assert children_in(shown[1]) == []

    def test_pictures_are_used_again_and_runs_get_folders_of_their_own(self, shown, capsys):
        base = shown[1]
        picture = next(base.glob("pictures-*/*/*.jpg"))
        before = picture.stat().st_mtime_ns
        plan = DemoPlan(**LIGHT, seconds=0.1, poll_seconds=0.5)
        assert demo(str(base), plan) == 0
        assert "from an earlier demo" in capsys.readouterr().out
        assert picture.stat().st_mtime_ns == before
        assert {"demo-1", "demo-2"} <= {entry.name for entry in base.iterdir()}


def test_pictures_are_the_same_each_time_and_drawn_anew_when_incomplete(tmp_path):
    from PIL import Image

    from telemetry.demo.pictures import KINDS, PictureSet, ensure

    size = PictureSet(8, 96, 64)
    assert ensure(tmp_path, size) == 8
    files = sorted(tmp_path.glob("*/*.jpg"))
    before = [file.read_bytes() for file in files]
    assert len(set(before)) == 8
    assert {file.parent.name for file in files} == set(KINDS)
    with Image.open(files[0]) as picture:
        assert (picture.format, picture.size) == ("JPEG", (96, 64))
    assert ensure(tmp_path, size) == 0
    files[3].unlink()
    assert ensure(tmp_path, size) == 8
    assert [file.read_bytes() for file in files] == before


def test_the_script_knows_nothing_of_telemetry():
    tree = ast.parse(command.SCRIPT.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any("telemetry" in name for name in names)
    assert "telemetry" not in command.SCRIPT.read_text()


def test_without_pillow_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert demo(str(tmp_path / "run")) == 1
    printed = capsys.readouterr()
    assert printed.err == "telemetry demo: needs pillow: pip install 'torch-telemetry[demo]'\n"
    assert printed.out == ""
    assert not (tmp_path / "run").exists()


def test_disabled_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TELEMETRY_DISABLED", "1")
    assert demo(str(tmp_path / "run")) == 1
    assert "TELEMETRY_DISABLED is set" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert demo(str(tmp_path / "file")) == 1
    assert "cannot write below" in capsys.readouterr().err


def test_a_script_that_fails_shows_its_stderr(tmp_path, capsys):
    plan = DemoPlan(**SMALL, seconds=5, poll_seconds=0.5, arguments=("--device", "nonsense"))
    assert demo(str(tmp_path), plan) == 1
    printed = capsys.readouterr()
    assert "ended with exit status 1; its stderr:" in printed.err
    assert "nonsense" in printed.err
    assert "RuntimeError" in printed.err
    assert "What to try" not in printed.out


def test_a_second_training_that_fails_shows_its_stderr_and_counts(tmp_path, capsys, monkeypatch):
    """Of a number of workers that no loader takes."""
    monkeypatch.setattr(command, "outcome", lambda run: DemoOutcome(10.0, -1, 1.5))
    assert demo(str(tmp_path), DemoPlan(**SMALL, seconds=0.1, poll_seconds=0.5)) == 1
    printed = capsys.readouterr()
    assert "5. Taking the advice" in printed.out
    assert "ended with exit status 1; its stderr:" in printed.err
    assert "num_workers" in printed.err
    assert "speed-up" not in printed.out
    assert "What to try" not in printed.out


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_the_training(tmp_path, sent):
    plan = DemoPlan(**SMALL, seconds=60, poll_seconds=0.5)
    # Where the tests run in the background, Ctrl-C is ignored, and whatever they start would inherit that.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"from telemetry.demo.command import *; sys.exit(demo({str(tmp_path)!r}, {plan!r}))"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        for line in child.stdout:
            if "steps/s" in line:
                break
        training = [pid for pid in children_in(tmp_path) if pid != child.pid]
        assert training
        child.send_signal(sent)
        _, errors = child.communicate(timeout=20)
    finally:
        child.kill()
    assert child.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    deadline = time.monotonic() + 5
    while not all(map(gone, training)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(map(gone, training))


EXPOSITION = """\
# TYPE training_steps_total counter
training_steps_total{rank="0",run="a \\"b\\""} 30.0
training_time_seconds_total{category="data_wait",rank="0",run="r"} 6.0
training_time_seconds_total{category="compute",rank="0",run="r"} 2.0
training_step_duration_seconds_bucket{le="+Inf",rank="0",run="r"} 30.0
training_stall_active{cause="unknown",rank="0",run="r"} 0.0
training_stall_active{cause="gc_pause",rank="0",run="r"} 1.0
"""


def test_what_is_read_from_an_exposition():
    reading = Reading.of(EXPOSITION)
    assert reading.steps == 30
    assert reading.waiting_ratio == 0.75
    assert reading.wall_seconds == 8
    assert reading.stall == "gc_pause"
    nothing = reading.since(reading)
    assert (nothing.steps, nothing.wall_seconds) == (0, 0)
    assert nothing.waiting_ratio is None
    matter = lines_that_matter(EXPOSITION)
    assert [line.split("{")[0] for line in matter].count("training_stall_active") == 1
    assert not any("bucket" in line for line in matter)


def test_an_endpoint_that_does_not_answer():
    with pytest.raises(ScrapeError, match="does not answer"):
        fetch("http://127.0.0.1:1/metrics")
