"""`telemetry top` in a real terminal, tmux, on a real job: what stands on the screen, and what each key does."""

import shlex
import subprocess
import sys

import pytest

from stack.jobs import SLOW_RANK, environment, must_have, wait_for

pytestmark = pytest.mark.stack


class Terminal:
    """A tmux server of its own, with one window."""

    def __init__(self, folder, columns=80, lines=24):
        self.tmux = must_have("tmux")
        self.socket = str(folder / "tmux")
        self.run("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(lines), "-s", "t", "/bin/sh")
        self.run("set-option", "-g", "remain-on-exit", "on")
        self.keys("-l", "PS1='read''y> '; clear")
        self.keys("Enter")
        self.shows("ready>")

    def run(self, *arguments):
        variables = environment(LC_ALL="C.UTF-8", COLUMNS="80", LINES="24")  # as some shells export them
        done = subprocess.run(
            [self.tmux, "-S", self.socket, *arguments], env=variables, capture_output=True, timeout=20
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    def screen(self):
        return self.run("capture-pane", "-p", "-t", "t")

    def keys(self, *keys):
        self.run("send-keys", "-t", "t", *keys)

    def type(self, *command, **variables):
        text = shlex.join([*(f"{name}={value}" for name, value in variables.items()), *map(str, command)])
        self.keys("-l", text)
        self.keys("Enter")

    def top(self, *arguments, **variables):
        self.type(
            "env", *(f"{n}={v}" for n, v in variables.items()), sys.executable, "-m", "telemetry", "top", *arguments
        )

    def shows(self, *texts, seconds=30.0):
        """The screen, once all the texts stand on it."""
        seen = [""]

        def there():
            seen[0] = self.screen()
            return all(text in seen[0] for text in texts)

        try:
            wait_for(f"{texts}", there, seconds)
        except pytest.fail.Exception:
            pytest.fail(f"{texts} did not appear:\n{seen[0]}")
        return seen[0]

    def at_prompt(self):
        """The shell has the terminal back, as it was: what is typed is shown and understood."""
        wait_for("the prompt", lambda: self.screen().rstrip().split("\n")[-1].endswith("ready>"))
        self.type("echo", "back-again")
        return self.shows("ready> echo back-again\nback-again\nready>")

    def close(self):
        subprocess.run([self.tmux, "-S", self.socket, "kill-server"], capture_output=True)


@pytest.fixture
def terminal(tmp_path):
    shown = Terminal(tmp_path)
    yield shown
    shown.close()


@pytest.fixture(scope="module")
def stalled(job):
    """The job of four ranks, once its slow rank has a stall."""
    wait_for("a stall", lambda: [x for x in job.logs() if x["event"] == "stall_open" and x["rank"] == SLOW_RANK], 90)
    return job


def test_the_first_line_blames_and_keys_work(terminal, stalled):
    terminal.top(str(stalled.run_dir))
    screen = terminal.shows(f"rank {SLOW_RANK} spent", f"waits for rank {SLOW_RANK}", "newest stall: rank", "q quit")
    assert screen.startswith("Starved: rank")
    assert max(map(len, screen.splitlines())) <= 80
    terminal.keys("s")
    terminal.shows("\nrank  \u2592 data wait")
    terminal.keys("/")
    terminal.shows("a text in the number")
    terminal.keys("-l", "rank 1")
    terminal.shows("rank, find rank 1 ")
    terminal.keys("Enter")
    terminal.shows("q quit")
    terminal.keys("Enter")
    terminal.shows("rank 1 on", "ledger ", "whole run")
    terminal.keys("q", "Escape")
    terminal.shows("\n    0  ", "\n    3  ")  # all ranks again
    terminal.keys("h")
    terminal.shows("state, worst first:")
    terminal.keys("q")
    terminal.at_prompt()


def test_ctrl_z_gives_the_shell_back_and_fg_the_screen(terminal, stalled):
    terminal.type("set", "-m")
    terminal.top(str(stalled.run_dir))
    terminal.shows("newest stall", "q quit")
    terminal.keys("C-z")
    terminal.shows("ready>", "top")
    terminal.at_prompt()
    terminal.type("fg")
    screen = terminal.shows("q quit", "newest stall")
    assert "ready>" not in screen
    terminal.keys("q")
    terminal.at_prompt()
