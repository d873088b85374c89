"""`telemetry top` gives the terminal back as it was, however it ends; without a terminal, it prints and ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from top_runs import NOW, dumped, log_line, start, window

from telemetry.top.command import top

COMMAND = [sys.executable, "-m", "telemetry", "top"]
ENTERED, LEFT = b"\x1b[?1049h", b"\x1b[?1049l"
ENDING = [signal.SIGINT, signal.SIGTERM]

CRASH = """
import sys
if "top" in sys.argv or "top" in getattr(sys, "orig_argv", ()):
    from telemetry.top import text

    def broken(*_):
        raise RuntimeError("broken on purpose")

    text.seen = broken
"""


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "logs").mkdir()
    lines = start(NOW - 100), window(NOW - 60, 40, steps=4), log_line("run_end", NOW - 50)
    (tmp_path / "logs" / "rank-0.10.jsonl").write_bytes(dumped(*lines))
    return tmp_path


class Terminal:
    """A pseudo-terminal with the command in it."""

    def __init__(self, run_dir, **variables):
        pytest.importorskip("textual")
        self.outer, self.inner = pty.openpty()
        fcntl.ioctl(self.inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.before = termios.tcgetattr(self.inner)
        self.written = b""
        environment = os.environ | {"TERM": "xterm-256color"} | variables
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.inner)
        self.child = subprocess.Popen([*COMMAND, str(run_dir)], env=environment, start_new_session=True, **streams)

    def read_until(self, text):
        deadline = time.monotonic() + 60
        while text not in self.written:
            assert time.monotonic() < deadline, self.written
            self.read()
        return self

    def read(self):
        if select.select([self.outer], [], [], 0.05)[0]:
            self.written += os.read(self.outer, 1 << 16)

    def restored(self):
        """Wait for the end; returns the status."""
        deadline = time.monotonic() + 60
        while self.child.poll() is None:
            assert time.monotonic() < deadline
            self.read()
        self.read()
        assert self.written.rindex(LEFT) > self.written.rindex(ENTERED)
        assert self.written.rindex(b"\x1b[?25h") > self.written.rindex(b"\x1b[?25l")
        assert termios.tcgetattr(self.inner) == self.before
        return self.child.returncode

    def close(self):
        self.child.kill()
        self.child.wait(60)
        for number in (self.outer, self.inner):
            with contextlib.suppress(OSError):
                os.close(number)


@pytest.fixture
def terminal(run_dir):
    opened = []

    def shown(**variables):
        opened.append(Terminal(run_dir, **variables))
        return opened[-1]

    yield shown
    for each in opened:
        each.close()


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_restores_the_terminal(terminal, number):
    shown = terminal().read_until(b"The run has ended")
    shown.child.send_signal(number)
    assert shown.restored() == 128 + number


def test_signals_while_the_terminal_is_changed_or_restored(terminal):
    shown = terminal().read_until(ENTERED)
    for number in ENDING * 3:
        shown.child.send_signal(number)
        time.sleep(0.01)
    assert shown.restored() == 128 + signal.SIGINT


@pytest.mark.parametrize(("key", "status"), [(b"q", 0), (b"\x03", 130)], ids=["q", "ctrl-c"])
def test_a_key_ends_it(terminal, key, status):
    shown = terminal().read_until(b"The run has ended")
    os.write(shown.outer, key)
    assert shown.restored() == status


def test_a_crash_restores_the_terminal_and_is_shown(terminal, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(CRASH)
    path = os.pathsep.join([str(tmp_path / "broken"), *os.environ.get("PYTHONPATH", os.getcwd()).split(os.pathsep)])
    shown = terminal(PYTHONPATH=path)
    assert shown.restored() == 1
    assert b"broken on purpose" in shown.written


def test_it_ends_when_the_terminal_is_gone(terminal):
    shown = terminal().read_until(b"The run has ended")
    os.close(shown.inner)
    os.close(shown.outer)
    shown.child.send_signal(signal.SIGHUP)  # as the kernel does to the processes of a terminal's session
    assert shown.child.wait(30) == -signal.SIGHUP


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_file_is_no_terminal_whatever_the_environment(run_dir, variable):
    environment = os.environ | {variable: "1", "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([*COMMAND, str(run_dir)], env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "The run has ended" in done.stdout.decode()
    assert "\x1b" not in done.stdout.decode()


def test_one_frame_needs_neither_torch_nor_textual(tmp_path):
    code = ("import sys; from telemetry.cli import main; status = main(['top', '--once', sys.argv[1]]); "
            "assert not {'torch', 'textual', 'rich'} & {*sys.modules}; sys.exit(status)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("Waiting for the run to begin")


def test_a_folder_that_does_not_exist_is_an_error(tmp_path, capsys):
    for once in (True, False):
        assert top(str(tmp_path / "typo"), once=once) == 1
        assert capsys.readouterr() == (
            "",
            f"telemetry: there is no folder {tmp_path}/typo; the run makes it at its start\n",
        )
