"""A job on two nodes: two torchrun agents with different node names, and one run folder."""

from __future__ import annotations

import sys

import pytest

from stack.jobs import SCRIPT, Job, wait_for
from tests.free_ports import free_ports


@pytest.fixture
def two_nodes(launch):
    """Starts two ranks, each on a node of its own. ``folders``: the run folder of each node."""

    def start(name, folders, arguments=(), **variables):
        until, port = launch.folder / f"{name}.stop", str(free_ports(1))
        processes = [
            launch(
                [
                    sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number),
                    "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port,
                    "-m", "telemetry", "run", "--run-dir", str(folder), "--port", "off", "--stall-window-seconds", "8",
                    str(SCRIPT), "--by-hand", "--until", str(until), *arguments,
                ],
                f"{name}-n{number + 1}", TELEMETRY_NODE=f"n{number + 1}", **variables,
            )
            for number, folder in enumerate(folders)
        ]  # fmt: skip
        return Job(processes, folders[0], "off", until)

    return start


def test_two_healthy_nodes_accuse_nobody(two_nodes, launch):
    folder = launch.folder / "nodes-healthy"
    job = two_nodes(folder.name, [folder, folder], ("--slow-seconds", "0", "--pace-seconds", "0.03", "--steps", "400"))
    assert job.wait(120) == [0, 0]
    assert [line["cause"] for line in job.logs() if line["event"] == "stall_open"] == []
    assert {rank["node"] for rank in job.report()["ranks"]} == {"n1", "n2"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--slow-seconds", "0.02"), "rank 1 on n2 waits for data"),
        (
            ("--slow-seconds", "0", "--think-seconds", "0.08"),
            "rank 1 on n2 takes longer to compute a step, mostly in think",
        ),
    ],
    ids=["data", "compute"],
)
def test_the_slow_rank_of_another_node_is_named(two_nodes, launch, arguments, why):
    folder = launch.folder / f"nodes-{why.split()[4]}"
    job = two_nodes(folder.name, [folder, folder], arguments, SLOW_RANK="1")

    def stalled():
        assert job.running(), job.stderr
        found = [line for line in job.logs() if line["event"] == "stall_open" and line["rank"] == 0]
        return [line for line in found if line["cause"] == "straggler"]

    opened = wait_for("a stall of rank 0", stalled, 90, every=0.2)[0]
    assert opened["evidence"]["straggler_rank"] == 1
    assert opened["evidence"]["straggler_node"] == "n2"
    assert why in opened["advice"][0]["because"]
    assert opened["evidence"]["straggler_reason"] in opened["advice"][0]["because"]
    job.until.touch()
    assert job.wait() == [0, 0]
