"""A run ends, or a profiler of the user's starts, during a recording."""

from __future__ import annotations

import pytest

from faults.processes import events, run_script, write
from faults.snapshot_scripts import LOOP, partial, whole
from telemetry.snapshot.session import starts_beside_ours
from tests.faults.warm_python import warm_python


@pytest.mark.parametrize("ending", ["telemetry.stop()", "pass", "os._exit(3)", "raise SystemExit(3)"])
def test_a_run_that_ends_during_a_recording(tmp_path, ending):
    write(tmp_path, "loop.py", LOOP)
    script = write(
        tmp_path,
        "script.py",
        f"""
        import os
        from loop import loop, recording, start
        import telemetry
        from telemetry.agent import agent as agent_thread
        agent_thread._STOP_SECONDS = 100.0  # to finish what it does, however busy the machine is
        agent = start(snapshot_max_seconds=600)
        loop(agent, lambda: recording(agent), steps=50)
        {ending}
        """,
    )
    done = warm_python(script, cwd=tmp_path)
    assert done.returncode == (3 if "3" in ending else 0)
    assert done.stderr == ""
    published = list(tmp_path.glob("run/snapshots/request-step*/*.gz"))
    assert len(published) == ("_exit" not in ending)
    assert all(whole(path) for path in published)
    assert partial(tmp_path) == []


def test_a_run_stopped_by_another_thread_during_a_recording(tmp_path):
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
        run=warm_python,
    )
    (line,) = events(tmp_path / "run", "snapshot")
    assert (line["result"], line["why"]) == ("recorded", "cut short: the end of the run")
    assert done.stderr == ""


@pytest.mark.parametrize("then", ["loop", "exit"])
def test_a_profiler_on_another_thread_does_not_wait_for_ever(tmp_path, then):
    """The training thread ends no step meanwhile. So the user's profiler starts first, and ours ends after that."""
    pytest.importorskip("torch")  # the test depends on its version
    if not starts_beside_ours():
        pytest.skip("before torch 2.13 theirs would fail, so it waits")
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
                agent._thread.join(0.01)
            telemetry.stop()
        """,
    )
    done = warm_python(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_before_torch_2_13_it_waits_for_the_training_thread(tmp_path):
    """A profiler on another thread cannot start beside ours. It waits until ours has ended."""
    write(tmp_path, "loop.py", LOOP)
    run_script(
        """
        import itertools, threading, torch
        from torch.profiler import ProfilerActivity, profile
        from loop import loop, recording, start
        import telemetry
        from telemetry.snapshot import capture
        capture._GIVE_WAY_SECONDS, capture._TRIES_WHERE_THEIRS_WOULD_FAIL = 0.01, 100_000
        capture.starts_beside_ours = lambda: False
        asked, waits, end = threading.Event(), itertools.count(), capture.Capture.end

        def counted_end(self, why, seconds):
            if next(waits) == 10:
                asked.set()
            return end(self, why, seconds)

        capture.Capture.end = counted_end
        agent = start(snapshot_max_seconds=600)
        loop(agent, lambda: recording(agent), steps=50)
        found = []

        def theirs():
            with profile(activities=[ProfilerActivity.CPU]) as prof:
                torch.ones(3).sum()
            found.extend(event.name for event in prof.events())

        thread = threading.Thread(target=theirs)
        thread.start()
        assert asked.wait(60)
        assert not found
        loop(agent, lambda: not thread.is_alive())
        assert "aten::sum" in found
        telemetry.stop()
        """,
        tmp_path,
        run=warm_python,
    )
    (line,) = events(tmp_path / "run", "snapshot")
    assert (line["result"], line["why"]) == ("recorded", "cut short: a profiler of the script's own began")


def test_a_run_stopped_while_its_training_thread_is_busy(tmp_path):
    """The session and the hooks end when the training thread reaches a step boundary, and the exit is clean."""
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
        run=warm_python,
    )
    assert done.stderr == ""


def test_an_exit_with_a_session_that_could_not_be_ended(tmp_path):
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
        run=warm_python,
    )
    assert done.stderr == ""


def test_before_torch_2_13_it_gives_up_where_the_training_waits_for_it(tmp_path):
    """The training thread joins the one that starts a profiler, so it reaches no boundary."""
    write(tmp_path, "loop.py", LOOP)
    run_script(
        """
        import threading, torch
        from torch.profiler import ProfilerActivity, profile
        from loop import loop, recording, start
        import telemetry
        from telemetry.snapshot import capture
        capture._GIVE_WAY_SECONDS = 0.05
        capture.starts_beside_ours = lambda: False
        agent = start(snapshot_max_seconds=600)
        loop(agent, lambda: recording(agent), steps=50)

        def theirs():
            with profile(activities=[ProfilerActivity.CPU]):
                torch.ones(3).sum()

        thread = threading.Thread(target=theirs, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        telemetry.stop()
        """,
        tmp_path,
        run=warm_python,
    )
