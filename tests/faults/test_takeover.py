"""One rank serves its node, and shows the machine once. If it is stopped, or hangs with the GIL, another one serves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import urllib.error
from pathlib import Path

import psutil
import pytest

from telemetry.node.board import STILL_SECONDS, Board, ServerLock
from telemetry.node.server import PORTS_TRIED
from telemetry.util.identity import identify
from tests.faults.memory_group import LIMIT, limited_group
from tests.faults.processes import Child, fetch, of_rank, ranks_in, samples, told, wait_for, write
from tests.free_ports import free_ports

NS = 10**9

RANK = """
import ctypes, sys
from tests.faults.memory_group import enter
for group in sys.argv[2:]:
    enter(group)
import telemetry
telemetry.start("run", run=sys.argv[1], interval_seconds=0.2, log_interval_seconds=0.5)
source = telemetry.watch(iter(lambda: 1, 0))
for _ in range(5):
    next(source)
print("ready", flush=True)
while sys.stdin.readline() == "hold\\n":
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # a C call that keeps the GIL until there is a byte
telemetry.stop()
"""


class Job:
    """Ranks of one node as real processes. The first one to start serves."""

    def __init__(self, folder, ranks: int, *, run: str = "r", groups: dict[int, Path] | None = None) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.port = free_ports()
        write(folder, "rank.py", RANK)
        self.ranks = []
        for rank in range(ranks):
            self.add(rank, ranks, run, *([groups[rank]] if groups and rank in groups else []))

    def add(self, rank: int, ranks: int, run: str = "r", *group: Path) -> None:
        env = of_rank(rank, ranks, TELEMETRY_PORT=str(self.port))
        self.ranks.append(Child(self.folder / "rank.py", run, *group, cwd=self.folder, env=env))
        assert self.ranks[-1].line() == "ready"

    def stop(self, rank: int, signum: int = signal.SIGSTOP) -> None:
        self.ranks[rank].send(signum)

    def target(self) -> str:
        """Where the node is served, according to the target file."""
        (path,) = (self.folder / "run" / "targets").glob("*.json")
        (entry,) = json.loads(path.read_text())
        (target,) = entry["targets"]
        return target

    def page(self, target: str) -> str | None:
        """The page that is served there; None if nothing is served."""
        try:
            return fetch(f"http://{target}/metrics", timeout=2.0)
        except (urllib.error.URLError, OSError):
            return None

    def serving(self) -> list[int]:
        """The ranks that serve, at whatever port."""
        alive = [rank for rank, child in enumerate(self.ranks) if child.process.poll() is None]
        return [r for r in alive if any(_listens(self.ranks[r].pid, self.port + n) for n in range(PORTS_TRIED))]

    def moved_from(self, *targets: str) -> str:
        """The target once the node is served at another port than these."""
        wait_for(lambda: self.target() not in targets, f"served elsewhere than at {targets}")
        return self.target()

    def returned_to(self, target: str) -> None:
        wait_for(lambda: self.target() == target and self.page(target), f"served at {target}")

    def end(self) -> None:
        for child in self.ranks:
            if child.process.poll() is None:
                child.tell()
        for child in self.ranks:
            child.wait()


@pytest.fixture
def job(tmp_path):
    made = []

    def start(ranks, folder=".", **more):
        made.append(Job(tmp_path / folder, ranks, **more))
        return made[-1]

    yield start
    for each in made:
        for child in each.ranks:
            child.__exit__()


def steps_of(page):
    """The ranks whose steps are shown."""
    return ranks_in(page or "", "training_last_step_timestamp_seconds").keys()


def read_page(job, target, *ranks):
    """A page with the steps of these ranks, and with a second reading of the machine, which its ratios need."""

    def complete():
        page = job.page(target)
        return page if steps_of(page) == set(ranks) and "training_host_cpu_ratio" in samples(page) else None

    return wait_for(complete, f"ranks {ranks} and the machine at {target}")


def assert_machine_once(page, run):
    """Each figure of the machine and its cgroup is there once, by run and node."""
    ((info, _), *_) = samples(page)["training_run_info"]
    of_machine = {n: s for n, s in samples(page).items() if n.startswith(("training_host_", "training_cgroup_"))}
    for name, found in of_machine.items():
        resources = [labels.pop("resource", "") for labels, _ in found]
        assert len(resources) == len(set(resources)), name
        assert all(labels == {"run": run, "node": info["node"]} for labels, _ in found), name
    total = sum(value for _, value in of_machine["training_host_memory_total_bytes"])
    assert total == psutil.virtual_memory().total


def test_the_machine_is_shown_once_however_many_ranks_and_runs_are_on_it(job):
    first, second = job(3), job(2, "another", run="s")
    page = read_page(first, f"127.0.0.1:{first.port}", "0", "1", "2")
    assert_machine_once(page, "r")
    assert ranks_in(page, "training_process_threads").keys() == {"0", "1", "2"}
    assert_machine_once(read_page(second, f"127.0.0.1:{second.port}", "0", "1"), "s")

    at = first.target()
    first.stop(0)
    assert_machine_once(read_page(first, first.moved_from(at), "0", "1", "2"), "r")  # nothing of what rank 0 had read
    first.stop(0, signal.SIGCONT)
    first.returned_to(at)
    first.end()
    second.end()


def test_ranks_in_different_cgroups_show_the_one_of_the_serving_rank(job):
    name = "training_cgroup_memory_limit_bytes"
    with limited_group() as group:
        job = job(2, groups={1: group.folder})
        first = f"127.0.0.1:{job.port}"
        page = read_page(job, first, "0", "1")
        assert LIMIT not in [limit for _, limit in samples(page).get(name, ())], "rank 0 serves, rank 1 has the limit"
        job.ranks[0].process.kill()
        page = read_page(job, first, "1")
        assert_machine_once(page, "r")
        assert [limit for _, limit in samples(page)[name]] == [LIMIT]
        job.end()


@pytest.mark.parametrize("how", ["stopped", "holds the GIL"])
def test_another_rank_serves_while_the_first_one_does_not_answer(how, job, tmp_path):
    job = job(2)
    first = job.target()
    assert first == f"127.0.0.1:{job.port}"
    wait_for(lambda: steps_of(job.page(first)) == {"0", "1"}, "steps of both ranks")
    if how == "stopped":
        job.stop(0)
    else:
        job.ranks[0].tell("hold")
    second = job.moved_from(first)
    assert job.page(first) is None, "nobody answers there"
    assert steps_of(job.page(second)) == {"0", "1"}, "the last state of the first rank is shown, and how old it is"

    if how == "stopped":
        job.stop(0, signal.SIGCONT)
    else:
        os.write(job.ranks[0].process.stdin.fileno(), b"x")
    job.returned_to(first)
    wait_for(lambda: job.page(second) is None, "the second one serves no more")
    assert steps_of(job.page(first)) == {"0", "1"}
    job.end()
    held = "is still held by a rank that does not answer, or by another program; until it is free"
    assert told(tmp_path / "run", "endpoint") == [
        f"port {job.port}, at which this node was served, {held}, the metrics of this run are at port {second[10:]}",
        f"the metrics of this run are at port {job.port} again",
    ]
    assert list((tmp_path / "run" / "targets").iterdir()) == []


def test_two_ranks_may_be_stopped_and_one_of_them_killed(job):
    job = job(3)
    first = job.target()
    job.stop(0)
    second = job.moved_from(first)
    server = next(r for r in (1, 2) if _listens(job.ranks[r].pid, int(second.rpartition(":")[2])))
    job.stop(server)
    third = job.moved_from(first, second)
    assert ranks_in(job.page(third)).keys() == {"0", "1", "2"}
    job.stop(server, signal.SIGCONT)
    job.ranks[0].process.kill()
    job.returned_to(first)
    wait_for(lambda: ranks_in(job.page(first)).keys() == {"1", "2"}, "a page without the one that was killed")
    for target in (second, third):
        wait_for(lambda target=target: job.page(target) is None, "one serves")
    job.end()


def test_ranks_meet_again_on_a_board_that_was_removed(job, tmp_path):
    """A cleaner of /dev/shm removes the board. Ranks that were there and a new one come to the same endpoint."""
    job = job(2)
    first = f"127.0.0.1:{job.port}"
    board = Board("r", str(tmp_path / "run"), identify("r", None).node).path

    def both_are_there():
        """On the board itself, too: a page is still served from what was read of a board that was removed."""
        return len(list(board.glob("rank-*"))) == 2 and steps_of(job.page(first)) == {"0", "1"}

    wait_for(both_are_there, "steps of both ranks")
    for _ in range(2):
        shutil.rmtree(board.rename(board.with_name(f"removed-{os.getpid()}")))  # at one moment
        wait_for(both_are_there, "both are back")
        assert job.target() == first
        assert job.serving() == [0]
    job.add(2, 3)
    wait_for(lambda: steps_of(job.page(first)) == {"0", "1", "2"}, "the new one is there")
    assert job.serving() == [0]
    job.ranks[0].process.kill()
    wait_for(lambda: steps_of(job.page(first)) == {"1", "2"}, "another one serves at the same port")
    assert len(job.serving()) == 1
    job.end()
    assert told(tmp_path / "run", "endpoint") == []
    assert not board.exists()


def _listens(pid: int, port: int) -> bool:
    return port in {c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"}


# -- the lock, with a clock set by hand -------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from telemetry.node.board import ServerLock
taken = ServerLock(Path(sys.argv[1]))
for line in sys.stdin:
    if line.startswith("take"):
        print(taken.take(), flush=True)
    else:
        taken.beat()
        print("beaten", flush=True)
"""


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "lock"


@pytest.fixture
def other(tmp_path, lock):
    """Another process that may hold the lock."""
    with Child(write(tmp_path, "holder.py", HOLDER), lock, cwd=tmp_path) as child:
        yield child


class Clock:
    now = 1000 * NS

    def __call__(self) -> int:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += int(seconds * NS)


def test_the_lock_of_a_holder_that_stands_still_is_taken(other, lock):
    clock = Clock()
    mine = ServerLock(lock, clock)
    assert other.ask("take") == "True"
    for _ in range(20):
        clock.pass_(1)
        other.ask("beat")
        assert not mine.take(), "it lives"
    seconds = 0
    while not mine.take() and seconds < 60:
        clock.pass_(1)
        seconds += 1
    assert STILL_SECONDS < seconds <= 8, "within 10 s, with a second for each look and each sign"
    assert mine.take(), "it is kept"
    assert other.ask("take") == "False", "it goes on, and sees that its lock counts no more"
    other.ask("beat")
    clock.pass_(1)
    assert mine.take()


def test_who_stood_still_himself_waits_again(other, lock):
    """All processes of a machine may have been stopped at once. So the others get time before they count as stopped."""
    clock = Clock()
    mine = ServerLock(lock, clock)
    assert other.ask("take") == "True"
    for seconds in (0, 3600, 1):
        clock.pass_(seconds)
        assert not mine.take()
    other.process.kill()
    other.process.wait()
    assert mine.take(), "that of a dead one is free at once"


def test_a_forked_child_releases_no_lock(other, lock):
    mine = ServerLock(lock)
    assert mine.take()
    pid = os.fork()
    if pid == 0:
        mine.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert other.ask("take") == "False"
