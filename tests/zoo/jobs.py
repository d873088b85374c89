"""Jobs of several ranks on two emulated nodes: a straggler of each kind, hangs of four kinds, and a healthy one."""

from __future__ import annotations

from typing import Final

from .specimen import Specimen, words

_HUNG_SECONDS: Final = 80.0


def _straggler(name: str, causes: str, odd: int, about: str, reason: str) -> Specimen:
    return Specimen(
        f"job-{name}",
        "job",
        ("straggler", *causes.split()),
        about,
        words(f"--slow {name} --odd-rank {odd}"),
        ranks=4,
        nodes=2,
        slow_rank=odd,
        whole_node=name == "node",
        reason=reason,
        seconds=50.0,
        takes_settings=False,
    )


def _hang(name: str, kind: str, odd: int, about: str) -> Specimen:
    return Specimen(
        f"job-hang-{name}",
        "job",
        (),
        about,
        words(f"--hang {name} --odd-rank {odd}"),
        ranks=4,
        nodes=2,
        slow_rank=odd,
        hang=kind,
        seconds=_HUNG_SECONDS,
        takes_settings=False,
    )


JOBS: Final = (
    _straggler("loader", "loader_on_training_thread", 3, "one rank reads from slow storage", "waits for data"),
    _straggler("compute", "", 1, "one rank computes more slowly", "takes longer to compute a step"),
    _straggler("evaluation", "", 0, "one rank evaluates for all", "is in an evaluation"),
    _straggler("checkpoint", "checkpoint", 2, "one rank writes checkpoints to a store", "is in a checkpoint"),
    _straggler(
        "node",
        "",
        2,
        "all ranks of a node compute more slowly",
        "all 2 ranks of that node are waited for, so the node is slow",
    ),
    _hang("fetch", "fetch", 2, "storage stops to answer one rank"),
    _hang("lock", "compute", 0, "one rank waits for a lock in a step"),
    _hang("left", "rank_left", 3, "one rank has fewer batches"),
    _hang("order", "mismatch", 1, "one rank calls a collective that the others do not"),
    Specimen(
        "healthy-job", "job", (), "four equal ranks on two nodes", ranks=4, nodes=2, seconds=50.0, takes_settings=False
    ),
)
