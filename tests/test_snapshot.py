"""When a snapshot is taken, how the ranks agree on its steps, and snapshots of whole runs.

Ranks tick when a test says so, by a clock that the test sets.
"""

from __future__ import annotations

import gzip
import json
import os
from types import SimpleNamespace

import msgspec
import pytest
from torch.utils.data import DataLoader

import telemetry
from telemetry.config import Config
from telemetry.model.records import RECORDED, REFUSED, SKIPPED, Step
from telemetry.safety import files
from telemetry.snapshot import control as snapshots
from telemetry.snapshot import plan
from telemetry.snapshot import snapshot_command as command
from telemetry.snapshot.control import SnapshotControl, Trigger
from telemetry.snapshot.plan import REQUEST, Meeting, Plan, Request, new_id
from telemetry.snapshot.snapshot_command import snapshot
from telemetry.util.identity import Identity
from tests.data_sets import Numbers
from tests.running_agent import log_lines
from tests.snapshot_recording import mark, marks


class Clock:
    """Stands for the time of the ranks, and for the module `time` of the command."""

    def __init__(self) -> None:
        self.now = 1.7e9
        self.on_sleep = lambda: None

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += 10 * seconds
        self.on_sleep()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(plan, "unix_time", clock.time)
    monkeypatch.setattr(snapshots, "now_ns", lambda: int(clock.now * 1e9))
    return clock


class Rank:
    """One rank that trains: 10 steps a second, of which ``steps`` have ended."""

    def __init__(self, folder, rank: int, world_size: int, *, far: bool = False, **settings) -> None:
        self.steps, self.lines, self.threads = 100, [], []
        tracker = SimpleNamespace(
            recorder=None, slow_path=lambda: None, thread=0, ring=SimpleNamespace(closed=0), loaders=None
        )
        self.control = SnapshotControl(
            Config(interval_seconds=1.0, **settings),
            Identity("r", rank, rank, world_size, "n", 1, "plain"),
            folder,
            tracker=tracker,
            profilers=SimpleNamespace(),
            errors=None,
            wall=None,
            event_log=SimpleNamespace(write=self.lines.append),
            job=SimpleNamespace(ranks_elsewhere=lambda _: far),
            board=None,
        )
        self.control.start()
        self.control.add_steps([Step(0.1, 0.0)] * 40)

    def tick(self, cause: str | None = None) -> None:
        self.control._tracker.ring.closed = self.steps
        self.control.tick(SimpleNamespace(active_cause=cause, open_record=lambda: None))
        if self.control._export is not None:
            self.threads.append(self.control._export.thread)

    @property
    def plan(self) -> Plan | None:
        """The plan that this rank is about to record."""
        export = self.control._capture._export
        return export and export.plan

    def over(self) -> None:
        """The run ends, or at least this snapshot does."""
        self.control.end()
        for thread in self.threads:
            thread.join()

    @property
    def results(self) -> list[tuple[str, str]]:
        return [(line.result, line.why) for line in self.lines]


@pytest.fixture
def make(tmp_path, clock):
    made: list[Rank] = []

    def ranks(count: int, **settings) -> list[Rank]:
        made.extend(Rank(tmp_path, rank, count, **settings) for rank in range(count))
        return made[-count:]

    yield ranks
    for each in made:
        each.over()


def ask(folder, clock, rank: int | None = None, steps: int = 5) -> Request:
    """What the command does."""
    clock.now += 0.01
    request = Request(new_id(), REQUEST, rank, steps, "a test")
    Meeting(folder / "snapshots").ask(request)
    return request


def tick(*ranks: Rank, times: int = 1) -> list[Plan | None]:
    for _ in range(times):
        for each in ranks:
            each.tick()
    return [each.plan for each in ranks]


# -- agreement -----------------------------------------------------------------------------------------------------


def test_a_single_process_agrees_with_itself_at_once(make):
    (rank,) = make(1)
    tick(rank)
    assert rank.plan is None
    assert rank.control.request(None, 3)
    tick(rank)
    assert (rank.plan.request.steps, rank.plan.folder) == (3, f"request-step{rank.plan.first_step}")
    assert 100 + 3 / 0.1 < rank.plan.first_step < 140


def test_all_ranks_record_the_steps_of_the_rank_that_was_first(make, tmp_path, clock):
    ranks = make(4)
    request = ask(tmp_path, clock)
    for each, steps in zip(ranks, (100, 103, 99, 100), strict=True):
        each.steps = steps
    plans = tick(*ranks)
    assert len(set(plans)) == 1
    assert plans[0].request == request
    assert plans[0].first_step > 100 + 3 / 0.1, "three ticks ahead"
    tick(*ranks)
    assert len(list((tmp_path / "snapshots" / ".meeting").glob("*.plan.json"))) == 1


def test_a_rank_that_reads_the_plan_too_late_skips_it_and_says_so(make, tmp_path, clock):
    first, late = make(2)
    ask(tmp_path, clock)
    tick(first)
    late.steps = first.plan.first_step - 1
    tick(late)
    recorder = late.control._tracker.recorder
    recorder.boundary(late.steps, opens=True)
    tick(late)
    ((result, why),) = late.results
    assert (result, "too late" in why) == (SKIPPED, True)
    assert first.plan is not None


def test_of_two_ranks_that_decide_at_the_same_moment_one_wins(make, tmp_path, clock, monkeypatch):
    first, second = make(2)
    ask(tmp_path, clock)
    write = Meeting._write

    def other_first(self, name, message):
        monkeypatch.setattr(Meeting, "_write", write)
        second.steps = 500
        tick(second)
        return write(self, name, message)

    monkeypatch.setattr(Meeting, "_write", other_first)
    tick(first)
    assert first.plan is None
    tick(first)
    assert first.plan == second.plan
    assert first.plan.first_step > 500


def test_requests_of_several_ranks_at_once_become_one_and_those_of_persons_do_not(make, tmp_path, clock):
    ranks = make(3)
    for each in ranks:
        each.control.request(None, 5)
    assert len(set(tick(*ranks, times=3))) == 1
    ask(tmp_path, clock), ask(tmp_path, clock)
    for count in (2, 3, 3):
        for each in ranks:
            each.over()
        tick(*ranks, times=2)
        assert len(list((tmp_path / "snapshots" / ".meeting").glob("*.plan.json"))) == count


def test_one_rank_alone(make, tmp_path, clock):
    ranks = make(3)
    ask(tmp_path, clock, rank=2)
    assert [plan is not None for plan in tick(*ranks, times=2)] == [False, False, True]


def test_a_busy_rank_skips_the_next_one_and_decides_on_none(make, tmp_path, clock):
    busy, other = make(2)
    busy.control.request(0, 5)
    tick(busy, other)
    ask(tmp_path, clock)
    tick(busy)
    assert busy.results == []
    tick(other, busy)
    assert other.plan is not None
    assert busy.results == [(SKIPPED, "another snapshot is in progress")]


def test_a_rank_that_has_taken_enough_refuses_and_names_the_setting(make, tmp_path, clock):
    (rank,) = make(1, max_snapshots=1)
    ask(tmp_path, clock)
    tick(rank)
    rank.over()
    ask(tmp_path, clock)
    tick(rank, times=3)
    assert rank.results[1:] == [(REFUSED, "this run has taken its max_snapshots = 1")]


def test_what_others_have_left_is_not_followed(make, tmp_path, clock):
    (rank,) = make(1)
    old = ask(tmp_path, clock)
    tick(rank)
    rank.over()
    (later,) = make(1)
    Meeting(tmp_path / "snapshots").withdraw(old)
    ask(tmp_path, clock)
    clock.now += 1000
    tick(later)
    assert later.plan is None
    assert [path.name for path in (tmp_path / "snapshots" / ".meeting").iterdir()] == ["1.plan.json"]


BAD = [b"", b'{"kind": "stall"}', b"\xff\xfe", b"9" * 2_000_000, b'{"stall":' + b"[" * 100_000]


@pytest.mark.parametrize("content", BAD)
@pytest.mark.parametrize("name", ["1700000000000-0000000a.request", "1.plan"])
def test_an_invalid_file_is_an_error_once(make, tmp_path, clock, name, content):
    (rank,) = make(1)
    good = ask(tmp_path, clock)
    (tmp_path / "snapshots" / ".meeting" / f"{name}.json").write_bytes(content)
    failed = 0
    for _ in range(3):
        try:
            tick(rank)
        except (OSError, msgspec.MsgspecError, RecursionError):
            failed += 1
    assert (failed, rank.plan.request) == (1, good)


def test_ranks_of_two_nodes_agree_though_each_sees_files_late(make, tmp_path, clock, monkeypatch):
    """What NFS shows late: the other node's plan, by up to 60 s."""
    monkeypatch.setattr(snapshots, "caches_folders", lambda _: True)
    near, far = make(2, far=True)
    near.control.request(None, 5)
    tick(near)
    far.steps += int(60 / 0.1)
    tick(far)
    assert far.plan.first_step - 2 > far.steps
    assert near.plan.first_step < near.steps + 100 / 0.1, "and nobody waits for long"


@pytest.mark.parametrize(("kind", "caches"), [("nfs4", True), ("fuse.sshfs", True), ("ext4", False)])
def test_file_systems_that_show_a_folder_late(kind, caches, tmp_path, monkeypatch):
    device = tmp_path.stat().st_dev
    mount = f"36 21 {os.major(device)}:{os.minor(device)} / /data rw shared:1 - {kind} server:/export rw"
    (tmp_path / "mountinfo").write_text(f"21 1 0:1 / / rw - overlay overlay rw\n{mount}\n")
    monkeypatch.setattr(files, "MOUNTS", tmp_path / "mountinfo")
    assert files.caches_folders(tmp_path) is caches
    assert files.caches_folders(tmp_path / "missing") is False


@pytest.mark.parametrize(("caches", "status"), [(True, 0), (False, 1)], ids=["nfs", "local disk"])
def test_the_command_waits_for_nodes_that_see_files_late(tmp_path, make, clock, monkeypatch, capsys, caches, status):
    """The rank sees the request after 60 s, and this node its line of the log after another 60 s."""
    log = tmp_path / "logs" / "rank-0.1.jsonl"
    log.parent.mkdir()
    start = {"event": "run_start", "settings": {"interval_seconds": 1.0}}
    log.write_text(json.dumps(start) + "\n")
    (rank,) = make(1)
    began = clock.now

    def train() -> None:
        if clock.now > began + 60 and rank.plan is None:
            tick(rank)
        if rank.plan is not None and clock.now > began + 120:
            said = {"id": rank.plan.request.id, "result": RECORDED, "first_step": 7, "last_step": 8, "path": "trace.gz"}
            log.write_text(json.dumps(start) + "\n" + json.dumps({"event": "snapshot", "rank": 0, **said}) + "\n")

    clock.on_sleep = train
    monkeypatch.setattr(command, "time", clock)
    monkeypatch.setattr(command, "caches_folders", lambda _: caches)
    assert snapshot(str(tmp_path), None, 5, 300) == status
    said, error = capsys.readouterr()
    if caches:
        assert error == ""
        assert said.endswith("trace.gz\n")
    else:
        assert "rank 0 does not answer within 15 s" in error


# -- when stalls trigger one ---------------------------------------------------------------------------------------

CAUSE = "uneven_batches"


def trigger(most: int = 3) -> Trigger:
    return Trigger(Config(snapshot_settle_seconds=10, snapshot_cooldown_seconds=100, max_snapshots=most))


def fired(one: Trigger, causes: list[str | None], since: int = 0) -> list[int]:
    """The seconds at which it fires, asked once a second, each taken."""
    found = []
    for now, cause in enumerate(causes, since):
        if one.stalled(now, cause):
            found.append(now)
            one.took(now)
    return found


@pytest.mark.parametrize(
    ("causes", "at"),
    [([CAUSE] * 300, [10]), (["straggler"] * 300, [20]), (["checkpoint"] * 300, []),
     ([CAUSE] * 9 + [None] + [CAUSE] * 9, []), ([CAUSE] * 12 + [None] + [CAUSE] * 288, [10, 110])],
    ids=["once, when it has held", "the straggler first", "a trace of steps shows no checkpoint",
         "closed before it has settled", "the next one waits for the cooldown"],
)  # fmt: skip
def test_a_stall_triggers_one_snapshot(causes, at):
    assert fired(trigger(), causes) == at


def test_another_s_snapshot_shows_the_stall_too_and_there_is_a_maximum():
    one = trigger()
    one.stalled(0, CAUSE)
    one.took(5)
    assert fired(one, [CAUSE] * 1000, since=6) == []
    assert fired(trigger(most=0), [CAUSE] * 100) == []


@pytest.mark.parametrize(
    ("setting", "gpu", "asked"), [("auto", False, 1), ("auto", True, 0), ("on", True, 1), ("off", False, 0)]
)
def test_a_stall_asks_for_none_on_a_gpu_unless_it_is_told_to(make, monkeypatch, setting, gpu, asked):
    monkeypatch.setattr(snapshots, "on_gpu", lambda: gpu)
    (rank,) = make(1, snapshot_settle_seconds=0, snapshot_on_stall=setting)
    rank.tick(CAUSE)
    assert (rank.plan is not None) == asked
    assert not asked or rank.plan.request.reason == CAUSE


# -- whole runs ----------------------------------------------------------------------------------------------------


def recorded(agent, loader, steps: int) -> list[dict]:
    """Train until a snapshot of so many steps is taken. Returns the events of its trace."""
    counts, asked = agent.snapshots.counts, 0
    for step, _ in enumerate(loader, 1):
        mark(step)
        if counts[RECORDED]:
            break
        if step >= 10 and sum(counts.values()) == asked:  # again, if a busy machine was too late for the first
            assert telemetry.request_snapshot(steps=steps)
            asked += 1
    telemetry.stop()
    (path,) = agent.run_dir.glob("snapshots/request-step*/rank-0.*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    first = int(path.parent.name.removeprefix("request-step"))
    assert marks(events) == [*range(first, first + steps)]
    return events


@pytest.fixture
def agent(tmp_path):
    return telemetry.start(tmp_path / "run", port=0, interval_seconds=0.1, start_line=False)


def test_a_whole_run_with_the_fetches_of_its_workers(agent, capfd):
    iterator = iter(DataLoader(Numbers(100_000, seconds=0.02), num_workers=2, prefetch_factor=1))
    pids = [worker.pid for worker in iterator._workers]
    events = recorded(agent, iterator, 6)
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] in pids}
    assert named == dict(zip(pids, ["DataLoader worker 0", "DataLoader worker 1"], strict=True))
    fetches = [e for e in events if e.get("cat") == "dataloader_worker"]
    assert {e["pid"] for e in fetches} == set(pids)
    assert all(e["dur"] >= 20_000 for e in fetches)
    steps = [e for e in events if e["name"].startswith("ProfilerStep#")]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    for fetch in fetches:  # on the trace's own clock: those in progress at some time of the recording
        assert begin - 1e6 < fetch["ts"] + fetch["dur"]
        assert fetch["ts"] < end + 1e6
    assert capfd.readouterr() == ("", "")


def test_a_trace_without_a_kernel_is_told_where_a_gpu_trains(agent, monkeypatch):
    monkeypatch.setattr(snapshots, "on_gpu", lambda: True)
    recorded(agent, DataLoader(Numbers(100_000, seconds=0.02), num_workers=1), 3)
    (told,) = [line for line in log_lines(agent) if line["event"] == "error" and line["source"] == "snapshot"]
    assert "has no kernel of the GPU" in told["message"]


def test_a_request_must_be_valid_and_needs_an_agent():
    for arguments in (dict(steps=0), dict(steps=51), dict(rank=-1)):
        with pytest.raises(ValueError, match="snapshot"):
            telemetry.request_snapshot(**arguments)
    with pytest.raises(TypeError, match="steps"):
        telemetry.request_snapshot(steps="5")
    assert telemetry.request_snapshot() is False, "no agent runs"
