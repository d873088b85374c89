"""Nodes of a job that are lost during a hang: their ranks are gone. Also in a large job, in which nodes form groups."""

from __future__ import annotations

import json

import pytest

from telemetry.job import exchange as exchange_module
from tests.test_job_exchange import Job, states


@pytest.fixture(autouse=True)
def _a_large_job_has_few_nodes(monkeypatch):
    monkeypatch.setattr(exchange_module, "_FLAT", 8)
    monkeypatch.setattr(exchange_module, "_GROUPS", 6)


NODES = 10  # in six groups


def members_of(job: Job, name: str) -> list[str]:
    """The nodes in the group of a node of a large job, with this one."""
    groups = {other: exchange_module._group_of(exchange._mine) for other, exchange in job.exchanges.items()}
    return [other for other, group in groups.items() if group == groups[name]]


def alone(job: Job) -> str:
    """A node that has its group for itself."""
    return next(name for name in [*job.exchanges][1:] if members_of(job, name) == [name])


def in_company(job: Job) -> str:
    """A node of a group of several, without the first node of the job."""
    return next(
        name for name in job.exchanges if len(members_of(job, name)) > 1 and "n0000" not in members_of(job, name)
    )


def ranks_gone(job: Job) -> set[tuple[str, int]]:
    return {(state.node, state.rank) for state in job.exchanges["n0000"].hang if state.process == "gone"}


@pytest.mark.parametrize(
    ("nodes", "pick"),
    [(3, lambda _: "n0001"), (NODES, in_company), (NODES, alone)],
    ids=["few nodes", "in a group", "alone in its group"],
)
def test_the_ranks_of_a_node_that_is_lost_are_gone(tmp_path, nodes, pick):
    job = Job(tmp_path, nodes=nodes)
    lost = pick(job)
    job.cycles(5)
    job.cycles(14, but=lost)
    assert job.exchanges["n0000"].hang == (), "nothing hangs"
    job.hang = {name: states(number) for number, name in enumerate(job.exchanges)}
    job.cycles(3, but=lost)
    first = 2 * [*job.exchanges].index(lost)
    assert ranks_gone(job) == {(lost, first), (lost, first + 1)}


def test_the_ranks_of_all_nodes_of_a_lost_group_are_gone(tmp_path):
    job = Job(tmp_path, nodes=NODES)
    names = [*job.exchanges]
    group = members_of(job, in_company(job))
    job.hang = {name: states(number) for number, name in enumerate(names)}
    job.cycles(5)
    job.exchanges = {name: exchange for name, exchange in job.exchanges.items() if name not in group}
    job.cycles(20)
    assert ranks_gone(job) == set(), "another node may still write for them"
    job.cycles(11)
    numbers = [names.index(name) for name in group]
    assert ranks_gone(job) == {(names[n], 2 * n + rank) for n in numbers for rank in (0, 1)}


def test_of_a_group_that_lost_its_speaker_only_that_node_is_gone(tmp_path):
    job = Job(tmp_path, nodes=NODES)
    names = [*job.exchanges]
    speaker = in_company(job)
    job.hang = {name: states(number) for number, name in enumerate(names)}
    job.cycles(5)
    for _ in range(40):
        job.cycles(1, but=speaker)
        assert {node for node, _ in ranks_gone(job)} <= {speaker}
    assert {node for node, _ in ranks_gone(job)} == {speaker}


@pytest.mark.parametrize("members", [7, "x", [{}], [{"nodes": 3}]])
def test_damaged_members_of_a_lost_group_are_nobody(tmp_path, members):
    job = Job(tmp_path, nodes=NODES)
    lost = alone(job)
    job.hang = {name: states(number) for number, name in enumerate(job.exchanges)}
    job.cycles(5)
    file = tmp_path / "job" / exchange_module._group_file(exchange_module._group_of(job.exchanges[lost]._mine))
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"members": members}))
    job.cycles(14, but=lost)
    assert ranks_gone(job) == set()


def test_the_ranks_of_a_node_that_has_left_are_not_gone(tmp_path):
    job = Job(tmp_path, nodes=3)
    job.cycles(5)
    job.exchanges["n0001"].leave()
    job.hang = {name: states(number) for number, name in enumerate(job.exchanges)}
    job.cycles(15, but="n0001")
    assert {s.node for s in job.exchanges["n0000"].hang} == {"n0002"}


def test_the_ranks_of_a_node_that_has_left_its_group_empty_are_not_gone(tmp_path):
    job = Job(tmp_path, nodes=NODES)
    left = alone(job)
    job.cycles(5)
    job.exchanges[left].leave()
    job.hang = {name: states(number) for number, name in enumerate(job.exchanges)}
    job.cycles(40, but=left)
    assert ranks_gone(job) == set()


def test_nodes_that_were_read_while_few_had_come_are_not_gone(tmp_path):
    """Later only the files of one's own group are read."""
    job = Job(tmp_path, nodes=NODES)
    every = job.exchanges
    job.exchanges = dict([*every.items()][:5])
    job.cycles(5)
    job.exchanges = every
    job.cycles(14)
    job.hang = {name: states(number) for number, name in enumerate(every)}
    for _ in range(4):
        job.cycles(1)
        assert ranks_gone(job) == set()
