"""Processes of every launcher, restarts, and nodes that share a folder have their own rank, series and log."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from telemetry.node.board import Board
from tests.faults.processes import (
    HANG,
    Child,
    can,
    fetch,
    log_lines,
    quiet,
    ranks_in,
    report,
    run,
    wait_for,
    write,
)
from tests.faults.warm_python import WarmChild

TRAIN = """
    import os, sys, telemetry, time

    def batches(seconds):
        while True:
            time.sleep(seconds)
            yield 1

    def train(steps, wait=0.001, source=None):
        for number, _ in enumerate(telemetry.watch(batches(wait) if source is None else source), 1):
            time.sleep(0.002)
            if number >= steps:
                return
"""


def env(**variables: str) -> dict[str, str]:
    return quiet(TELEMETRY_RUN="job", TELEMETRY_LOG_INTERVAL_SECONDS="0.2", OMP_NUM_THREADS="1", **variables)


def ranks_of(summary: dict) -> list[tuple[int, int]]:
    return [(rank["rank"], rank["pid"]) for rank in summary["ranks"]]


# -- launchers -----------------------------------------------------------------------------------------------------

WAITING = (
    TRAIN
    + """
    agent = telemetry.start("run")
    train(20)
    print(agent.metrics_url, flush=True)
    sys.stdin.readline()
    telemetry.stop()
"""
)

LAUNCHED = {
    "torchrun": lambda rank: {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
    "none": lambda rank: {},
    "all the same": lambda rank: {"RANK": "0", "WORLD_SIZE": "1"},
}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_two_processes_have_two_series_and_two_logs(launcher, tmp_path):
    script = write(tmp_path, "train.py", WAITING)
    with ExitStack() as stack:
        envs = [env(**LAUNCHED[launcher](rank)) for rank in (0, 1)]
        children = [stack.enter_context(Child(script, cwd=tmp_path, env=each)) for each in envs]
        url, _ = (child.line() for child in children)
        shown = lambda: ranks_in(fetch(url))
        wait_for(lambda: len([steps for steps in shown().values() if steps >= 10]) == 2, "two series that step")
        assert shown().keys() == {"0", "1"}
        for child in children:
            child.tell()
            child.ends()
    summary = report(tmp_path / "run")
    pids = [child.pid for child in children]
    assert [rank for rank, _ in ranks_of(summary)] == [0, 1]
    if launcher in {"none", "all the same"}:
        assert {pid for _, pid in ranks_of(summary)} == set(pids)
        assert "2 processes claim rank 0 at the same time" in summary["verdict"]
        assert "shown as rank 1" in summary["verdict"]
    else:
        assert ranks_of(summary) == [*enumerate(pids)]
        assert "claim" not in summary["verdict"]


SPAWN = (
    TRAIN
    + """
    import torch, torch.distributed as dist, torch.multiprocessing as mp

    def loop(steps, wanted=lambda: True):
        while True:
            train(steps, source=torch.utils.data.DataLoader(list(range(1000))))
            if wanted():
                return

    def child(index, shift, out, distributed):
        agent = telemetry.start("run")
        loop(10)
        rank = (index + shift) % 3
        if distributed:
            dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=3)
            loop(10, wanted=lambda: agent.identity.rank_given and agent.identity.rank == rank)
            dist.barrier()
            dist.destroy_process_group()
        loop(10)
        open(f"{out}/{index}.tmp", "w").write(f"{rank} {os.getpid()} {agent.metrics_url}")
        os.rename(f"{out}/{index}.tmp", f"{out}/{index}.txt")
        while not os.path.exists("go"):
            loop(1)
        telemetry.stop()

    if __name__ == "__main__":
        mp.spawn(child, args=(int(sys.argv[1]), os.getcwd(), sys.argv[2] == "distributed"), nprocs=3)
"""
)


@pytest.mark.parametrize(("shift", "kind"), [(0, "plain"), (1, "distributed")])
def test_spawned_processes_follow_their_rank(shift, kind, tmp_path):
    """Even if the rank differs from the number of the child: log, series and report follow the rank."""
    script = write(tmp_path, "train.py", SPAWN)
    with WarmChild(script, shift, kind, cwd=tmp_path, env=env()) as parent:
        said = wait_for(
            lambda: len(found := sorted(tmp_path.glob("?.txt"))) == 3 and found, "three children that train"
        )
        true = {int(rank): int(pid) for rank, pid, _ in (path.read_text().split() for path in said)}
        url = said[0].read_text().split()[2]
        wait_for(lambda: ranks_in(fetch(url)).keys() == {"0", "1", "2"}, "three series")
        names = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
        (tmp_path / "go").touch()
        parent.ends()
    assert names == {f"rank-{rank}.{pid}.jsonl" for rank, pid in true.items()}
    summary = report(tmp_path / "run")
    assert ranks_of(summary) == sorted(true.items())
    assert "claim" not in summary["verdict"]
    assert {rank["local_rank"] for rank in summary["ranks"]} == {0, 1, 2}
    for rank in summary["ranks"]:
        lines = [line for line in log_lines(tmp_path / "run") if line["pid"] == rank["pid"]]
        assert rank["steps"] == max(line["step"] for line in lines)
        assert lines[0]["event"] == "run_start"


def test_training_in_spawned_processes_that_are_not_seen_is_said(tmp_path):
    source = """
    import multiprocessing
    if __name__ == "__main__":
        telemetry.start("run")
        context = multiprocessing.get_context("spawn")
        children = [context.Process(target=train, args=(600,)) for _ in range(2)]
        [child.start() for child in children]
        [child.join() for child in children]
"""
    run(tmp_path, TRAIN + source, env=env())
    verdict = report(tmp_path / "run")["verdict"]
    assert "started 2 processes with multiprocessing" in verdict
    assert "call telemetry.start() in the function that is spawned" in verdict


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

_CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


class Contained(subprocess.Popen):
    """The first process of a PID namespace, like in a container: its pid is always the same."""

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
        if not can(*_CONTAINER, "true"):
            pytest.skip("PID namespaces cannot be made here")
        command, pipe = [*_CONTAINER, sys.executable, write(folder, "train.py", LIFE), *arguments], subprocess.PIPE
        super().__init__(command, cwd=folder, env=env(**variables), stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.communicate(timeout=HANG)

    def ends(self, said: str = "trained 1\n") -> None:
        out, err = self.communicate("\n", timeout=HANG)
        assert (self.returncode, err, out) == (0, "", said)


def stuck_ranks(folder: Path) -> set[int]:
    return {line["rank"] for line in log_lines(folder / "run", running=True) if line["event"] == "stall_open"}


def test_a_restart_with_the_same_pid_has_a_log_of_its_own(tmp_path):
    with Contained(tmp_path, "hang"):
        wait_for(lambda: stuck_ranks(tmp_path) == {0}, "a run that is stuck")
        assert report(tmp_path / "run")["verdict"].startswith("Stuck")
    Contained(tmp_path).ends()
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"rank-0.1.jsonl", "rank-0.1.2.jsonl"}
    summary = report(tmp_path / "run")
    assert ranks_of(summary) == [(0, 1), (0, 1)]
    assert summary["ranks"][1]["steps"] == 20
    assert not summary["verdict"].startswith("Stuck")


def test_two_nodes_with_equal_pids_do_not_share_a_file(tmp_path):
    nodes = [Contained(tmp_path, "wait", NODE_NAME=node) for node in ("node-a", "node-b")]
    assert [node.stdout.readline() for node in nodes] == ["trained 1\n"] * 2
    for node in nodes:
        node.ends("")
    for path in (tmp_path / "run" / "logs").iterdir():
        assert len({json.loads(line)["node"] for line in path.read_text().splitlines()}) == 1
    summary = report(tmp_path / "run")
    assert [(r["rank"], r["pid"], r["steps"]) for r in summary["ranks"]] == [(0, 1, 20)] * 2
    assert {rank["node"] for rank in summary["ranks"]} == {"node-a", "node-b"}
    assert "2 processes claim rank 0 at the same time (pid 1 on node-" in summary["verdict"]


def test_an_elastic_restart_with_fewer_ranks_is_judged_by_them(tmp_path):
    def attempt(ranks: int, *arguments: str) -> list[Contained]:
        variables = [{"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        return [Contained(tmp_path, *arguments, **each) for each in variables]

    with contextlib.ExitStack() as stack:
        for rank in attempt(3, "hang"):
            stack.enter_context(rank)
        wait_for(lambda: stuck_ranks(tmp_path) == {0, 1, 2}, "three ranks that are stuck")
    for rank in attempt(2):
        rank.ends()
    summary = report(tmp_path / "run")
    assert [rank for rank, _ in ranks_of(summary)] == [0, 0, 1, 1, 2]
    assert not summary["verdict"].startswith("Stuck")
    assert "claim" not in summary["verdict"]


# -- ranks on a board ----------------------------------------------------------------------------------------------

HOLDER = """
    import os, sys
    from pathlib import Path
    from telemetry.node.board import Board, Numbers
    board = Board("r", "s", "n", Path(sys.argv[1]))
    for line in sys.stdin:
        claimed, told, world = line.split()
        number = board.rank_for(int(claimed), rank_given=told == "told", world_size=int(world))
        board.publish(number, Numbers())
        print(number, flush=True)
"""


def test_ranks_on_a_board_are_distinct_and_the_told_comes_first(tmp_path):
    script = write(tmp_path, "holder.py", HOLDER)

    def ask(child: Child, line: str) -> int:
        return int(child.ask(line))

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
                assert child.ask("0 told 1") == number
        assert late.ask("0 told 1") == "0"


def test_processes_that_start_at_once_get_distinct_ranks(tmp_path):
    source = """
        import sys, telemetry
        sys.stdin.readline()
        agent = telemetry.start("run")
        print("up", flush=True)
        for _ in sys.stdin:
            print(agent.identity.rank, flush=True)
        """
    script = write(tmp_path, "start.py", source)
    with ExitStack() as stack:
        children = [stack.enter_context(Child(script, cwd=tmp_path, env=env())) for _ in range(6)]
        for child in children:
            child.tell()
        assert [child.line() for child in children] == ["up"] * 6
        wait_for(lambda: len({child.ask("?") for child in children}) == 6, "six distinct ranks")
        names = [path.name for path in (tmp_path / "run" / "logs").iterdir()]
        assert len({re.match(r"rank-(\d+)", name)[1] for name in names}) == 6, names
