"""What a script sees if a signal, or a look at the garbage collector, meets a thread of ours that starts, works or ends."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from faults.processes import RUN, events, python, without_start_line, write
from telemetry.util.threads import OwnThread


class Notice(Exception):
    """What the signal handlers here raise."""


def notify(_signum, _frame):
    raise Notice


def test_the_script_s_threshold_is_its_own_while_a_thread_of_ours_works():
    before, over = gc.get_threshold(), threading.Event()
    thread = OwnThread(over.wait, name="telemetry-test")
    thread.start()
    try:
        seen = gc.get_threshold()
    finally:
        over.set()
        thread.join()
    gc.set_threshold(*seen)
    assert seen == gc.get_threshold() == before


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_handler_that_raises_as_a_thread_starts_blocks_no_signal(number):
    """Python runs handlers after a call, also while this thread blocks the signal: another thread may have taken it."""
    calls = []

    def interrupt(_frame, event, function):
        if event == "c_return" and function.__name__ == "pthread_sigmask":
            calls.append(function)
            if len(calls) == number:
                sys.setprofile(None)
                raise Notice

    ours = OwnThread(int, name="telemetry-test")
    try:
        sys.setprofile(interrupt)
        with pytest.raises(Notice):
            ours.start()
    finally:
        sys.setprofile(None)
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    assert blocked == set()


INTERRUPTED = """
    import os, signal, sys, threading
    class Notice(Exception): pass
    def notify(signum, frame):
        raise Notice
    signal.signal(signal.SIGTERM, notify)
    def interrupt(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_name == sys.argv[2] and f"{os.sep}telemetry{os.sep}" in code.co_filename:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGTERM)
    sys.setprofile(interrupt)
    if sys.argv[1] == "exec":
        try:
            os.execv(sys.executable, [sys.executable, "-c", "print('executed')"])
        except Notice:
            print("noticed")
"""


@pytest.mark.parametrize("inside", ["stop", "join"])
@pytest.mark.parametrize("how", ["exec", "exit"])
def test_a_signal_while_the_agent_stops(how, inside, tmp_path):
    """Before an exec its exception reaches the script. At the exit nobody catches it: it is not printed."""
    write(tmp_path, "script.py", INTERRUPTED)
    done = python(*RUN, "script.py", how, inside, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("noticed\n" if how == "exec" else "")
    assert without_start_line(done.stderr)[0] == ""
    if how == "exit":
        assert len(events(tmp_path / "run", "run_end")) == 1


def interrupted_at_each_call(act, files) -> int:
    """Act once for each call of a function that code in these files makes, with a signal in it. Returns how many."""
    before = signal.signal(signal.SIGUSR1, notify)
    try:
        for number in range(1, 200):
            calls = []

            def interrupt(frame, event, _arg, calls=calls, number=number):
                caller = frame.f_back
                if event == "call" and caller is not None and os.path.basename(caller.f_code.co_filename) in files:
                    calls.append(frame)
                    if len(calls) == number:
                        sys.setprofile(None)
                        signal.raise_signal(signal.SIGUSR1)

            act(interrupt)
            if len(calls) < number:
                return number - 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    raise AssertionError("there is no end of calls")


def test_a_phase_that_a_signal_handler_interrupts_is_left(start):
    agent = start()

    def save(interrupt):
        sys.setprofile(interrupt)
        try:
            torch.save({}, io.BytesIO())
        except Notice:
            pass
        finally:
            sys.setprofile(None)
        assert not agent.tracker.in_phase

    assert interrupted_at_each_call(save, {"tracker.py"}) > 2
    telemetry.stop()


def test_a_wait_that_a_signal_handler_interrupts_is_over(start):
    """Also where an epoch begins and ends. Otherwise all later waits would pass for a part of it."""
    agent = start()
    loader = DataLoader(range(3), batch_size=1)

    def epoch(interrupt):
        sys.setprofile(interrupt)
        try:
            for _ in loader:
                pass
        except Notice:
            pass
        finally:
            sys.setprofile(None)
        assert not agent.tracker.waiting_since

    assert interrupted_at_each_call(epoch, {"dataloader.py", "importlib._bootstrap"}) > 20
    telemetry.stop()
