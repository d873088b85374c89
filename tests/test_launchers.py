"""The rank of a process, read from what launchers set."""

from __future__ import annotations

import sys
import types

import pytest

from telemetry.util.identity import identify, identity_from_torch


def mpi(prefix: str, rank: int, size: int, local: int) -> dict[str, str]:
    return {f"{prefix}_RANK": str(rank), f"{prefix}_SIZE": str(size), f"{prefix}_LOCAL_RANK": str(local)}


def place(**env: str) -> tuple[int, int, int, str, bool]:
    identity = identify("r", None, env)
    return identity.rank, identity.world_size, identity.local_rank, identity.launcher, identity.rank_given


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, (0, 1, 0, "plain", False)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (5, 8, 1, "torchrun", True)),
        (mpi("OMPI_COMM_WORLD", 3, 4, 1), (3, 4, 1, "mpi", True)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2"}, (2, 4, 2, "mpi", True)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "0"}, (2, 4, 0, "mpi", True)),
        ({"PMIX_RANK": "3"}, (3, 4, 0, "mpi", True)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, (3, 4, 1, "slurm", True)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "PMIX_RANK": "3"}, (3, 4, 1, "slurm", True)),
        # mpirun in a Slurm job: what Slurm says is about mpirun's daemon
        (mpi("OMPI_COMM_WORLD", 3, 4, 1) | {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, (3, 4, 1, "mpi", True)),
        # Lightning: LOCAL_RANK, NODE_RANK and WORLD_SIZE
        ({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}, (1, 2, 1, "lightning", True)),
        (
            {"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            (5, 8, 1, "lightning", True),
        ),
        ({"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "8"}, (1, 1, 1, "lightning", False)),
        ({"RANK": "x", "WORLD_SIZE": "2"}, (0, 1, 0, "plain", False)),
        ({"OMPI_COMM_WORLD_RANK": "-1", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2, 0, "slurm", True)),
    ],
)
def test_each_launcher_is_read(env, expected):
    assert place(**env) == expected


class Distributed(types.ModuleType):
    """torch.distributed as far as it is read."""

    def __init__(self) -> None:
        super().__init__("torch.distributed")
        self.group = types.SimpleNamespace(WORLD=None)
        self.rank, self.world = 0, 1

    def init(self, rank: int, world: int) -> None:
        self.group.WORLD, self.rank, self.world = object(), rank, world

    def is_initialized(self) -> bool:
        return self.group.WORLD is not None

    def get_rank(self) -> int:
        if self.group.WORLD is None:
            raise ValueError("Default process group has not been initialized")
        return self.rank

    def get_world_size(self) -> int:
        return self.world


@pytest.fixture
def distributed(monkeypatch):
    module = Distributed()
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return module


def test_the_process_group_says_the_rank_and_it_stays(distributed):
    plain, seen = identity_from_torch(identify("r", None, {}), None)
    assert (plain.rank, plain.rank_given) == (0, False)
    distributed.init(3, 4)
    known, seen = identity_from_torch(plain, seen)
    assert (known.rank, known.world_size, known.rank_source) == (3, 4, "torch.distributed")
    distributed.group.WORLD = None  # destroyed
    known, seen = identity_from_torch(known, seen)
    assert (known.rank, known.world_size) == (3, 4)
    distributed.init(1, 4)  # and made anew
    known, seen = identity_from_torch(known, seen)
    assert (known.rank, known.world_size) == (1, 4)
    given = identify("r", None, {"RANK": "5", "WORLD_SIZE": "8"})
    assert identity_from_torch(given, None)[0] == given, (
        "the launcher says it, and a group of some ranks does not take it"
    )


def test_a_process_group_that_goes_meanwhile_is_no_error(distributed):
    distributed.is_initialized = lambda: True
    plain = identify("r", None, {})
    assert identity_from_torch(plain, None) == (plain, None)
    del distributed.is_initialized  # torch is being imported
    del distributed.group
    assert identity_from_torch(plain, None) == (plain, None)


def test_the_setting_names_the_node():
    env = {"SLURMD_NODENAME": "from-slurm", "NODE_NAME": "from-kubernetes"}
    assert identify("r", None, env).node == "from-slurm"
    assert identify("r", None, env, node="mine").node == "mine"
