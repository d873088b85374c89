"""Snapshots of real processes: what they leave behind, how they end, and other profilers."""

from __future__ import annotations

import os

import pytest
import torch

from faults.processes import environment, events, python, results, wait_for, write
from faults.snapshot_scripts import LOOP, run_loop, snapshot_lines, whole
from tests.faults.warm_python import WarmChild

CYCLES = """
from torch import nn
from telemetry.hooks.attachment import Attachment
from telemetry.hooks.ring import Ring
from telemetry.hooks.tracker import StepTracker
from telemetry.util import threads as own_threads
from telemetry.snapshot import agree
from telemetry.node.board import board_root
from telemetry.snapshot.budget import Budget, BudgetWatch
from telemetry.snapshot.capture import Capture
from telemetry.snapshot.store import TraceStore

tracker = StepTracker(Ring())
attachment = Attachment(tracker, print)
attachment.attach()
capture = Capture(tracker, profilers=attachment.profilers, max_seconds=9, metadata={"rank": 0, "world_size": 1})
trace_store = TraceStore(Path("run/snapshots"), "node", max_bytes=1 << 28, disk_bytes=1 << 18)
layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
iterator = iter(DataLoader(Ones(), batch_size=4))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def threads():
    return threading.active_count() + len(own_threads.running())


grown, before = [], threads()
for cycle in range(220):
    now = tracker.ring.closed
    request = agree.Request("1700000000000-a", agree.API, agree.REQUEST, None, 3, "a test")
    watch = BudgetWatch(Budget.now(256 << 20, 1.0, ranks=1, shapes=False))
    capture.arm(agree.Plan(request, None, now + 4, now + 6, (0,), f"request-step{now + 4}", 1), watch)
    for _ in range(8):
        layers(next(iterator)).sum().backward()
    tracker.ring.drain(1 << 20)
    outcome = capture.take()
    assert outcome.result == "recorded", outcome
    trace_store.publish(outcome.trace, outcome.plan, "rank-0.gz", most_bytes=1 << 20)
    del outcome
    if cycle >= 19:
        grown.append(resident())
kept = sum(path.stat().st_size for path in Path("run/snapshots").rglob("*"))
with open("results.json", "w") as file:
    json.dump({"grown": grown, "kept": kept, "threads": threads() - before}, file)
"""


def test_two_hundred_snapshots_leave_no_memory_behind(tmp_path):
    run_loop(tmp_path, CYCLES, timeout=300)  # half a minute of work on an idle machine
    found = results(tmp_path)
    early, late = max(found["grown"][:50]), max(found["grown"][-50:])
    assert late - early < 8 << 20, f"{(late - early) >> 20} MiB in 150 snapshots of about 1 MiB each"
    assert found["kept"] < (1 << 18) + 65536, "the limit holds"
    assert found["threads"] == 0


def test_nothing_is_left_of_a_snapshot_but_its_files(tmp_path):
    """No thread and no change of the environment. Inductor, which torch's own profiler imports, is not loaded."""
    done = run_loop(
        tmp_path,
        """
        from telemetry.util import threads as own_threads
        agent, before = start(), dict(os.environ)
        loop(recorded)
        assert "telemetry-export" not in own_threads.running()
        telemetry.stop()
        assert dict(os.environ) == before
        assert own_threads.running() in ([], ["telemetry-nvml"])
        assert "torch._inductor" not in sys.modules
        """,
    )
    assert done.stdout == ""


def test_a_folder_that_cannot_be_used_is_told_and_takes_no_requests(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "snapshots").touch()
    run_loop(
        tmp_path,
        """
        agent = start(log_interval_seconds=0.1)
        assert telemetry.request_snapshot() is False
        loop(lambda: agent.accounting.stats.steps > 20)
        telemetry.stop()
        """,
    )
    assert [line["source"] for line in events(tmp_path / "run", "error")].count("snapshot") == 1


def test_training_on_another_thread_is_left_alone(tmp_path):
    """Kineto would write a line to stderr."""
    run_loop(
        tmp_path,
        """
        def train():
            global agent
            agent = start()
            loop(lambda: agent.snapshots.counts["refused"])
            telemetry.stop()

        on_thread(train)
        """,
    )
    (line,) = snapshot_lines(tmp_path)
    assert (line["result"], "main thread" in line["why"]) == ("refused", True)


def test_a_run_that_stays_slower_after_a_snapshot_takes_no_more(tmp_path):
    run_loop(
        tmp_path,
        """
        agent = start(log_interval_seconds=0.1)
        began, asked, again = time.monotonic(), False, False
        for step, _ in enumerate(DataLoader(Ones(), batch_size=4)):
            time.sleep(0.02 if recorded() else 0.01)
            if not asked and time.monotonic() - began > 3:
                asked = telemetry.request_snapshot()
            if not again and agent.snapshots._trigger.off:
                again = telemetry.request_snapshot()
            if agent.snapshots.counts["refused"] or time.monotonic() - began > 60:
                break
        telemetry.stop()
        """,
    )
    recorded, refused = snapshot_lines(tmp_path)
    assert (recorded["result"], refused["result"]) == ("recorded", "refused")
    assert "slower after a snapshot" in refused["why"]
    told = [line["message"] for line in events(tmp_path / "run", "error") if line["source"] == "snapshot"]
    assert told == [refused["why"]]


# -- how a run ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["telemetry.stop()", "pass", "os._exit(3)", "raise SystemExit(3)"])
def test_a_run_that_ends_during_a_recording(tmp_path, ending):
    run_loop(
        tmp_path,
        f"""
        from telemetry.agent import agent as agent_thread
        agent_thread._STOP_SECONDS = 100.0  # to finish what it does, however busy the machine is
        agent = start(snapshot_max_seconds=600)
        loop(recording, steps=50)
        {ending}
        """,
        status=3 if "3" in ending else 0,
    )
    published = list(tmp_path.glob("run/snapshots/request-step*/*.gz"))
    assert len(published) == ("_exit" not in ending)
    assert all(whole(path) for path in published)
    assert not list(tmp_path.rglob(".partial-*"))


def test_a_run_stopped_by_another_thread_during_a_recording(tmp_path):
    run_loop(
        tmp_path,
        """
        agent = start(snapshot_max_seconds=600)
        loop(recording, steps=50)
        thread = threading.Thread(target=telemetry.stop)
        thread.start()
        loop(lambda: not thread.is_alive())
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
        agent = start(snapshot_max_seconds=600)
        loop(recording, steps=50)
        on_thread(telemetry.stop)
        assert torch.autograd._profiler_enabled(), "it is still on: nobody else may end it"
        if sys.argv[1] == "loop":
            loop(lambda: not torch.autograd._profiler_enabled())
            assert not hasattr(torch.utils.data.dataloader._BaseDataLoaderIter.__next__, "__wrapped__")
        """,
        then,
    )


@pytest.mark.parametrize("then", ["loop", "exit"])
def test_a_profiler_on_another_thread_does_not_wait_for_ever(tmp_path, then):
    """The training thread ends no step meanwhile. So the user's profiler starts first, and ours ends after that."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
        pytest.skip("before torch 2.13 theirs fails after the wait")
    run_loop(
        tmp_path,
        """
        from telemetry.snapshot import capture
        capture._GIVE_WAY_SECONDS = 0.05


        def theirs():
            with profile(activities=[ProfilerActivity.CPU]) as prof:
                torch.ones(3).sum()
            found.append("aten::sum" in [event.name for event in prof.events()])


        agent, found = start(snapshot_max_seconds=600), []
        loop(recording, steps=50)
        on_thread(theirs)
        assert torch.autograd._profiler_enabled()
        if sys.argv[1] == "loop":
            loop(lambda: not torch.autograd._profiler_enabled())
            theirs()
            while not agent.snapshots.counts["failed"]:
                agent._thread.join(0.01)
            telemetry.stop()
        assert all(found)
        """,
        then,
        says="disableProfiler called but no active profiling session found",
    )


# -- the thread that exports ---------------------------------------------------------------------------------------

REFUSE = """
from telemetry.util import threads as own_threads


def refuse(*_):
    raise RuntimeError("can't create new thread at interpreter shutdown")


"""


def test_a_recording_cut_short_by_the_exit_needs_no_new_thread(tmp_path):
    run_loop(
        tmp_path,
        REFUSE
        + """
agent = start(snapshot_max_seconds=600)
loop(recording, steps=50)
own_threads.start_new_thread = refuse  # as Python 3.12 does once the script has come to its end
""",
    )
    (line,) = snapshot_lines(tmp_path)
    assert line["result"] == "recorded"
    assert whole(tmp_path / "run" / line["path"])
    assert events(tmp_path / "run", "run_end"), "it does not hold up the end"


def test_without_a_thread_there_is_no_recording_and_the_next_one_is_made(tmp_path):
    done = run_loop(
        tmp_path,
        REFUSE
        + """
agent = start()
real, own_threads.start_new_thread = own_threads.start_new_thread, refuse
loop(lambda: agent.snapshots.counts["refused"])
own_threads.start_new_thread = real
loop(recorded)
telemetry.stop()
print(own_threads.running())
""",
    )
    assert done.stdout == "[]\n"
    refused, recorded = snapshot_lines(tmp_path)
    assert (refused["result"], recorded["result"]) == ("refused", "recorded")
    assert "no thread to save it" in refused["why"]


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_from_another_shell(tmp_path):
    body = """
agent = start()
print("on", flush=True)
loop(lambda: os.path.exists("stop"))
"""
    with WarmChild(write(tmp_path, "script.py", LOOP + body), cwd=tmp_path) as child:
        child.line()
        wait_for(lambda: list(tmp_path.glob("run/snapshots/request-step*/*.gz")), "the first trace")
        done = python("-m", "telemetry", "snapshot", "run", "--steps", "3", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert whole(tmp_path / done.stdout.split(": ")[-1].strip())
        nobody = python("-m", "telemetry", "snapshot", "run", "--rank", "7", "--timeout", "1", cwd=tmp_path)
        assert (nobody.returncode, nobody.stdout) == (1, "")
        assert "rank 7 does not answer" in nobody.stderr
        (tmp_path / "stop").touch()
        child.wait()
    ended = python("-m", "telemetry", "snapshot", "run", cwd=tmp_path)
    assert (ended.returncode, "has ended" in ended.stderr) == (1, True)
    assert os.listdir(tmp_path / "run" / "snapshots" / ".meeting") != ["request.json"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nowhere"], 1, "not a run folder"),
        (["nowhere", "--rank", "first"], 2, "all, or the number"),
        (["nowhere", "--steps", "0"], 2, "from 1 to 50"),
        (["nowhere", "--timeout", "soon"], 2, "seconds"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, arguments, status, words):
    done = python("-m", "telemetry", "snapshot", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


# -- Kineto's lines ------------------------------------------------------------------------------------------------


def test_kineto_s_two_lines_are_all_that_a_snapshot_says(tmp_path):
    """Only ``KINETO_LOG_LEVEL`` silences them, which all tests have set."""
    env = environment()
    del env["KINETO_LOG_LEVEL"]
    done = python("-c", LOOP + "\nagent = start()\nloop(recorded)\ntelemetry.stop()\n", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "gpuGetDeviceCount" not in line]  # once, if there is no GPU
    assert [line.split()[-1] for line in said] in ([], ["profiler_start", "profiler_stop"])
