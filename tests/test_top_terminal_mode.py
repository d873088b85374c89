"""`telemetry top` gives the terminal back as it was, whichever signals come; without one, it prints and ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest
from top_screens import NOW, log_line, start, window

from telemetry.top.painter import LEAVE

SHOW = """
import os, signal, sys
from telemetry.top.painter import LEAVE
from telemetry.top.terminal_mode import TerminalMode

first, second = int(sys.argv[1]), int(sys.argv[2])

class Interrupted(TerminalMode):
    def write(self, text):
        if text == LEAVE and second:
            os.kill(os.getpid(), second)
        super().write(text)

with Interrupted("utf-8") as terminal:
    if first:
        os.kill(os.getpid(), first)
        while True:
            terminal.wait_for_keys(60)
"""


def shown_and_left(first: int, second: int = 0):
    """What was written to a terminal by a view that is ended by signals, and the modes of it before and after."""
    outer, inner = pty.openpty()
    try:
        before = termios.tcgetattr(inner)
        done = subprocess.run(
            [sys.executable, "-c", SHOW, str(int(first)), str(int(second))],
            stdin=inner, stdout=inner, stderr=subprocess.PIPE, timeout=60, check=False,
        )  # fmt: skip
        return os.read(outer, 1 << 16).decode(), before, termios.tcgetattr(inner), done
    finally:
        os.close(outer)
        os.close(inner)


ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_restores_the_terminal(number):
    written, before, after, _ = shown_and_left(number)
    assert written.endswith(LEAVE)
    assert before == after


@pytest.mark.parametrize("second", [*ENDING, signal.SIGTSTP])
@pytest.mark.parametrize("first", [0, signal.SIGTERM])
def test_a_signal_while_it_is_restored_changes_nothing(first, second):
    written, before, after, done = shown_and_left(first, second)
    assert written.endswith(LEAVE)
    assert before == after
    assert done.returncode == (128 + first if first else 0)


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_file_is_no_terminal_whatever_the_environment(tmp_path, variable):
    (tmp_path / "logs").mkdir()
    lines = start(NOW - 100), window(NOW - 60, 40, steps=4), log_line("run_end", NOW - 50)
    (tmp_path / "logs" / "rank-0.10.jsonl").write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    done = subprocess.run(
        [sys.executable, "-m", "telemetry", "top", str(tmp_path)],
        env=os.environ | {variable: "1", "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "The run has ended" in done.stdout.decode()
    assert "\x1b" not in done.stdout.decode()
    assert "\u2588" not in done.stdout.decode()  # blocks without colours tell nothing
