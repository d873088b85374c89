"""Nodes of a job tell one another of their ranks through files in the run folder."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.core.hang_records import Collective, HangState
from telemetry.job import exchange as exchange_module
from telemetry.job.candidates import candidates
from telemetry.job.exchange import JobExchange
from telemetry.job.hang_states import from_rows, to_rows
from telemetry.job.node_report import MAX_BYTES, NodeReport, decoded, encoded
from telemetry.publish.board import Board
from telemetry.records import RankPace
from telemetry.util.clock import NS
from telemetry.util.files import read_small
from tests.rank_paces import pace


class Job:
    """Nodes with one run folder and one clock. ``files``: how often one was read or written in the last cycle."""

    def __init__(self, folder, nodes: int, ranks: int = 2) -> None:
        self.seconds, self.files = 0.0, 0
        self.paces = {f"n{node:04d}": [pace(node * ranks + rank) for rank in range(ranks)] for node in range(nodes)}
        self.exchanges = {name: self.exchange(folder, name) for name in self.paces}
        self.hang: dict[str, tuple[HangState, ...]] = {}
        self.heard: dict[str, tuple[RankPace, ...]] = {}

    def exchange(self, folder, name: str) -> JobExchange:
        def read(path: str) -> bytes:
            self.files += 1
            with open(path, "rb") as file:
                return file.read()

        def write(path: str, content: bytes) -> None:
            with open(path, "wb") as file:
                file.write(content)

        return JobExchange(folder, name, mono_ns=lambda: int(self.seconds * NS), read=read, write=write)

    def cycles(self, count: int, but: str = "") -> None:
        for _ in range(count):
            self.seconds += 5
            for name, exchange in self.exchanges.items():
                if name != but:
                    self.files = 0
                    self.heard[name] = exchange.cycle(self.paces[name], self.hang.get(name, ()))


def test_a_node_hears_of_the_ranks_of_another(tmp_path):
    job = Job(tmp_path, nodes=2)
    job.cycles(3)
    assert {(p.rank, p.node) for p in job.heard["n0000"]} == {(2, "n0001"), (3, "n0001")}
    assert {(p.rank, p.node) for p in job.heard["n0001"]} == {(0, "n0000"), (1, "n0000")}
    assert job.exchanges["n0000"].nodes == 2


def test_the_files_of_an_earlier_attempt_are_nobody(tmp_path):
    before = Job(tmp_path, nodes=3)
    before.cycles(2)
    after = Job(tmp_path, nodes=2)
    after.cycles(4)
    assert {p.node for p in after.heard["n0000"]} == {"n0001"}
    assert after.exchanges["n0000"].nodes == 2


def test_two_containers_of_one_machine_have_a_file_each(tmp_path):
    seconds = [0.0]
    ours, theirs = (
        JobExchange(tmp_path, "host", board, mono_ns=lambda: int(seconds[0] * NS)) for board in ("one", "two")
    )
    for _ in range(3):
        seconds[0] += 5
        heard = ours.cycle([pace(0)]), theirs.cycle([pace(1)])
    assert [[p.rank for p in ranks] for ranks in heard] == [[1], [0]]


def test_a_node_that_is_gone_is_forgotten_in_a_minute(tmp_path):
    job = Job(tmp_path, nodes=3)
    job.cycles(3)
    assert {p.node for p in job.heard["n0000"]} == {"n0001", "n0002"}
    job.cycles(12, but="n0002")
    assert {p.node for p in job.heard["n0000"]} == {"n0001"}


def test_a_node_that_joins_later_is_found(tmp_path):
    job = Job(tmp_path, nodes=2)
    job.cycles(3)
    job.paces["late"] = [pace(9)]
    job.exchanges["late"] = job.exchange(tmp_path, "late")
    job.cycles(20)
    assert 9 in {p.rank for p in job.heard["n0000"]}


@pytest.fixture
def large(monkeypatch):
    """A job of 20 nodes is large enough for groups."""
    monkeypatch.setattr(exchange_module, "_FLAT", 8)
    monkeypatch.setattr(exchange_module, "_GROUPS", 4)
    return 20


@pytest.mark.parametrize("slow", [0, 7, 19])
def test_in_a_large_job_all_hear_of_the_one_slow_rank(tmp_path, large, slow):
    job = Job(tmp_path, nodes=large, ranks=1)
    job.paces[f"n{slow:04d}"] = [pace(slow, compute=1.0)]
    job.cycles(5)
    deaf = [name for name, heard in job.heard.items() if name != f"n{slow:04d}" and slow not in {p.rank for p in heard}]
    assert deaf == []
    assert job.exchanges["n0000"].nodes == large


def test_a_large_job_reads_few_files_a_cycle(tmp_path):
    job = Job(tmp_path, nodes=1, ranks=1)
    (tmp_path / "job").mkdir()
    for node in range(1, 1250):
        report = NodeReport(f"n{node:04d}", 1, 1, (pace(node),))
        (tmp_path / "job" / f"node-n{node:04d}.json").write_bytes(encoded(report))
    job.cycles(2)
    assert 40 < job.files < 100


def test_the_first_living_node_speaks_for_its_group(tmp_path, large):
    job = Job(tmp_path, nodes=large, ranks=1)
    job.cycles(5)
    file = next((tmp_path / "job").glob("group-*.json"))
    speaker = decoded(file.read_bytes()).writer
    job.cycles(12, but=speaker)
    report = decoded(file.read_bytes())
    assert report.writer != speaker
    assert job.exchanges[report.writer].nodes == large - 1


def test_a_folder_that_is_not_shared_is_told_apart(tmp_path):
    alone = Job(tmp_path, nodes=1)
    alone.cycles(2)
    assert alone.exchanges["n0000"].shared is None
    alone.cycles(20)
    assert alone.exchanges["n0000"].shared is False
    together = Job(tmp_path / "shared", nodes=2)
    together.cycles(3)
    assert together.exchanges["n0000"].shared is True


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2}',
        b'{"version": 1, "writer": "n", "sequence": 1, "nodes": 1, "ranks": [{"rank": 0}]}',
        b'{"version": 1, "writer": "n", "sequence": 1, "nodes": 1, "ranks": 7}',
        b'{"version": 1, "writer": "n", "sequence": 1, "nodes": 1, "ranks": [3]}',
        b'{"version": 1, "writer": "n", "sequence": 1e999, "nodes": 1, "ranks": []}',
        bytes(range(128, 192)),
    ],
)
def test_a_file_that_makes_no_sense_is_no_report(content):
    assert decoded(content) is None


def test_a_report_of_a_newer_version_loses_only_what_is_new():
    report = NodeReport("n", 3, 1, (pace(0, node="n"),))
    content = json.loads(encoded(report))
    content["ranks"][0]["from_the_future"] = 1
    assert decoded(json.dumps(content).encode()) == report


def test_a_report_leaves_out_what_is_as_ever_and_loses_nothing():
    usual, other = pace(0, node="n"), RankPace(
        1, 2.0, 3, 4.0, None, 5.0, samples=6, in_sync_samples=7, on_gpu=True, cause="straggler", where="f (a\udcff.py:1)",
        phase="evaluation", seconds_without_step=8.0, waits_for_ranks=True, gpu_busy_ratio=0.9, away_in="checkpoint",
        core_wait_seconds=0.0, cores_busy_ratio=0.0, node="n", node_ranks=2, node_fastest=True, stuck=True, last_step=9,
        still_seconds=10.0, run_wait_seconds=11.0, run_loop_seconds=12.0, run_first_wait_seconds=13.0,
        run_exposed_seconds=0.0, run_cause="gc_pause", run_lost_seconds=14.0,
    )  # fmt: skip
    content = encoded(NodeReport("n", 3, 1, (usual, other)))
    first, second = json.loads(content)["ranks"]
    assert second.keys() == {field.name for field in fields(RankPace)}
    assert len(first) < len(second) / 2
    assert decoded(content) == NodeReport("n", 3, 1, (usual, other))


def test_leaving_removes_the_file(tmp_path):
    job = Job(tmp_path, nodes=1)
    job.cycles(1)
    job.exchanges["n0000"].leave()
    assert list((tmp_path / "job").iterdir()) == []


ranks = st.lists(
    st.builds(
        pace,
        rank=st.integers(0, 500),
        compute=st.floats(0, 10),
        samples=st.integers(0, 50),
        in_sync_samples=st.integers(0, 50),
        seconds_without_step=st.sampled_from([0.0, 3.0, 70.0]),
        waits_for_ranks=st.booleans(),
        phase=st.sampled_from([None, "checkpoint"]),
    ),
    unique_by=lambda p: p.rank,
    max_size=60,
)


@given(ranks, st.integers(1, 5))
def test_candidates_of_candidates_hold_the_extremes(paces, parts):
    """The rank of the shortest compute, and those that do not go on, survive each level of the tree."""
    groups = [candidates(paces[part::parts]) for part in range(parts)]
    chosen = {p.rank for p in candidates(p for group in groups for p in group)}
    assert chosen <= {p.rank for p in paces}
    if paces:
        shortest = min(p.compute_seconds for p in paces)
        assert shortest in {p.compute_seconds for p in paces if p.rank in chosen}
    missing = [p for p in paces if p.seconds_without_step and not p.waits_for_ranks]
    assert not missing or any(p.rank in chosen for p in missing)


def test_at_most_a_few_ranks_of_each_kind_are_passed_on():
    paces = [pace(rank, compute=rank / 100, samples=30, in_sync_samples=rank % 30) for rank in range(1000)]
    chosen = candidates(replace(p, phase="evaluation", seconds_without_step=5.0) for p in paces)
    assert len(chosen) <= 32
    assert [p.rank for p in chosen] == sorted(p.rank for p in chosen)


# -- while the job hangs ------------------------------------------------------------------------------------------


def states(node: int, ranks: int = 2, **fields) -> tuple[HangState, ...]:
    told = dict(doing="compute", stuck=True, seconds=30.0, waits=True, where="train.py:4", steps=7)
    told["collective"] = Collective("all_reduce", 5, "0", "4x8 Float")
    return tuple(HangState(node * ranks + rank, f"n{node:04d}", **told | fields) for rank in range(ranks))


def test_rows_give_back_the_states_that_went_into_them():
    one = replace(states(0)[0], state="sleeping", where=None, call=None, collective=None, process="stopped")
    all_states = (*states(1), *states(7), one)
    assert sorted(from_rows(json.loads(json.dumps(to_rows(all_states)))), key=lambda s: s.rank) == sorted(
        all_states, key=lambda s: s.rank
    )
    assert len(to_rows(all_states)) == 2, "those that do the same are one row"


def test_rows_of_very_many_ranks_are_small():
    everyone = [state for node in range(1250) for state in states(node, ranks=8)]
    assert len(json.dumps(to_rows(everyone))) < 60_000
    different = [replace(state, where=f"a.py:{state.rank}") for state in everyone]
    assert len(to_rows([*different, replace(everyone[0], waits=False)])) == 256
    assert not from_rows(to_rows([*different, replace(everyone[0], waits=False)]))[0].waits


@pytest.mark.parametrize("row", [1, {}, {"nodes": [["a", [[0, 1 << 30]]]], "doing": "x", "seconds": 1, "steps": 1}])
def test_rows_of_something_else_are_refused(row):
    with pytest.raises((TypeError, ValueError, KeyError, AttributeError)):
        from_rows([row])


@pytest.mark.parametrize("number", [b"1e999", b"NaN", b"-1e999"])
def test_a_pace_without_an_end_is_no_report(number):
    whole = encoded(NodeReport("x", 1, 1, (pace(3),)))
    damaged = re.sub(rb'"compute_seconds":[^,}]+', b'"compute_seconds":' + number, whole)
    assert decoded(whole) is not None
    assert damaged != whole
    assert decoded(damaged) is None


def test_a_pace_without_an_end_on_the_board_is_passed_over(tmp_path):
    board = Board("run", str(tmp_path / "run"), "n", root=tmp_path / "boards")
    board.publish(3, [], pace=pace(3))
    assert [each.rank for each in board.paces()] == [3]
    board.publish(3, [], pace=replace(pace(3), seconds=math.nan))
    assert board.paces() == ()


def test_a_report_cannot_fill_the_memory():
    row = to_rows(states(0))[0]
    many = row | {"nodes": [["a", [[0, 100_000]] * 9]]}
    with pytest.raises(ValueError):
        from_rows([many])
    large = from_rows([row | {"nodes": [["a", [[0, 69_999]]]]}])
    assert len(from_rows(to_rows(large))) == 70_000


@pytest.mark.parametrize("nodes", [2, 90])
def test_files_of_others_in_the_folder_hide_no_node(tmp_path, nodes):
    """Names that are no UTF-8, contents that nobody can read, a folder, a FIFO, a link."""
    folder = tmp_path / "job"
    folder.mkdir()
    names = [f"node-{kind}.json".encode() for kind in ("deep", "folder", "fifo", "link", "infinite")]
    deep, inner, fifo, link, infinite = (os.path.join(os.fsencode(folder), name) for name in names)
    with open(os.path.join(os.fsencode(folder), b"node-\xff\xfe.json"), "wb") as file:
        file.write(b"[" * 50_000)
    with open(deep, "wb") as file:
        file.write(b'{"version": 1, "ranks": ' + b"[" * 50_000)
    with open(infinite, "wb") as file:
        file.write(encoded(NodeReport("x", 1, 1, (pace(3),))).replace(b'"steps":', b'"steps":1e999,"x":'))
    os.mkdir(inner)
    os.mkfifo(fifo)
    os.symlink("/dev/zero", link)
    job = Job(tmp_path, nodes=nodes)
    for exchange in job.exchanges.values():
        exchange._read = lambda path: read_small(path, MAX_BYTES)
    job.cycles(5)
    assert job.exchanges["n0000"].nodes == nodes
    assert job.heard["n0000"]


@pytest.mark.parametrize("nodes", [2, 90])
def test_each_node_hears_what_all_ranks_do(tmp_path, nodes):
    job = Job(tmp_path, nodes=nodes)
    names = list(job.exchanges)
    job.cycles(3)
    assert all(exchange.hang == () for exchange in job.exchanges.values())
    job.hang = {name: states(number) for number, name in enumerate(names)}
    job.cycles(3)
    for number, name in enumerate(names):
        heard = {(state.rank, state.node) for state in job.exchanges[name].hang}
        assert heard | {(s.rank, s.node) for s in states(number)} == {
            (2 * node + rank, f"n{node:04d}") for node in range(nodes) for rank in range(2)
        }
    job.hang = {}
    job.cycles(3)
    assert all(exchange.hang == () for exchange in job.exchanges.values())


def test_files_of_killed_attempts_are_removed_after_an_hour(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    killed = folder / "node-n0009-00000000.json"
    killed.write_bytes(encoded(NodeReport("n0009", 7, 1, (pace(9),))))
    job = Job(tmp_path, nodes=2)
    job.cycles(30)
    assert killed.exists()
    job.seconds += 3600
    job.cycles(30)
    assert not killed.exists()
    assert job.exchanges["n0000"].nodes == 2
    assert {path.name for path in folder.iterdir()} == {"node-n0000.json", "node-n0001.json"}
