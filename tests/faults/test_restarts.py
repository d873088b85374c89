"""Restarts, nodes that share a folder, and ranks on a board: the processes are kept apart."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from telemetry.node.board import Board
from tests.faults.identity_scripts import TRAIN, env, ranks_of, report

from .processes import HANG, Child, log_lines, wait_for, write

# -- lives ---------------------------------------------------------------------------------------------------------

LIFE = (
    TRAIN
    + """
    telemetry.start("run", log_max_bytes=65536, stuck_seconds=1)
    train(20)
    print("trained", os.getpid(), flush=True)
    if sys.argv[1:] == ["hang"]:
        train(1, 1000)
    if sys.argv[1:] == ["wait"]:
        sys.stdin.readline()
    telemetry.stop()
"""
)


def namespaced(script: Path, *arguments: str, cwd: Path, **variables: str) -> subprocess.Popen:
    """Run as the first process of a PID namespace, like in a container: its pid is always the same."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, str(script), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=env(**variables), stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, timeout=HANG)
    return done.returncode == 0


needs_namespaces = pytest.mark.skipif(not can_unshare(), reason="PID namespaces cannot be made here")


@needs_namespaces
def test_a_restart_with_the_same_pid_has_a_log_of_its_own(tmp_path):
    script = write(tmp_path, "train.py", LIFE)
    first = namespaced(script, "hang", cwd=tmp_path)
    try:
        stuck = lambda: any(  # noqa: E731
            line["event"] == "stall_open" for line in log_lines(tmp_path / "run", running=True)
        )
        wait_for(lambda: (tmp_path / "run" / "logs").exists() and stuck(), "a run that is stuck")
        assert report(tmp_path / "run")["verdict"].startswith("Stuck")
    finally:
        first.kill()
        first.communicate(timeout=HANG)
    second = namespaced(script, cwd=tmp_path)
    out, err = second.communicate(timeout=HANG)
    assert (second.returncode, err) == (0, "")
    assert out == "trained 1\n"
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"rank-0.1.jsonl", "rank-0.1.2.jsonl"}
    summary = report(tmp_path / "run")
    assert ranks_of(summary) == [(0, 1), (0, 1)]
    assert summary["ranks"][1]["steps"] == 20
    assert not summary["verdict"].startswith("Stuck")


@needs_namespaces
def test_two_nodes_with_equal_pids_do_not_share_a_file(tmp_path):
    script = write(tmp_path, "train.py", LIFE)
    nodes = [namespaced(script, "wait", cwd=tmp_path, NODE_NAME=node) for node in ("node-a", "node-b")]
    assert [node.stdout.readline() for node in nodes] == ["trained 1\n"] * 2
    for node in nodes:
        _, err = node.communicate("\n", timeout=HANG)
        assert (node.returncode, err) == (0, "")
    for path in (tmp_path / "run" / "logs").iterdir():
        assert len({json.loads(line)["node"] for line in path.read_text().splitlines()}) == 1
    summary = report(tmp_path / "run")
    assert [(r["rank"], r["pid"], r["steps"]) for r in summary["ranks"]] == [(0, 1, 20)] * 2
    assert {rank["node"] for rank in summary["ranks"]} == {"node-a", "node-b"}
    assert "2 processes claim rank 0 at the same time (pid 1 on node-" in summary["verdict"]


@needs_namespaces
def test_an_elastic_restart_with_fewer_ranks_is_judged_by_them(tmp_path):
    script = write(tmp_path, "train.py", LIFE)

    def attempt(ranks: int, *arguments: str) -> list[subprocess.Popen]:
        variables = [{"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        return [namespaced(script, *arguments, cwd=tmp_path, **each) for each in variables]

    first = attempt(3, "hang")
    try:
        opened = lambda: {  # noqa: E731
            line["rank"] for line in log_lines(tmp_path / "run", running=True) if line["event"] == "stall_open"
        }
        wait_for(lambda: (tmp_path / "run" / "logs").exists() and opened() == {0, 1, 2}, "three ranks that are stuck")
    finally:
        for process in first:
            process.kill()
            process.communicate(timeout=HANG)
    for process in attempt(2):
        out, err = process.communicate(timeout=HANG)
        assert (process.returncode, err, out) == (0, "", "trained 1\n")
    summary = report(tmp_path / "run")
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 0, 1, 1, 2]
    assert not summary["verdict"].startswith("Stuck")
    assert "claim" not in summary["verdict"]


def test_a_log_written_by_two_lives_is_read_as_two(tmp_path):
    """The format of earlier agents, which did not distinguish the lives of a process."""
    (tmp_path / "logs").mkdir()
    lines = []
    totals = {"ledger_total_seconds": {}, "wall_seconds": 2.0}
    for minute, steps in ((0, 50), (5, 70)):
        at = {"run": "r", "rank": 0, "local_rank": 0, "node": "n", "pid": 7, "tid": 7}
        time = f"2026-01-01T00:0{minute}"
        lines.append(at | {"time": f"{time}:00.000Z", "event": "run_start", "started": f"{time}:00.000Z"})
        evidence = {"stuck_in": "data_wait"}
        if minute == 0:
            lines.append(at | {"time": f"{time}:01.000Z", "event": "stall_open", "cause": "io", "evidence": evidence})
        lines.append(at | {"time": f"{time}:02.000Z", "event": "window", **totals, "steps_total": steps})
    lines.append(at | {"time": f"{time}:03.000Z", "event": "run_end", **totals, "steps_total": steps})
    path = tmp_path / "logs" / "rank-0.7.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = report(tmp_path)
    assert [rank["steps"] for rank in summary["ranks"]] == [50, 70]
    assert not summary["verdict"].startswith("Stuck")


# -- the board -----------------------------------------------------------------------------------------------------

HOLDER = """
    import os, sys
    from pathlib import Path
    from telemetry.node.board import Board, Numbers
    board = Board("r", "s", "n", Path(sys.argv[1]))
    for line in sys.stdin:
        claimed, told, world = line.split()
        number = board.rank_for(int(claimed), rank_given=told == "told", world_size=int(world))
        if board._mine is not None and board._mine.name != f"rank-{number}.{os.getpid()}":
            board.move(int(board._mine.name.split(".")[0][5:]), number)
        board.publish(number, Numbers())
        print(number, flush=True)
"""


def test_ranks_on_a_board_are_distinct_and_the_told_comes_first(tmp_path):
    script = write(tmp_path, "holder.py", HOLDER)

    def ask(child: Child, line: str) -> int:
        child.tell(line)
        return int(child.line())

    with ExitStack() as stack:
        board = Board("r", "s", "n", tmp_path / "board")
        one, two, three = (stack.enter_context(Child(script, tmp_path / "board", cwd=tmp_path)) for _ in range(3))
        assert [ask(child, "0 default 1") for child in (one, two, three)] == [0, 1, 2]
        assert ask(two, "0 told 2") == 0  # torch.distributed has given this rank
        assert sorted(state.head.pid for state in board.states()) == sorted([two.pid, three.pid])
        assert ask(one, "0 default 1") == 1  # gives way, and keeps its new number
        assert ask(three, "1 told 2") == 1
        assert ask(one, "0 default 1") == 2
        states = {state.head.rank: state.head.pid for state in board.states()}
        assert states == {0: two.pid, 1: three.pid, 2: one.pid}
        assert [ask(child, line) for child, line in ((two, "0 told 2"), (three, "1 told 2"))] == [0, 1]


def test_a_rank_whose_holder_is_gone_goes_back_to_who_was_told(tmp_path):
    script = write(tmp_path, "holder.py", HOLDER)
    with Child(script, tmp_path / "board", cwd=tmp_path) as late:
        with Child(script, tmp_path / "board", cwd=tmp_path) as early:
            for child, number in ((early, "0"), (late, "1")):
                child.tell("0 told 1")
                assert child.line() == number
        late.tell("0 told 1")
        assert late.line() == "0"


def test_processes_that_start_at_once_get_distinct_ranks(tmp_path):
    script = write(
        tmp_path,
        "start.py",
        "import sys, telemetry\nsys.stdin.readline()\nagent = telemetry.start('run')\nprint('up', flush=True)\n"
        "for _ in sys.stdin: print(agent.identity.rank, flush=True)\n",
    )
    with ExitStack() as stack:
        children = [stack.enter_context(Child(script, cwd=tmp_path, env=env())) for _ in range(6)]
        for child in children:
            child.tell()
        assert [child.line() for child in children] == ["up"] * 6

        def ranks() -> set[str]:
            for child in children:
                child.tell("?")
            return {child.line() for child in children}

        wait_for(lambda: len(ranks()) == 6, "six distinct ranks")
        names = [p.name for p in (tmp_path / "run" / "logs").iterdir()]
        assert len({re.match(r"rank-(\d+)", name)[1] for name in names}) == 6, names
    assert os.path.isdir(tmp_path / "run")
