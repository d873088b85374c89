"""Snapshots when the worst happens: a kill, a full disk, a hundred of them, and nothing on stderr."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys

import pytest

from faults.processes import environment, events, python, results, run_script, wait_for, write

LOOP = """
import os, sys, torch, telemetry
from torch.utils.data import DataLoader


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return torch.ones(4)


def loop(agent, until, steps=2):
    telemetry.request_snapshot(steps=steps)
    for batch in DataLoader(Numbers(), batch_size=4):
        torch.nn.functional.relu(batch * 2).sum()
        if until():
            return


def recording(agent):
    capture, plan = agent.snapshots._capture, agent.snapshots._capture._plan
    return plan is not None and capture._ended > plan.first_step


def start(**settings):
    return telemetry.start("run", start_line=False, interval_seconds=0.1, **settings)
"""

STAGES = ("saving", "begun", "saved", "compressing", "compressed", "verified", "published")

KILLED = """
import os, signal, sys
from loop import loop, start
from telemetry.snapshot import outcome, store

stage = sys.argv[1]
kill = lambda reached: reached == stage and os.kill(os.getpid(), signal.SIGKILL)
keep, save = store.Keeper.keep, outcome.Trace.save
store.Keeper.keep = lambda self, trace, folder, name, more: keep(self, trace, folder, name, more=more, reached=kill)
outcome.Trace.save = lambda self, path: (save(self, path), kill("saving"))[0]
agent = start()
loop(agent, lambda: agent.snapshots.counts["failed"])
"""


def whole(path) -> bool:
    return bool(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def partial(folder) -> list[str]:
    return [str(path) for path in folder.rglob(".partial-*")]


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_any_stage_publishes_whole_files_only_and_leaves_nothing_for_long(tmp_path, stage):
    write(tmp_path, "loop.py", LOOP)
    script = write(tmp_path, "killed.py", KILLED)
    env = environment(TMPDIR=str(tmp_path))
    assert python(script, stage, cwd=tmp_path, env=env).returncode == -9
    published = list(tmp_path.glob("run/snapshots/request-step*/*.gz"))
    assert len(published) == (stage == "published")
    assert all(whole(path) for path in published)
    again = run_script(
        """
        import json, os, glob
        import telemetry
        before = glob.glob("run/snapshots/.partial-*") + glob.glob("/dev/shm/torch-telemetry-*/.partial-*")
        agent = telemetry.start("run", start_line=False)
        after = glob.glob("run/snapshots/.partial-*") + glob.glob("/dev/shm/torch-telemetry-*/.partial-*")
        telemetry.stop()
        with open("results.json", "w") as file:
            json.dump({"before": before, "after": after}, file)
        """,
        tmp_path,
        env=env,
    )
    found = results(tmp_path)
    assert found["before"], "the kill came before it had cleared up"
    assert found["after"] == []
    assert again.stderr == ""


FULL = """
import json, os
from pathlib import Path
from telemetry.snapshot import space, store

space.RESERVE_BYTES = -(1 << 40)  # not to be stopped by the look at the free space beforehand
store._PROBE_BYTES = 1
here = Path("full/run/snapshots")
content = b'{"traceEvents": [' + b",".join(b'"%s"' % os.urandom(30).hex().encode() for _ in range(600)) + b"]}"


class Trace:
    def most_bytes(self):
        return len(content)

    def save(self, path):
        path.write_bytes(content)
        return 0.0

    def free(self):
        return 0.0


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
for shared in (Path("shared"), None):
    for pages in range(40):
        fill(pages)
        keeper = store.Keeper(here, shared, "node-1-1", 1 << 20, 1 << 20)
        try:
            keeper.keep(Trace(), "request-step5", "rank-0.gz")
            outcomes.append("kept")
        except (OSError, store.StoreError) as error:
            outcomes.append(type(error).__name__)
        filler.unlink()
        files = [str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()]
        assert files == (["request-step5/rank-0.gz"] if outcomes[-1] == "kept" else []), (pages, outcomes[-1], files)
        assert not [name for name in os.listdir(here) if name.startswith(".partial")] if here.exists() else True
        for name in os.listdir(here) if here.exists() else ():
            with store.open_folder(here) as folder:
                folder.remove(name)
with open("results.json", "w") as file:
    json.dump(outcomes, file)
"""


def test_a_disk_that_is_full_at_any_stage(tmp_path):
    """A file system of its own, filled up to so many free pages that the trace fails at each point on its way."""
    (tmp_path / "full").mkdir()
    (tmp_path / "shared").mkdir(mode=0o700)
    script = write(tmp_path, "full.py", FULL)
    mount = f"mount -t tmpfs -o size=512k,mode=700 none full && exec {sys.executable} {script}"
    namespace = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("a file system of one's own needs mount namespaces")
    done = subprocess.run(
        [*namespace, "sh", "-c", mount], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    outcomes = results(tmp_path)
    assert outcomes[0] != "kept"
    assert outcomes[39] == "kept"
    assert {"OSError", "kept"} <= set(outcomes)


def test_no_room_is_seen_beforehand_and_told(tmp_path):
    write(tmp_path, "loop.py", LOOP)
    done = run_script(
        """
        from loop import loop, start
        from telemetry.snapshot import space
        space.RESERVE_BYTES = 1 << 60
        agent = start()
        loop(agent, lambda: sum(agent.snapshots.counts.values()))
        telemetry = __import__("telemetry"); telemetry.stop()
        """,
        tmp_path,
    )
    (line,) = events(tmp_path / "run", "snapshot")
    assert (line["result"], line["path"]) == ("failed", None)
    assert "no room" in line["why"]
    assert done.stderr == ""


CYCLES = """
import json, os, threading
from pathlib import Path
import torch
from torch import nn
from telemetry.attach.attachment import Attachment
from telemetry.attach.ring import Ring
from telemetry.attach.steps import StepTracker
from telemetry.publish.board import board_root
from telemetry.snapshot import plan as p
from telemetry.snapshot.capture import Capture
from telemetry.snapshot.store import Keeper
from loop import Numbers
from torch.utils.data import DataLoader

tracker = StepTracker(Ring())
attachment = Attachment(tracker, print)
attachment.attach()
capture = Capture(tracker, profilers=attachment.profilers, most_seconds=9,
                  about={"rank": 0, "world_size": 1})
keeper = Keeper(Path("run/snapshots"), Path("shared"), "node-1-1", 1 << 28, 1 << 18)
os.mkdir("shared", 0o700)
layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
iterator = iter(DataLoader(Numbers(), batch_size=4))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


grown, names = [], threading.active_count()
for cycle in range(220):
    now = tracker.ring.closed
    request = p.Request("1700000000000-a", p.API, p.REQUEST, None, 3, "a test")
    capture.arm(p.Plan(request, None, now + 3, now + 5, (0,), f"request-step{now + 3}", 1))
    for _ in range(8):
        layers(next(iterator)).sum().backward()
    tracker.ring.drain(1 << 20)
    outcome = capture.take()
    assert outcome.result == "recorded", outcome
    keeper.keep(outcome.trace, outcome.plan.folder, "rank-0.gz")
    del outcome
    if cycle >= 19:
        grown.append(resident())
kept = sum(path.stat().st_size for path in Path("run/snapshots").rglob("*"))
with open("results.json", "w") as file:
    json.dump({"grown": grown, "kept": kept, "threads": threading.active_count() - names,
               "files": len(os.listdir("/proc/self/fd"))}, file)
"""


def test_two_hundred_snapshots_leave_no_memory_behind(tmp_path):
    write(tmp_path, "loop.py", LOOP)
    done = run_script(CYCLES, tmp_path)
    found = results(tmp_path)
    grown = found["grown"]
    early, late = max(grown[:50]), max(grown[-50:])
    assert late - early < 8 << 20, f"{(late - early) >> 20} MiB in 150 snapshots of about 1 MiB each"
    assert found["kept"] < (1 << 18) + 65536, "the budget holds"
    assert found["threads"] == 0
    assert done.stderr == ""


def test_nothing_on_stderr_and_no_thread_left(tmp_path):
    write(tmp_path, "loop.py", LOOP)
    done = run_script(
        """
        import os, json, threading
        from loop import loop, start
        import telemetry
        agent = start()
        before = dict(os.environ)
        loop(agent, lambda: agent.snapshots.counts["recorded"])
        threads = [t.name for t in threading.enumerate()]
        telemetry.stop()
        assert dict(os.environ) == before
        with open("results.json", "w") as file:
            json.dump({"threads": threads, "left": [t.name for t in threading.enumerate()]}, file)
        """,
        tmp_path,
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert "telemetry-export" not in results(tmp_path)["threads"]


def test_inductor_is_not_loaded_for_it(tmp_path):
    """Torch's own way to prepare a profile imports all of it, on the training thread."""
    write(tmp_path, "loop.py", LOOP)
    run_script(
        """
        import sys
        from loop import loop, start
        import telemetry
        before = set(sys.modules)
        agent = start()
        loop(agent, lambda: agent.snapshots.counts["recorded"])
        telemetry.stop()
        assert "torch._inductor" not in sys.modules
        """,
        tmp_path,
    )


@pytest.mark.parametrize("ending", ["telemetry.stop()", "pass", "os._exit(3)", "raise SystemExit(3)"])
def test_a_run_that_ends_in_the_middle_of_a_recording(tmp_path, ending):
    write(tmp_path, "loop.py", LOOP)
    script = write(
        tmp_path,
        "script.py",
        f"""
        import os
        from loop import loop, recording, start
        import telemetry
        agent = start(snapshot_max_seconds=600)
        loop(agent, lambda: recording(agent), steps=50)
        {ending}
        """,
    )
    done = python(script, cwd=tmp_path)
    assert done.returncode == (3 if "3" in ending else 0)
    assert done.stderr == ""
    published = list(tmp_path.glob("run/snapshots/request-step*/*.gz"))
    assert len(published) == ("_exit" not in ending)
    assert all(whole(path) for path in published)
    assert partial(tmp_path) == []


def test_a_run_that_is_stopped_by_another_thread_in_the_middle_of_a_recording(tmp_path):
    write(tmp_path, "loop.py", LOOP)
    done = run_script(
        """
        import threading
        from loop import loop, recording, start
        import telemetry
        agent = start(snapshot_max_seconds=600)
        loop(agent, lambda: recording(agent), steps=50)
        over = threading.Event()
        thread = threading.Thread(target=lambda: (telemetry.stop(), over.set()))
        thread.start()
        loop(agent, over.is_set)
        thread.join()
        """,
        tmp_path,
    )
    (line,) = events(tmp_path / "run", "snapshot")
    assert (line["result"], line["why"]) == ("recorded", "cut short: the end of the run")
    assert done.stderr == ""


def test_a_folder_that_is_another_s_is_left_alone_and_told(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "run" / "snapshots").symlink_to(tmp_path / "elsewhere")
    write(tmp_path, "loop.py", LOOP)
    run_script(
        """
        from loop import loop, start
        import telemetry
        agent = start(log_interval_seconds=0.1)
        assert telemetry.request_snapshot() is False
        while not agent.accounts.stats.steps > 20:
            loop(agent, lambda: agent.accounts.stats.steps > 20)
        telemetry.stop()
        """,
        tmp_path,
    )
    assert os.listdir(tmp_path / "elsewhere") == []
    assert [line["source"] for line in events(tmp_path / "run", "error") if line["source"] == "snapshot"] == [
        "snapshot"
    ]


def test_the_command_from_another_shell(tmp_path):
    write(tmp_path, "loop.py", LOOP)
    script = write(
        tmp_path,
        "script.py",
        """
        import os
        from loop import loop, start
        import telemetry
        agent = start()
        print("on", flush=True)
        loop(agent, lambda: os.path.exists("stop"))
        """,
    )
    from faults.processes import Child

    with Child(script, cwd=tmp_path) as child:
        child.line()
        wait_for(lambda: list(tmp_path.glob("run/snapshots/request-step*/*.gz")), "the first trace")
        done = python("-m", "telemetry", "snapshot", "run", "--steps", "3", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        path = done.stdout.split(": ")[-1].strip()
        assert whole(tmp_path / path)
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
        (["nowhere"], 1, "no run folder"),
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


def test_training_on_another_thread_is_left_alone(tmp_path):
    """Kineto would write a line to stderr."""
    write(tmp_path, "loop.py", LOOP)
    done = run_script(
        """
        import threading
        from loop import loop, start
        import telemetry

        def train():
            agent = start()
            loop(agent, lambda: sum(agent.snapshots.counts.values()))
            telemetry.stop()

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        """,
        tmp_path,
    )
    (line,) = events(tmp_path / "run", "snapshot")
    assert (line["result"], "main thread" in line["why"]) == ("refused", True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("then", ["loop", "exit"])
def test_a_profiler_on_another_thread_does_not_wait_for_ever(tmp_path, then):
    """The training thread does not come by: theirs begins, and ours is ended only after it."""
    write(tmp_path, "loop.py", LOOP)
    script = write(
        tmp_path,
        "script.py",
        f"""
        import threading, torch
        from torch.profiler import ProfilerActivity, profile
        from loop import loop, recording, start
        import telemetry
        from telemetry.snapshot import capture
        capture._GIVE_WAY_SECONDS = 0.05
        agent = start(snapshot_max_seconds=600)
        loop(agent, lambda: recording(agent), steps=50)
        found = []

        def theirs():
            with profile(activities=[ProfilerActivity.CPU]) as prof:
                torch.ones(3).sum()
            found.extend(event.name for event in prof.events())

        thread = threading.Thread(target=theirs)
        thread.start()
        thread.join()
        assert "aten::sum" in found
        assert torch.autograd._profiler_enabled()
        if "{then}" == "loop":
            loop(agent, lambda: not torch.autograd._profiler_enabled())
            with profile(activities=[ProfilerActivity.CPU]) as prof:
                torch.ones(3).sum()
            assert "aten::sum" in [event.name for event in prof.events()]
            while not agent.snapshots.counts["failed"]:
                agent._wake.wait(0.01)
            telemetry.stop()
        """,
    )
    done = python(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_run_that_is_stopped_while_its_training_thread_does_not_come_by(tmp_path):
    """The session is ended when it does, the hooks go then, and the exit is a clean one."""
    write(tmp_path, "loop.py", LOOP)
    done = run_script(
        """
        import threading, torch
        from loop import loop, recording, start
        import telemetry
        agent = start(snapshot_max_seconds=600)
        loop(agent, lambda: recording(agent), steps=50)
        thread = threading.Thread(target=telemetry.stop)
        thread.start()
        thread.join()
        assert torch.autograd._profiler_enabled(), "it is still on: nobody else may end it"
        assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__.__module__ == "torch.utils.data.dataloader"
        loop(agent, lambda: not torch.autograd._profiler_enabled())
        assert not hasattr(torch.utils.data.dataloader._BaseDataLoaderIter.__next__, "__wrapped__")
        """,
        tmp_path,
    )
    assert done.stderr == ""


def test_an_exit_with_a_session_that_nobody_could_end_before(tmp_path):
    write(tmp_path, "loop.py", LOOP)
    done = run_script(
        """
        import threading, torch
        from loop import loop, recording, start
        import telemetry
        agent = start(snapshot_max_seconds=600)
        loop(agent, lambda: recording(agent), steps=50)
        thread = threading.Thread(target=telemetry.stop)
        thread.start()
        thread.join()
        assert torch.autograd._profiler_enabled()
        """,
        tmp_path,
    )
    assert done.stderr == ""


def test_a_run_that_stays_slower_after_a_snapshot_takes_no_more(tmp_path):
    write(tmp_path, "loop.py", LOOP)
    run_script(
        """
        import time
        from loop import Numbers, start
        from torch.utils.data import DataLoader
        import telemetry
        agent = start(log_interval_seconds=0.1)
        began, asked, again = time.monotonic(), False, False
        for step, _ in enumerate(DataLoader(Numbers(), batch_size=4)):
            time.sleep(0.02 if agent.snapshots.counts["recorded"] else 0.01)
            if not asked and time.monotonic() - began > 3:
                asked = telemetry.request_snapshot()
            if not again and agent.snapshots._trigger.off:
                again = telemetry.request_snapshot()
            if agent.snapshots.counts["refused"] or time.monotonic() - began > 60:
                break
        telemetry.stop()
        """,
        tmp_path,
    )
    recorded, refused = events(tmp_path / "run", "snapshot")
    assert (recorded["result"], refused["result"]) == ("recorded", "refused")
    assert "slower after a snapshot" in refused["why"]
    assert [line["message"] for line in events(tmp_path / "run", "error") if line["source"] == "snapshot"] == [
        refused["why"]
    ]
