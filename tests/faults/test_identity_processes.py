"""Who is who: processes of every launcher, restarts and nodes that share a folder, each with a series and log."""

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

from telemetry.publish.board import Board
from telemetry.report.load import load
from telemetry.report.summary import summarize

from .processes import HANG, Child, environment, fetch, log_lines, python, samples, wait_for, write

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

QUIET = {
    "TELEMETRY_START_LINE": "0", "TELEMETRY_INTERVAL_SECONDS": "0.1", "TELEMETRY_LOG_INTERVAL_SECONDS": "0.2",
    "TELEMETRY_RUN": "job", "OMP_NUM_THREADS": "1",
}  # fmt: skip

WAITING = (
    TRAIN
    + """
    agent = telemetry.start("run")
    train(20)
    print(agent.identity.rank, agent.metrics_url, flush=True)
    sys.stdin.readline()
    telemetry.stop()
"""
)


def env(**variables: str) -> dict[str, str]:
    return environment(**(QUIET | variables))


def steps_by_rank(url: str) -> dict[str, float]:
    """Steps of each series; fails where a series is there twice."""
    found = samples(fetch(url))["training_steps_total"]
    by_rank = {labels["rank"]: value for labels, value in found}
    assert len(by_rank) == len(found), found
    return by_rank


def report(run: Path) -> dict:
    summary = summarize(load(run))
    assert all(process.torn_lines == 0 for process in load(run))
    return summary


def ranks_of(summary: dict) -> list[tuple[int, int]]:
    return [(rank["rank"], rank["pid"]) for rank in summary["ranks"]]


LAUNCHED = {
    "torchrun": lambda rank: {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
    "ompi": lambda rank: {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
    },
    "pmi": lambda rank: {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank)},
    "lightning": lambda rank: {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"} if rank else {},
    "slurm": lambda rank: {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)},
    "none": lambda rank: {},
    "all the same": lambda rank: {"RANK": "0", "WORLD_SIZE": "1"},
}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_two_processes_have_two_series_and_two_logs(launcher, tmp_path):
    script = write(tmp_path, "train.py", WAITING)
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(script, cwd=tmp_path, env=env(**LAUNCHED[launcher](rank)))) for rank in (0, 1)
        ]
        said = [child.line().split() for child in children]
        url = said[0][1]
        wait_for(lambda: len([v for v in steps_by_rank(url).values() if v >= 10]) == 2, "two series that step")
        shown = steps_by_rank(url)
        for child in children:
            child.tell()
        assert [child.wait() for child in children] == [0, 0]
    summary = report(tmp_path / "run")
    assert set(shown) == {"0", "1"}
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert {rank["pid"] for rank in summary["ranks"]} == {child.pid for child in children}
    if launcher in {"none", "all the same"}:
        assert "2 processes claim rank 0 at the same time" in summary["verdict"]
        assert "shown as rank 1" in summary["verdict"]
    else:
        assert {rank["rank"]: rank["pid"] for rank in summary["ranks"]} == {
            rank: child.pid for rank, child in enumerate(children)
        }
        assert "claim" not in summary["verdict"]


def test_a_starved_process_is_not_hidden_by_another(tmp_path):
    script = write(
        tmp_path,
        "train.py",
        TRAIN + "    telemetry.start('run')\n    train(int(sys.argv[1]), float(sys.argv[2]))\n",
    )
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(script, *arguments, cwd=tmp_path, env=env()))
            for arguments in ((40, 0.03), (400, 0.0))
        ]
        assert [child.wait() for child in children] == [0, 0]
    summary = report(tmp_path / "run")
    assert [rank["steps"] for rank in sorted(summary["ranks"], key=lambda rank: rank["steps"])] == [40, 400]
    assert summary["verdict"].startswith("Starved: ")


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
            loop(10, wanted=lambda: agent.identity.told and agent.identity.rank == rank)
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


@pytest.mark.parametrize(("shift", "kind"), [(0, "plain"), (0, "distributed"), (1, "distributed")])
def test_spawned_processes_follow_their_rank(shift, kind, tmp_path):
    """Also where the rank is another one than the number of the child: log, series and report move along."""
    script = write(tmp_path, "train.py", SPAWN)
    with Child(script, shift, kind, cwd=tmp_path, env=env()) as parent:
        said = wait_for(
            lambda: len(found := sorted(tmp_path.glob("?.txt"))) == 3 and found, "three children that train"
        )
        true = {int(rank): int(pid) for rank, pid, _ in (path.read_text().split() for path in said)}
        url = said[0].read_text().split()[2]
        wait_for(lambda: set(steps_by_rank(url)) == {"0", "1", "2"}, "three series")
        names = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
        (tmp_path / "go").touch()
        assert parent.wait() == 0, parent.stderr
        assert parent.stderr == ""
    assert names == {f"rank-{rank}.{pid}.jsonl" for rank, pid in true.items()}
    summary = report(tmp_path / "run")
    assert dict(ranks_of(summary)) == true
    assert len(summary["ranks"]) == 3
    assert "claim" not in summary["verdict"]
    assert {rank["local_rank"] for rank in summary["ranks"]} == {0, 1, 2}
    for rank in summary["ranks"]:
        lines = [line for line in log_lines(tmp_path / "run") if line["pid"] == rank["pid"]]
        assert rank["steps"] == max(line["step"] for line in lines)
        assert [line["event"] for line in lines][0] == "run_start"


def test_training_in_spawned_processes_that_are_not_seen_is_said(tmp_path):
    script = write(
        tmp_path,
        "train.py",
        TRAIN
        + """
    import torch.multiprocessing as mp
    def child(index):
        train(600)
    if __name__ == "__main__":
        telemetry.start("run")
        mp.spawn(child, nprocs=2)
""",
    )
    done = python(script, cwd=tmp_path, env=env())
    assert (done.returncode, done.stderr) == (0, "")
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
    telemetry.stop()
"""
)


def namespaced(script: Path, *arguments: str, cwd: Path, **variables: str) -> subprocess.Popen:
    """Run as the first process of a PID namespace, as a container does: its pid is always the same."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, str(script), *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=env(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


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
    nodes = [namespaced(script, cwd=tmp_path, NODE_NAME=node) for node in ("node-a", "node-b")]
    for node in nodes:
        out, err = node.communicate(timeout=HANG)
        assert (node.returncode, err, out) == (0, "", "trained 1\n")
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
    """As agents wrote it that did not tell lives apart."""
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
    from telemetry.publish.board import Board
    board = Board("r", "s", "n", Path(sys.argv[1]))
    for line in sys.stdin:
        claimed, told, world = line.split()
        number = board.rank_for(int(claimed), told=told == "told", world_size=int(world))
        if board._mine is not None and board._mine.name != f"rank-{number}.{os.getpid()}":
            board.move(int(board._mine.name.split(".")[0][5:]), number)
        board.publish(number, [(b"h", b"s")])
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
        assert ask(two, "0 told 2") == 0  # torch.distributed has said so
        assert sorted(state.pid for state in board.states()) == sorted([two.pid, three.pid])
        assert ask(one, "0 default 1") == 1  # gives way, and keeps what it has got
        assert ask(three, "1 told 2") == 1
        assert ask(one, "0 default 1") == 2
        states = {state.rank: state.pid for state in board.states()}
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
