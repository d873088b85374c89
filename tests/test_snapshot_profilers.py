"""A recording beside the user's own profilers: it never harms them, and a failure never reaches the training."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader

from telemetry.records import FAILED, RECORDED, REFUSED
from tests.data_sets import Numbers
from tests.snapshot_recording import mark, marks, train

CPU = [ProfilerActivity.CPU]


def user_marks(prof) -> list[str]:
    return sorted({e.name for e in prof.events() if e.name.startswith("work ")})


def wanted(*steps: int) -> list[str]:
    return sorted(f"work {step}" for step in steps)


def test_ours_is_refused_while_theirs_records(taken):
    taken.arm(4, 5)
    with profile(activities=CPU) as theirs:
        train(9)
    outcome = taken.outcome()
    assert outcome.result == REFUSED
    assert "profiler" in outcome.why
    assert user_marks(theirs) == wanted(*range(1, 10))


def test_ours_is_refused_while_theirs_warms_up(taken):
    taken.arm(4, 5)
    with profile(activities=CPU, schedule=schedule(wait=1, warmup=4, active=4, repeat=1)) as theirs:
        for step, _ in enumerate(DataLoader(Numbers(9)), 1):
            mark(step)
            theirs.step()
    assert taken.outcome().result == REFUSED
    assert user_marks(theirs) == wanted(6, 7, 8, 9)


def test_ours_may_record_while_theirs_waits(taken):
    traces = []
    taken.arm(2, 3)
    with profile(activities=CPU, schedule=schedule(wait=6, warmup=1, active=2), on_trace_ready=traces.append) as theirs:
        for step, _ in enumerate(DataLoader(Numbers(12)), 1):
            mark(step)
            theirs.step()
            if traces:
                break
    outcome = taken.outcome()
    assert marks(taken.events(outcome)) == [2, 3]
    assert user_marks(theirs) == wanted(8, 9)


def begin_torch():
    return profile(activities=CPU)


def begin_autograd():
    return autograd_profiler.profile(use_kineto=True)


def begin_low_level():
    return LowLevel(activities=CPU)


class LowLevel(torch.profiler._KinetoProfile):
    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@pytest.mark.parametrize("begin", [begin_torch, begin_autograd, begin_low_level])
@pytest.mark.parametrize("state", ["armed", "prepared", "recording"])
def test_theirs_that_begins_is_whole_and_ours_is_over_before(taken, begin, state):
    taken.arm({"armed": 9, "prepared": 4, "recording": 2}[state], 12)
    iterator = iter(DataLoader(Numbers(12)))
    for step in (1, 2, 3):
        next(iterator)
        mark(step)
    with begin() as theirs:
        for step in range(4, 11):
            mark(step)
            next(iterator)
    events = theirs.function_events if isinstance(theirs, autograd_profiler.profile) else theirs.events()
    assert sorted({e.name for e in events if e.name.startswith("work ")}) == wanted(*range(4, 11))
    outcome = taken.outcome()
    if state == "recording":
        assert (outcome.result, outcome.last_step) == (RECORDED, 2)
        assert "script's own" in outcome.why
        assert marks(taken.events(outcome)) == [2, 3]  # the step that was open is in it, too
    else:
        assert outcome.result == REFUSED


@pytest.mark.parametrize("state", ["prepared", "recording"])
def test_theirs_on_another_thread_waits_until_ours_has_ended(taken, state):
    """Two sessions on two threads crash the process, whichever stops last."""
    taken.arm(4 if state == "prepared" else 3, 12)
    iterator = iter(DataLoader(Numbers(12)))
    for step in (1, 2, 3):
        next(iterator)
        mark(step)
    found: list[str] = []

    def theirs() -> None:
        with profile(activities=CPU) as prof:
            mark(100)
        found.extend(user_marks(prof))

    thread = threading.Thread(target=theirs)
    thread.start()
    while taken.capture._asked is None:
        thread.join(0.01)
    next(iterator)
    thread.join(30)
    assert found == wanted(100)
    assert taken.outcome().result == (REFUSED if state == "prepared" else RECORDED)
    train(3)  # and nothing is broken for the next


def test_off_the_main_thread_ours_is_refused(taken):
    def run() -> None:
        taken.observed.tracker.thread = threading.get_ident()
        taken.arm(3, 4)
        train(8)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    outcome = taken.outcome()
    assert (outcome.result, "main thread" in outcome.why) == (REFUSED, True)


def test_nothing_begins_where_a_daemon_profiles(taken, monkeypatch):
    monkeypatch.setenv("KINETO_USE_DAEMON", "1")
    taken.arm(3, 4)
    train(8)
    outcome = taken.outcome()
    assert (outcome.result, "KINETO_USE_DAEMON" in outcome.why) == (REFUSED, True)


@pytest.mark.parametrize("where", ["_prepare_trace", "_start_trace", "__exit__"])
@pytest.mark.parametrize("error", [RuntimeError("kineto"), KeyboardInterrupt()])
def test_a_profiler_that_fails_does_not_fail_the_training(taken, monkeypatch, where, error):
    original = getattr(autograd_profiler.profile, where)

    def fail(self, *args):
        monkeypatch.setattr(autograd_profiler.profile, where, original)  # the clean-up does not fail too
        original(self, *args)
        raise error

    monkeypatch.setattr(autograd_profiler.profile, where, fail)
    taken.arm(3, 4)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            train(8)
    else:
        train(8)
    assert taken.outcome().result == FAILED
    assert not torch.autograd._profiler_enabled()
    with profile(activities=CPU) as theirs:
        mark(1)
    assert user_marks(theirs) == wanted(1)


def test_the_stop_makes_no_python_object_of_each_event(taken, monkeypatch):
    """Torch 2.4 would make them at once, on the training thread."""
    made = []
    monkeypatch.setattr(autograd_profiler.profile, "_parse_kineto_results", made.append)
    taken.arm(3, 4)
    train(8)
    assert taken.outcome().result == RECORDED
    assert not made
