"""Processes of every launcher have their own series and log."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.faults.identity_scripts import TRAIN, env, ranks_of, report
from tests.faults.warm_python import WarmChild

from .processes import Child, fetch, log_lines, python, samples, wait_for, write

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


def steps_by_rank(url: str) -> dict[str, float]:
    """Steps of each series. Fails if a series exists twice."""
    found = samples(fetch(url))["training_steps_total"]
    by_rank = {labels["rank"]: value for labels, value in found}
    assert len(by_rank) == len(found), found
    return by_rank


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


@pytest.mark.parametrize(("shift", "kind"), [(0, "plain"), (0, "distributed"), (1, "distributed")])
def test_spawned_processes_follow_their_rank(shift, kind, tmp_path):
    """Even if the rank differs from the number of the child: log, series and report follow the rank."""
    script = write(tmp_path, "train.py", SPAWN)
    with WarmChild(script, shift, kind, cwd=tmp_path, env=env()) as parent:
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
