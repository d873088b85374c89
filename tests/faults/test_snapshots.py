"""Snapshots of real processes: what they leave behind, how they end, what limits them, and other profilers."""

from __future__ import annotations

import gzip
import json
import os
import textwrap

import pytest
import torch

from telemetry.cli import main
from telemetry.config import Config
from telemetry.log.lines import SnapshotLine
from telemetry.snapshot import budget, snapshot_command
from tests.faults.memory_group import MIB
from tests.faults.processes import events, mounting, python, quiet, run, tmpfs, told, wait_for, write
from tests.faults.warm_python import WarmChild, warm_python

LOOP = "from tests.faults.snapshot_loop import *\n"


def run_loop(folder, body, *arguments, **more):
    """Run a script that begins with what `snapshot_loop` has."""
    return run(folder, LOOP + textwrap.dedent(body), *arguments, start=warm_python, **more)


def snapshot_lines(folder) -> list[dict]:
    """The lines of the log, without those of plans that were read too late."""
    return [each for each in events(folder / "run", "snapshot") if "before it read" not in (each["why"] or "")]


def whole(path) -> bool:
    return bool(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


# -- what they leave behind ----------------------------------------------------------------------------------------


def test_many_snapshots_leave_nothing_behind_but_their_files(tmp_path):
    """No memory, no thread, no change of the environment, and not Inductor, which torch's own profiler imports."""
    grown, kept = run_loop(
        tmp_path,
        """
        from tests.faults.inside import own_threads
        written = []
        sys.addaudithook(lambda event, _: written.append(event) if event in {"os.putenv", "os.unsetenv"} else None)
        layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(20)])
        start(interval_seconds=0.1, max_snapshots=1000, snapshot_disk_bytes=1 << 18)
        grown = []
        for batch in DataLoader(Ones(), batch_size=4):
            layers(batch).sum().backward()
            time.sleep(0.001)
            if recorded() == 45:
                break
            if sum(agent().snapshots.counts.values()) == len(grown):
                grown.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
                telemetry.request_snapshot(steps=3)
        assert "telemetry-export" not in own_threads()
        telemetry.stop()
        assert not written, written
        assert own_threads() == []
        assert "torch._inductor" not in sys.modules
        tell([grown[10:], sum(path.stat().st_size for path in Path("run/snapshots").glob("request-*/*"))])
        """,
        timeout=300,
    )
    early, late = max(grown[:15]), max(grown[-15:])
    assert late - early < 8 * MIB, f"{(late - early) // MIB} MiB in 20 snapshots of about 1 MiB each"
    assert kept <= 1 << 18, "the limit holds"


def test_a_folder_that_cannot_be_used_is_told_and_takes_no_requests(tmp_path):
    write(tmp_path, "run/snapshots", "")
    run_loop(
        tmp_path,
        """
        from tests.faults.inside import steps
        start()
        assert telemetry.request_snapshot() is False
        loop(lambda: steps() > 20)
        telemetry.stop()
        """,
    )
    assert len(told(tmp_path / "run", "snapshot")) == 1


def test_training_on_another_thread_is_left_alone(tmp_path):
    """Kineto would write a line to stderr."""
    run_loop(
        tmp_path,
        """
        def train():
            start()
            loop(lambda: count("refused"))
            telemetry.stop()

        on_thread(train)
        """,
    )
    (line,) = snapshot_lines(tmp_path)
    assert (line["result"], "main thread" in line["why"]) == ("refused", True)


# -- how a run ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["telemetry.stop()", "pass", "os._exit(3)", "raise SystemExit(3)"])
def test_a_run_that_ends_during_a_recording(tmp_path, ending):
    """No new thread is needed: Python 3.12 starts none once the script has come to its end."""
    run_loop(
        tmp_path,
        f"""
        from telemetry.agent import agent as agent_thread
        from telemetry.safety import threads as own_threads

        def refuse(*_):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        agent_thread._STOP_SECONDS = 100.0  # to finish what it does, however busy the machine is
        start(snapshot_max_seconds=600)
        loop(recording, steps=50)
        own_threads.start_new_thread = refuse
        {ending}
        """,
        code=3 if "3" in ending else 0,
    )
    published = list(tmp_path.glob("run/snapshots/request-step*/*.gz"))
    assert len(published) == ("_exit" not in ending)
    assert all(whole(path) for path in published)
    assert not list(tmp_path.rglob(".export*"))
    assert len(events(tmp_path / "run", "run_end")) == ("_exit" not in ending), "it does not hold up the end"


def test_a_run_stopped_by_another_thread_during_a_recording(tmp_path):
    run_loop(
        tmp_path,
        """
        start(snapshot_max_seconds=600)
        loop(recording, steps=50)
        thread = threading.Thread(target=telemetry.stop)
        thread.start()
        for _ in DataLoader(Ones()):
            if not thread.is_alive():
                break
        """,
    )
    (line,) = snapshot_lines(tmp_path)
    assert (line["result"], line["why"]) == ("recorded", "cut short: the end of the run")


@pytest.mark.parametrize("then", ["loop", "exit"])
def test_a_run_stopped_while_its_training_thread_is_busy(tmp_path, then):
    """The session and the hooks end when the training thread reaches a step boundary, or at the exit."""
    run_loop(
        tmp_path,
        """
        start(snapshot_max_seconds=600)
        loop(recording, steps=50)
        on_thread(telemetry.stop)
        assert torch.autograd._profiler_enabled(), "it is still on: nobody else may end it"
        if sys.argv[1] == "loop":
            for _ in DataLoader(Ones()):
                if not torch.autograd._profiler_enabled():
                    break
            assert not hasattr(torch.utils.data.dataloader._BaseDataLoaderIter.__next__, "__wrapped__")
        """,
        then,
    )


@pytest.mark.parametrize("then", ["loop", "exit"])
def test_a_profiler_on_another_thread_does_not_wait_for_ever(tmp_path, then):
    """The training thread ends no step meanwhile. So the user's profiler starts first, and ours ends after that."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
        pytest.skip("before torch 2.13 theirs fails after the wait")
    found = run_loop(
        tmp_path,
        """
        from telemetry.snapshot import capture
        capture._GIVE_WAY_SECONDS = 0.05

        def theirs():
            with profile(activities=[ProfilerActivity.CPU]) as prof:
                torch.ones(3).sum()
            found.append("aten::sum" in [event.name for event in prof.events()])

        found = []
        start(snapshot_max_seconds=600)
        loop(recording, steps=50)
        on_thread(theirs)
        assert torch.autograd._profiler_enabled()
        if sys.argv[1] == "loop":
            loop(lambda: not torch.autograd._profiler_enabled())
            theirs()
            until(lambda: count("failed"))
            telemetry.stop()
        tell(found)
        """,
        then,
        err=None,
    )
    assert found == [True] * (1 + (then == "loop"))


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """``telemetry snapshot``. Returns its exit status and what it has printed."""
    monkeypatch.chdir(tmp_path)

    def snapshot(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(["snapshot", *arguments])
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()

    return snapshot


def test_the_command_from_another_shell(tmp_path, command):
    script = write(tmp_path, "script.py", LOOP + "start()\nloop(lambda: os.path.exists('stop'))\n")
    with WarmChild(script, cwd=tmp_path, env=quiet()) as child:
        wait_for(lambda: list(tmp_path.glob("run/snapshots/request-step*/*.gz")), "the first trace")
        status, out, err = command("run", "--steps", "3")
        assert (status, err) == (0, "")
        assert whole(tmp_path / out.split(": ")[-1].strip())
        status, out, err = command("run", "--rank", "7", "--timeout", "1")
        assert (status, out, "the ranks are 0" in err) == (1, "", True)
        (tmp_path / "stop").touch()
        child.wait()
    status, _, err = command("run")
    assert (status, "has ended" in err) == (1, True)
    assert os.listdir(tmp_path / "run" / "snapshots" / ".meeting") != ["request.json"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nowhere"], 1, "not a run folder"),
        (["nowhere", "--rank", "first"], 2, "all, or the number"),
        (["nowhere", "--steps", "0"], 2, "from 1 to 50"),
        (["nowhere", "--timeout", "soon"], 2, "--timeout"),
    ],
)
def test_the_command_says_what_is_wrong(command, arguments, status, words):
    found, out, err = command(*arguments)
    assert (found, out) == (status, "")
    assert words in err.splitlines()[-1]


def test_the_command_names_the_option_that_allows_what_was_refused(command, monkeypatch):
    why = "dropped: 1 step took 59 MiB of memory, and a larger trace may take over 1 s (snapshot_pause_seconds)"
    refused = SnapshotLine(result="refused", why=why)
    monkeypatch.setattr(snapshot_command, "_results", lambda *_: {0: refused, 1: refused})
    status, out, err = command("run")
    assert (status, err) == (1, "")
    assert out.splitlines()[1:] == [
        f"rank 1: refused: {why}",
        "to allow it, start the run with a larger --snapshot-pause-seconds",
    ]


def test_a_snapshot_says_nothing_and_the_script_s_own_profiler_says_what_it_always_does(tmp_path):
    """Kineto writes two lines for each session, and a child process has the environment that the script has."""
    done = python(
        "-c",
        LOOP
        + textwrap.dedent(
            """
            before = dict(os.environ)
            start()
            loop(recorded)
            telemetry.stop()
            assert dict(os.environ) == before
            print("of the script:", file=sys.stderr, flush=True)
            with profile(activities=[ProfilerActivity.CPU]):
                torch.ones(3).sum()
            """
        ),
        cwd=tmp_path,
        env=quiet(),
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = done.stderr.split("of the script:\n")
    assert ours == ""
    assert [line.split()[-1] for line in theirs.splitlines()] in ([], ["profiler_start", "profiler_stop"])


# -- steps of very many operators ----------------------------------------------------------------------------------

MANY_OPERATORS = """
import json, sys, torch, telemetry
from tests.faults.inside import tell
from torch.utils.data import DataLoader

torch.set_num_threads(1)
operators = int(sys.argv[1])
agent = telemetry.start("run") if sys.argv[2] == "ours" else None


def step(number):
    first, second = torch.ones(4), torch.ones(4)
    for _ in range(number):
        first + second


def large():
    "The steps are large from the first to record."
    if agent is None:
        return True
    capture = agent.snapshots._capture
    return capture._export is not None and capture._ended >= capture._export.plan.first_step - 1


steps = 0
for _ in DataLoader(range(100_000)):
    steps += 1
    if steps == 10 and agent is not None:
        telemetry.request_snapshot(steps=3)
    if agent is not None and sum(agent.snapshots.counts.values()) or agent is None and steps == 3:
        break
    step(operators if large() else 300)
telemetry.stop()
with open("/proc/self/status") as status:
    peak, = (int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
    step(7)
assert sum(event.name == "aten::add" for event in profiler.events()) == 7, "the script's own profiler sees its operators"
tell(peak)
"""


def of_many(tmp_path, operators: int) -> dict:
    """The line of the snapshot. It must take little memory, compared with a run without the agent."""
    bare, ours = (
        run(tmp_path, MANY_OPERATORS, operators, who, start=warm_python, err=None) for who in ("bare", "ours")
    )
    assert ours - bare < 256 * MIB
    (line,) = events(tmp_path / "run", "snapshot")
    return line


@pytest.mark.parametrize(("operators", "steps"), [(35_000, 2), (60_000, 1)])
def test_one_step_is_recorded_and_more_if_they_fit(tmp_path, operators, steps):
    line = of_many(tmp_path, operators)
    assert line["result"] == "recorded"
    assert line["last_step"] == line["first_step"] + steps - 1
    assert line["why"] == "cut short: a larger trace may take over 1 s (snapshot_pause_seconds)"


@pytest.mark.parametrize(("operators", "dropped"), [(200_000, "1 step took"), (1_000_000, "inside a step")])
def test_a_step_of_too_many_operators_is_dropped(tmp_path, operators, dropped):
    line = of_many(tmp_path, operators)
    assert line["result"] == "refused"
    assert dropped in line["why"]
    assert line["why"].endswith("a larger trace may take over 1 s (snapshot_pause_seconds)")


def test_ranks_share_a_part_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(budget, "free_memory", lambda: 1 << 30)
    alone, eight = (budget.Budget(Config(), ranks) for ranks in (1, 8))
    assert alone.limit == "1 s (snapshot_pause_seconds)"
    assert eight.recorded_bytes < alone.recorded_bytes
    assert eight.limit == "32 MiB of memory, this rank's share of what is free"
    assert "(snapshot_memory_bytes)" in budget.Budget(Config(snapshot_pause_seconds=600), 1).limit


# -- the export ----------------------------------------------------------------------------------------------------

KILLED = """
from telemetry.seams import profilers
from telemetry.snapshot import export


def kill_at(owner, name, *, after=False):
    original = getattr(owner, name)

    def killed(*arguments):
        if after:
            original(*arguments)
        tell(sorted(map(os.path.basename, glob.glob("run/snapshots/.export.*/*"))))
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, killed)


{
    "saved": lambda: kill_at(profilers.Session, "save", after=True),
    "compressed": lambda: kill_at(export.Export, "_remove_oldest"),
}[sys.argv[1]]()
start()
loop(lambda: count("failed"))
"""


@pytest.mark.parametrize("stage", ["saved", "compressed"])
def test_a_kill_at_any_stage_publishes_nothing_and_is_cleared_up(tmp_path, stage):
    assert "trace.json" in run_loop(tmp_path, KILLED, stage, code=-9)
    assert not list(tmp_path.glob("run/snapshots/request-step*/*.gz"))
    (left,) = tmp_path.glob("run/snapshots/.export.*")
    os.utime(left, (1e9, 1e9))
    run(tmp_path, "import telemetry\ntelemetry.start('run', max_snapshots=0)\ntelemetry.stop()\n")
    assert not left.exists()


FULL = """
import os, shutil
from pathlib import Path
from telemetry.snapshot import export
from tests.faults.inside import tell
from tests.snapshot_recording import SavedAs, exported

export.MIN_FREE_BYTES = -(1 << 40)  # not to be stopped by the look at the free space beforehand
export._PROBE_BYTES = 1
here = Path("full/run/snapshots")
content = b'{"traceEvents": [' + b",".join(b'"%s"' % os.urandom(30).hex().encode() for _ in range(600)) + b"]}"


def fill(pages):
    filler.unlink(missing_ok=True)
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass
        file.truncate(max(0, file.tell() - 4096 * pages))


filler = Path("full/filler")
outcomes = []
for pages in range(40):
    fill(pages)
    outcomes.append(exported(here, SavedAs(content), disk_bytes=1 << 20).error or "kept")
    filler.unlink()
    files = [path.name for path in here.rglob("*") if path.is_file()]
    assert len(files) == (outcomes[-1] == "kept"), (pages, outcomes[-1], files)
    assert not [*here.glob(".export*")]
    shutil.rmtree(here, ignore_errors=True)
tell(outcomes)
"""


def test_a_disk_that_is_full_at_any_stage(tmp_path):
    """A private file system, filled up to a number of free pages, so that the export fails at each of its stages."""
    (tmp_path / "full").mkdir()
    outcomes = run(tmp_path, FULL, start=mounting(tmpfs("full", "size=512k,mode=700")))
    assert outcomes[0] != "kept"
    assert outcomes[39] == "kept"
    assert any("No space left" in outcome for outcome in outcomes)


def test_no_room_is_seen_beforehand_and_told(tmp_path):
    run_loop(
        tmp_path,
        """
        from telemetry.snapshot import export
        export.MIN_FREE_BYTES = 1 << 60
        start()
        loop(lambda: count("failed"))
        telemetry.stop()
        """,
    )
    (line,) = snapshot_lines(tmp_path)
    assert (line["result"], line["path"]) == ("failed", None)
    assert "no room" in line["why"]
