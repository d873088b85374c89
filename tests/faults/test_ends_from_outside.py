"""Signals, broken pipes and hanging calls at the end of a run: the process ends as it would without the agent."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket

import pytest
from fakes import nvml

from faults.processes import (
    HANG,
    RUN,
    START_LINE,
    Child,
    environment,
    events,
    python,
    wait_for,
    without_start_line,
    write,
)

# -- ends from outside -------------------------------------------------------------------------------------------

LOOP = """
    import sys, telemetry
    print("ready", flush=True)
    def batches():
        while True:
            yield 1
    with telemetry.phase("evaluation"):
        pass
    for number, _ in enumerate(telemetry.watch(batches())):
        with telemetry.step():
            if number == 500:
                print("steps", flush=True)
                sys.stdin.readline()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_the_run_as_it_would_without_us(signum, tmp_path, request):
    if signum == signal.SIGHUP:  # ignored if the tests run under nohup, and child processes inherit that
        request.addfinalizer(functools.partial(signal.signal, signum, signal.signal(signum, signal.SIG_DFL)))
    write(tmp_path, "script.py", LOOP)
    codes, told = [], []
    for prefix in ((), (*RUN, "--log-interval-seconds", "0.1", "--interval-seconds", "0.1")):
        with Child(*prefix, "script.py", cwd=tmp_path) as child:
            assert [child.line(), child.line()] == ["ready", "steps"]
            if prefix:
                wait_for(
                    lambda: any(line["steps_total"] > 400 for line in events(tmp_path / "run", "window", running=True)),
                    "a window with the steps in the log",
                )
            os.kill(child.pid, signum)
            codes.append(child.wait())
            assert child.process.stdout.read() == ""
            told.append(without_start_line(child.stderr)[0])
    assert codes[0] == codes[1] == -signum
    if signum == signal.SIGINT:  # the statement that it interrupts is random
        assert not [text for text in told if f"{os.sep}telemetry{os.sep}" in text]
        told = [text.splitlines()[-1] for text in told]
    assert told[0] == told[1]

    report = python("-m", "telemetry", "report", "run", "--json", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    (rank,) = json.loads(report.stdout)["ranks"]
    assert rank["steps"] > 400
    assert sum(rank["ledger"].values()) == pytest.approx(rank["wall_seconds"], abs=1e-4)
    assert bool(events(tmp_path / "run", "run_end")) is (signum == signal.SIGINT)


def test_a_signal_awaited_with_sigwait_is_not_taken_by_a_thread_of_ours(tmp_path):
    """The mask is set after the start. The signal would kill the process if a thread had not blocked it."""
    source = """
        import os, signal, sys, telemetry
        telemetry.start("run", start_line=False)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM])
        for _ in range(2):
            print("ready", flush=True)
            sys.stdin.readline()  # the signal comes now, and is pending
            print(signal.Signals(signal.sigwait([signal.SIGUSR1, signal.SIGTERM])).name, flush=True)
        """
    fake = nvml.subprocess_environment(tmp_path)  # with a driver there is a third thread
    env = environment() | {"FAKE_NVML_STATE": fake["FAKE_NVML_STATE"]}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    with Child(write(tmp_path, "script.py", source), cwd=tmp_path, env=env) as child:
        for signum in (signal.SIGUSR1, signal.SIGTERM):
            assert child.line() == "ready"
            os.kill(child.pid, signum)
            child.tell()
            assert child.line() == signum.name
        assert child.wait() == 0
        assert child.stderr == ""


def test_every_thread_of_ours_has_the_signals_blocked(tmp_path):
    source = """
        import os, sys, telemetry
        telemetry.start("run", start_line=False)
        import fakes.nvml, pynvml, threading
        while not pynvml.nvmlLib.state.calls["nvmlInitWithFlags"]:
            threading.Event().wait(0.01)
        for task in os.listdir("/proc/self/task"):
            if int(task) != os.getpid():
                with open(f"/proc/self/task/{task}/status") as status:
                    print(next(line.split()[1] for line in status if line.startswith("SigBlk:")))
        """
    fake = nvml.subprocess_environment(tmp_path)
    env = environment() | {"FAKE_NVML_STATE": fake["FAKE_NVML_STATE"]}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    done = python(write(tmp_path, "script.py", source), cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    masks = [int(mask, 16) for mask in done.stdout.split()]
    assert len(masks) == 3
    for mask in masks:
        for signum in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGALRM", "SIGCHLD", "SIGPROF"):
            assert mask >> (getattr(signal, signum) - 1) & 1, signum
        assert not mask >> (signal.SIGSEGV - 1) & 1, "faulthandler is to see it"


def test_a_scraper_that_hangs_up_ends_no_run_by_sigpipe(tmp_path):
    source = """
        import os, signal, socket, sys, threading, telemetry
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        agent = telemetry.start("run", start_line=False)
        from telemetry.node import endpoint, prometheus
        rendered, send = prometheus.rendered, endpoint._Connection.send
        def slow(*arguments, **named):
            print("asked", flush=True)
            while not os.path.exists("gone"):
                threading.Event().wait(0.01)
            page = rendered(*arguments, **named)
            return page._replace(body=page.body + b"#" * (8 << 20))  # more than the buffers between us take
        def sending(self):
            try:
                send(self)
            except BrokenPipeError as error:
                print(error.strerror, flush=True)
                raise
        prometheus.rendered, endpoint._Connection.send = slow, sending
        print(agent.metrics_url, flush=True)
        sys.stdin.readline()
        """
    with Child(write(tmp_path, "script.py", source), cwd=tmp_path) as child:
        port = int(child.line().split(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=HANG) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert child.line() == "asked"
        (tmp_path / "gone").touch()
        while child.line() != "Broken pipe":
            pass  # another client may have asked meanwhile
        child.tell()
        assert child.wait() == 0
        assert child.stderr == ""


def test_the_exit_does_not_wait_for_clients_of_the_endpoint(tmp_path):
    source = """
        import sys, telemetry
        print(telemetry.start("run", start_line=False).metrics_url, flush=True)
        sys.stdin.readline()
        """
    with Child(write(tmp_path, "script.py", source), cwd=tmp_path) as child:
        port = int(child.line().split(":")[2].split("/")[0])
        clients = [socket.create_connection(("127.0.0.1", port), timeout=HANG) for _ in range(4)]
        clients[1].sendall(b"GET /metrics HT")
        clients[2].sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n")
        clients[3].sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
        child.tell()
        assert child.wait() == 0
        assert child.stderr == ""
        assert events(tmp_path / "run", "run_end")
        for client in clients:
            client.close()


def test_the_exit_does_not_wait_for_a_driver_that_hangs(tmp_path):
    source = """
        import sys, threading, telemetry
        telemetry.start("run", start_line=False, interval_seconds=0.1)
        import fakes.nvml, pynvml
        while not pynvml.nvmlLib.state.calls["nvmlInitWithFlags"]:
            threading.Event().wait(0.01)
        sys.exit(6)
        """
    fake = nvml.subprocess_environment(tmp_path, hang=("nvmlInitWithFlags",))
    env = environment() | {"FAKE_NVML_STATE": fake["FAKE_NVML_STATE"]}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    done = python(write(tmp_path, "script.py", source), cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (6, "", "")
    assert events(tmp_path / "run", "run_end")


@pytest.mark.parametrize("part", ["tick", "log", "board"])
def test_the_exit_does_not_wait_for_an_agent_that_hangs(part, tmp_path):
    """A file system hangs: the agent's thread is abandoned."""
    places = {
        "tick": "telemetry.agent.agent.Agent._tick",
        "log": "telemetry.agent.log.LogFile.write",
        "board": "telemetry.node.board.Board.publish",
    }
    source = f"""
        import atexit, sys, threading, telemetry, telemetry.agent.agent
        atexit.register(print, "the script's own")
        telemetry.start("run", start_line=False, interval_seconds=0.1)
        hanging = threading.Event()
        def hang(*_, **__):
            hanging.set()
            threading.Event().wait()
        *owner, name = {places[part]!r}.split(".")
        setattr(getattr(sys.modules[".".join(owner[:-1])], owner[-1]), name, hang)
        assert hanging.wait(60) or {part!r} == "log"
        sys.exit(6)
        """
    done = python(write(tmp_path, "script.py", source), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (6, "the script's own\n", "")


def test_stop_and_start_again_within_a_script(tmp_path):
    source = """
        import telemetry
        from telemetry.util import threads as own_threads
        telemetry.stop()
        for _ in range(3):
            telemetry.start("run", start_line=False)
            assert telemetry.start("elsewhere") is telemetry.start()
            telemetry.stop()
            telemetry.stop()
            assert own_threads.running() == []
        """
    done = python(write(tmp_path, "script.py", source), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(events(tmp_path / "run", "run_end")) == 3
    assert not (tmp_path / "elsewhere").exists()


def test_an_agent_that_cannot_start_is_undone(tmp_path):
    source = """
        import json, os, sys, telemetry, telemetry.agent.agent
        from telemetry.util import threads as own_threads
        from telemetry.util.processes import identify
        from telemetry.node.board import Board
        start = own_threads.start_new_thread
        def refuse(main, arguments):
            if main.__self__.name == "telemetry-agent":
                raise RuntimeError("can't start new thread")
            return start(main, arguments)
        own_threads.start_new_thread = refuse
        finders = list(sys.meta_path)
        agent = telemetry.start("run", run="r", port=0)
        assert agent.running is False and agent.metrics_url is None
        assert own_threads.running() in ([], ["telemetry-nvml"])
        assert sys.meta_path == finders
        assert not Board("r", os.path.abspath("run"), identify("r", None).node).states()
        with telemetry.phase("x"), telemetry.step():
            pass
        own_threads.start_new_thread = start
        assert telemetry.start("run", port=0, start_line=False).running
        """
    done = python(write(tmp_path, "script.py", source), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"telemetry: cannot start \(RuntimeError: .*\); the run goes on without it\n", done.stderr)


def test_the_start_line_is_one_line_whatever_the_folder_s_name(tmp_path):
    write(tmp_path, "script.py", "")
    done = python("-m", "telemetry", "run", "--run-dir", "a\nTraceback: \x1b[31m\udcff", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert START_LINE.fullmatch(done.stderr), done.stderr
    assert "\x1b" not in done.stderr
