"""Signals end the process, raise in its handlers and are awaited as without the agent, whatever a thread of ours does."""

from __future__ import annotations

import functools
import io
import os
import signal
import socket
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from telemetry.safety.threads import OwnThread
from tests.data_sets import Numbers
from tests.faults.processes import (
    HANG,
    RUN,
    Child,
    both,
    events,
    quiet,
    report,
    run,
    wait_for,
    with_driver,
    write,
)


class Notice(Exception):
    """What the signal handlers here raise."""


def notify(_signum, _frame):
    raise Notice


# -- from outside --------------------------------------------------------------------------------------------------

LOOP = """
    import select, sys, telemetry
    with telemetry.phase("evaluation"):
        pass
    for number, _ in enumerate(telemetry.watch(iter(int, 1))):
        with telemetry.step():
            if number == 500:
                print("steps", flush=True)
                while not select.select([sys.stdin], [], [], 0.1)[0]:
                    pass  # a signal that comes right before a system call waits for its end
                sys.stdin.readline()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_the_run_as_it_would_without_us(signum, tmp_path, request):
    if signum == signal.SIGHUP:  # ignored if the tests run under nohup, and child processes inherit that
        request.addfinalizer(functools.partial(signal.signal, signum, signal.signal(signum, signal.SIG_DFL)))
    script, told = write(tmp_path, "script.py", LOOP), []
    for under in ((), RUN):
        with Child(*under, script, cwd=tmp_path, env=quiet()) as child:
            assert child.line() == "steps"
            if under:
                windows = functools.partial(events, tmp_path / "run", "window", running=True)
                wait_for(lambda: any(line["steps_total"] > 400 for line in windows()), "a window with the steps")
            child.send(signum)
            assert child.wait() == -signum
            assert child.process.stdout.read() == ""
            told.append(child.stderr)
    if signum == signal.SIGINT:  # the statement that it interrupts is random
        assert not [text for text in told if f"{os.sep}telemetry{os.sep}" in text]
        told = [text.splitlines()[-1] for text in told]
    assert told[0] == told[1]
    (rank,) = report(tmp_path / "run")["ranks"]
    assert rank["steps"] > 400
    assert sum(rank["ledger"].values()) == pytest.approx(rank["wall_seconds"], abs=1e-4)
    assert bool(events(tmp_path / "run", "run_end")) is (signum == signal.SIGINT)


def test_a_signal_awaited_with_sigwait_is_not_taken_by_a_thread_of_ours(tmp_path):
    """The mask is set after the start. The signal would kill the process if a thread had not blocked it."""
    source = """
        import signal, sys, telemetry
        telemetry.start("run")
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM])
        for _ in range(2):
            print("ready", flush=True)
            sys.stdin.readline()  # the signal comes now, and is pending
            print(signal.Signals(signal.sigwait([signal.SIGUSR1, signal.SIGTERM])).name, flush=True)
        """
    env = with_driver(tmp_path)  # with a driver there is a third thread
    with Child(write(tmp_path, "script.py", source), cwd=tmp_path, env=env) as child:
        for signum in (signal.SIGUSR1, signal.SIGTERM):
            assert child.line() == "ready"
            child.send(signum)
            assert child.ask("go") == signum.name
        child.ends()


def test_a_scraper_that_hangs_up_ends_no_run_by_sigpipe(tmp_path):
    source = """
        import os, signal, sys, telemetry
        from tests.faults.inside import until
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        agent = telemetry.start("run")
        from telemetry.node import prometheus, server
        rendered, answer = prometheus.rendered, server._Request.do_GET
        def slow(*arguments, **named):
            print("asked", flush=True)
            until(lambda: os.path.exists("gone"))
            return rendered(*arguments, **named) + b"#" * (8 << 20)  # more than the buffers between us take
        def answering(self):
            try:
                answer(self)
            except BrokenPipeError as error:
                print(error.strerror, flush=True)
                raise
        prometheus.rendered, server._Request.do_GET = slow, answering
        print(agent.metrics_url, flush=True)
        sys.stdin.readline()
        """
    with Child(write(tmp_path, "script.py", source), cwd=tmp_path, env=quiet()) as child:
        port = int(child.line().split(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=HANG) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert child.line() == "asked"
        (tmp_path / "gone").touch()
        while child.line() != "Broken pipe":
            pass  # another client may have asked meanwhile
        child.tell()
        child.ends()


# -- handlers that raise -------------------------------------------------------------------------------------------

SIGNALS = """
    import ctypes, gc, random, signal, threading, time
    from tests.faults.inside import tell
    from torch.utils.data import DataLoader

    class Preempted(Exception): pass
    class OnTime(TimeoutError): pass

    def handler(signum, frame):
        raise random.choice([Preempted, OnTime])
    signal.signal(signal.SIGALRM, handler)

    class Cycle:
        def __init__(self): self.me = self

    loader = DataLoader(range(1000), batch_size=1)

    def collections():
        [Cycle() for _ in range(100)]
        gc.collect()

    def iterators():
        it = iter(loader)
        next(it), next(it)
        del it

    def batches():
        for _ in loader: pass

    def throw():
        while not begun: time.sleep(0.0005)  # not in the middle of the thread's start, which takes it badly
        time.sleep(random.random() * 0.003)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(Preempted))

    random.seed(1)
    main, found = ctypes.c_ulong(threading.get_ident()), []
    for work, times in ((collections, 20), (iterators, 300), (batches, 100)):
        for thrown in (False, True):
            seen = 0
            for _ in range(times):
                deadline, begun = time.monotonic() + 1, []
                try:
                    if thrown:
                        threading.Thread(target=throw).start()
                        begun.append(True)
                    else:
                        signal.setitimer(signal.ITIMER_REAL, 0.0001 + random.random() * 0.003)
                    while time.monotonic() < deadline:
                        work()
                except (Preempted, OnTime):
                    seen += 1
            found.append(seen)
    tell(found)
"""


def test_each_exception_of_a_signal_handler_reaches_the_script(tmp_path):
    """Torch itself drops one in some hundred batches, in a C call that fails with another error."""
    bare, ours = (run(tmp_path, SIGNALS, under=under, err=None) for under in ((), RUN))
    assert ours[0] == bare[0] == 20
    assert all(with_us >= 0.97 * without for with_us, without in zip(ours, bare, strict=True)), (ours, bare)


INTERRUPTED = """
    import gc, signal
    from torch.utils.data import DataLoader

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    heap = [[] for _ in range(1_000_000)]  # a collection takes some 100 ms
    for _ in DataLoader(range(3), batch_size=1):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        gc.collect()
        for _ in range(1000): pass
    print("trained on")
"""


def test_ctrl_c_in_a_collection_ends_the_run(tmp_path):
    bare, ours, _ = both(tmp_path, write(tmp_path, "script.py", INTERRUPTED))
    assert bare.code == ours.code == -signal.SIGINT
    assert "trained on" not in ours.out


@pytest.mark.parametrize("inside", ["push", "delivered", "failed", "iterated"])
def test_ctrl_c_inside_a_hook_passes_and_nothing_sticks(inside, start, monkeypatch):
    """A signal can come at any bytecode, including the agent's."""
    agent = start()
    owner = type(agent.tracker.ring if inside == "push" else agent.tracker)
    with monkeypatch.context() as patch:
        patch.setattr(owner, inside, lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            list(DataLoader(Numbers(12), batch_size=2))
    assert agent.tracker.waiting_since == 0
    before = agent.tracker.ring.head
    list(DataLoader(Numbers(12), batch_size=2))
    assert agent.tracker.ring.head > before
    assert "hook" not in agent.errors.counts


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

            sys.setprofile(interrupt)
            try:
                act()
            except Notice:
                pass
            finally:
                sys.setprofile(None)
            if len(calls) < number:
                return number - 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    raise AssertionError("there is no end of calls")


def test_a_phase_and_a_wait_that_a_signal_handler_interrupts_are_over(start):
    """Also where an epoch begins and ends. Otherwise all later waits would pass for a part of it."""
    agent, loader = start(), DataLoader(range(3), batch_size=1)

    def save():
        assert not agent.tracker.in_phase
        torch.save({}, io.BytesIO())

    def epoch():
        assert not agent.tracker.waiting_since
        list(loader)

    assert interrupted_at_each_call(save, {"tracker.py"}) > 2
    assert not agent.tracker.in_phase

    assert interrupted_at_each_call(epoch, {"dataloader.py", "importlib._bootstrap"}) > 20
    assert not agent.tracker.waiting_since


# -- while a thread of ours starts, works or ends ------------------------------------------------------------------


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


STOPPED = """
    import os, signal, sys
    class Notice(Exception): pass
    def notify(signum, frame):
        raise Notice
    signal.signal(signal.SIGTERM, notify)
    def interrupt(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_name == sys.argv[1] and f"{os.sep}telemetry{os.sep}" in code.co_filename:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGTERM)
    sys.setprofile(interrupt)
"""


@pytest.mark.parametrize("inside", ["stop", "join"])
def test_a_signal_while_the_agent_stops(inside, tmp_path):
    """Nobody catches its exception at the exit: it is not printed."""
    run(tmp_path, STOPPED, inside, under=RUN)
    assert len(events(tmp_path / "run", "run_end")) == 1
