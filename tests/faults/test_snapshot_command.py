"""The snapshot command in another shell, and its messages if there is nothing to record."""

from __future__ import annotations

import os

import pytest

from faults.processes import python, wait_for, write
from faults.snapshot_scripts import LOOP, whole
from tests.faults.warm_python import WarmChild


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
    with WarmChild(script, cwd=tmp_path) as child:
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
        (["nowhere"], 1, "not a run folder"),
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
