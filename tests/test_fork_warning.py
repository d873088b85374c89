"""Python 3.12's warning of forks beside threads: shown exactly where it would be shown without us."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python does not warn of forks")

SCRIPT = """
import os, sys, threading, warnings
import telemetry
from telemetry.util.threads import OwnThread, Wake

if "at-fork" in sys.argv:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    os.register_at_fork(before=lambda: (over.set(), thread.join()))
telemetry.start(sys.argv[1], port=0, interval_seconds=0.1, start_line=False)
if "thread" in sys.argv:
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
callback = OwnThread(Wake().wait, 600, name="telemetry-on-stall", others_code=True)
if "callback" in sys.argv:
    callback.start()
filters, before = warnings.filters, list(warnings.filters)
for _ in range(3):
    ended = OwnThread(int, name="telemetry-sweep")
    ended.start()
    ended.join()
    while "gone" in sys.argv and os.path.exists(ended.task):  # else the kernel may end it while Python warns
        pass
    child = os.fork()
    if child == 0:
        os._exit(0 if warnings.filters == before else 1)
    assert os.waitpid(child, 0)[1] == 0
assert warnings.filters is filters
telemetry.stop()
assert filters == before
for _ in range(2):
    warnings.warn("the user's own", DeprecationWarning)
"""


def run(tmp_path, *arguments: str, action: str = "default") -> str:
    command = [sys.executable, "-W", action, "-c", SCRIPT, str(tmp_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_fork_beside_our_threads_alone_does_not_warn(tmp_path):
    shown = run(tmp_path)
    assert "multi-threaded" not in shown
    assert shown.count("Warning: the user's own") == 1  # once, as without us


def test_each_fork_beside_a_thread_of_the_users_warns(tmp_path):
    """A thread of ours that has ended does not make room for one of theirs."""
    assert run(tmp_path, "thread", "gone", action="always").count("multi-threaded") == 3


def test_each_fork_beside_a_thread_of_ours_that_runs_code_of_others_warns(tmp_path):
    """The client of a logger may hold a lock that the child needs."""
    assert run(tmp_path, "callback", "gone", action="always").count("multi-threaded") == 3


def test_a_thread_that_ends_before_the_fork_does_not_warn(tmp_path):
    """OpenBLAS does this. torch starts its threads wherever numpy is installed."""
    assert "multi-threaded" not in run(tmp_path, "at-fork")


IN_WORKER = """
import os, sys
import telemetry
from torch.utils.data import DataLoader, Dataset


class Forking(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return index


if __name__ == "__main__":
    telemetry.start(sys.argv[1], port=0, start_line=False)
    print(*DataLoader(Forking(), num_workers=1, multiprocessing_context=sys.argv[2]))
"""


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_fork_in_a_worker_does_not_warn(tmp_path, context):
    script = tmp_path / "script.py"
    script.write_text(IN_WORKER)
    command = [sys.executable, "-W", "always", script, tmp_path / "run", context]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "deadlocks in the child" not in done.stderr


def test_forks_do_not_raise_where_warnings_are_errors(tmp_path):
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.partition("for _ in range(2)")[0], str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (shown.returncode, shown.stderr) == (0, "")
