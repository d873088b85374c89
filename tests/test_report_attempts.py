"""The attempts of a run: how each ended, what was lost, and what the run cost."""

from __future__ import annotations

import random
import re
from datetime import datetime, timedelta, timezone

import msgspec
import pytest

from telemetry.config import Config, SettingError
from telemetry.log.reader import load
from telemetry.model.records import CATEGORIES
from telemetry.report.as_text import as_text
from telemetry.report.goodput import Experience, best_interval, ettr
from telemetry.report.summary import report_of
from tests.report_logs import START, line, text_of, totals, write

T0 = datetime(2026, 1, 1, tzinfo=timezone.utc)
LATER = T0.timestamp() + 1e6


def at(seconds: float) -> str:
    return (T0 + timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Process:
    """One process of a run: it starts, has steps of a second from five seconds on, and writes checkpoints."""

    def __init__(self, folder, rank=0, *, begin: float, pid: int, world=1, node="n", clock=0.0, **head):
        self.folder, self.rank, self.pid, self.node = folder, rank, pid, node
        self.begin, self.clock, self.life = begin, clock, f"{rank:04x}{pid:04x}"
        head = dict(launcher="plain", launch=f"{pid}-1", settings={"log_interval_seconds": 10.0}) | head
        self.resumption, self.kills, self.lines = {}, None, []
        self.hang = None  # its place, begin, the time from which it is known, and its end
        self.line("run_start", 1.0, started=at(begin + 1), process_started=at(begin), world_size=world,
                  life=self.life, **head)  # fmt: skip

    def line(self, event, moment, **fields):
        written = at(self.begin + moment + (self.clock if moment > 3 else 0))  # a clock that is stepped is so early
        self.lines.append(line(event, self.rank, time=written, pid=self.pid, node=self.node) | fields)
        return self

    def totals(self, seconds: float, steps: int) -> dict:
        place, began, noticed, until = self.hang or ("compute", seconds, seconds, None)
        stuck = max(0.0, min(seconds, until or seconds) - began)
        loop = max(0.0, seconds - 5 - stuck)
        ledger = dict.fromkeys(CATEGORIES, 0.0) | {"startup": min(4.0, seconds - 1)}
        ledger |= {"compute": 0.9 * loop, "data_wait": 0.1 * loop}
        ledger["data_wait" if place == "startup" else place] += stuck
        counted = {} if self.kills is None else {"oom_kills_total": self.kills}
        counted |= {"stuck_total_seconds": {place: stuck}} if stuck and seconds >= noticed else {}
        return dict(
            steps_total=steps, optimizer_steps_total=steps, wall_seconds=seconds - 1, ledger_total_seconds=ledger
        ) | dict(resumption=self.resumption) | counted  # fmt: skip

    def saved(self, step: int, moment: float, **more):
        """A checkpoint, which is written at some second."""
        totals = self.totals(moment, step)
        loop = {name: totals["ledger_total_seconds"][name] for name in ("data_wait", "compute")}
        save = dict(name="checkpoint", category="checkpoint", seconds=0.5, complete=True, holds_optimizer=True)
        save |= dict(steps_total=step, optimizer_steps_total=step, loop_seconds=loop)
        save |= {name: totals[name] for name in ("stuck_total_seconds",) if name in totals}
        return self.line("phase", moment, **save | more)

    def checkpoint(self, step: int, **more):
        return self.saved(step, 5 + step, **more)

    def stuck(self, place: str, opened: float, before: float, *, until: float | None = None):
        """Without progress: it is noticed after some seconds, and may be over at a time."""
        self.hang = place, opened - before, opened, until
        return self

    def counts(self, kills: int | None):
        """From now on its lines have this value of the counter of its cgroup."""
        self.kills = kills
        return self

    def resumed(self, step: int):
        self.resumption |= dict(resumed_step=step, resumed_from="optimizer", restore_seconds=1.0)
        return self

    def window(self, seconds: float, steps: int | None = None, **more):
        steps = max(0, int(seconds - 5)) if steps is None else steps
        return self.line("window", seconds, **self.totals(seconds, steps) | more)

    def end(self, seconds: float, **how):
        return self.line("run_end", seconds, **self.totals(seconds, max(0, int(seconds - 5))), **how).write()

    def beat(self, seconds: float):
        (self.folder / "attempts").mkdir(exist_ok=True)
        state = self.totals(seconds, int(seconds - 5)) | dict(
            life=self.life, unix_seconds=T0.timestamp() + self.begin + seconds
        )
        (self.folder / "attempts" / f"{self.life}.beat").write_bytes(msgspec.json.encode(state) + b"  \n")
        return self

    def write(self, torn: bytes = b""):
        (self.folder / "logs").mkdir(exist_ok=True)
        path = self.folder / "logs" / f"rank-{self.rank}.{self.pid}.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in self.lines) + torn)


def job(folder, now=LATER) -> dict:
    found = msgspec.to_builtins(report_of(folder, load(folder), now).values.job)
    goodput = found["goodput"]
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["wall_seconds"], rel=1e-3, abs=0.01)
    return found


def told(folder, *names: str) -> list:
    """Of each attempt one or some of the fields."""
    attempts = [[each[name] for name in names] for each in job(folder)["attempts"]]
    return [each[0] for each in attempts] if len(names) == 1 else [*map(tuple, attempts)]


def spent(folder) -> dict[str, float]:
    return job(folder)["goodput"]["seconds"]


# -- where attempts resume, and what they lose ----------------------------------------------------------------------


def test_a_kill_costs_the_steps_after_the_checkpoint_and_the_downtime(tmp_path):
    Process(tmp_path, begin=0, pid=1).window(15).checkpoint(10).window(25).beat(28).write(torn=b'{"time":"2026-')
    Process(tmp_path, begin=60, pid=2).resumed(10).window(15).end(25)
    first, second = told(tmp_path, "end", "ended", "steps", "lost_steps", "resumed_from_step")
    assert first == ("killed", at(28), 23, 13, None), "the heartbeat is the newest"
    assert second == ("finished", at(85), 20, 0, 10)
    assert spent(tmp_path)["redone"] == pytest.approx(13)
    assert spent(tmp_path)["down"] == pytest.approx(32)
    assert spent(tmp_path)["restore"] == pytest.approx(1)
    assert job(tmp_path)["goodput"]["wall_seconds"] == pytest.approx(85)


@pytest.mark.parametrize(
    ("end", "later", "head", "resumed", "new"),
    [
        pytest.param({"exception": "ValueError"}, 600, {}, 0, True, id="failed, and run again"),
        pytest.param({"exception": "ValueError"}, 20, {}, 0, False, id="at once, as a loop in a shell does"),
        pytest.param({}, 20, {}, 0, True, id="finished, and run again"),
        pytest.param({"exception": "ValueError"}, 600, {}, 10, False, id="it loads a checkpoint"),
        pytest.param({"exit_status": 3}, 600, {"restarts": 1}, 0, False, id="the launcher counts it"),
        pytest.param({"exit_status": 3}, 600, {"launcher": "kubernetes"}, 0, False, id="the pod is restarted"),
    ],
)
def test_a_later_start_that_resumes_nothing_is_a_new_run_of_the_folder(tmp_path, end, later, head, resumed, new):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).end(25, **end)
    second = Process(tmp_path, begin=25 + later, pid=2, **head)
    (second.resumed(resumed) if resumed else second).window(15).end(25)
    found = report_of(tmp_path, load(tmp_path), LATER).values
    assert [len(found.ranks), len(found.job.attempts), found.job.goodput.seconds["down"] > 0] == (
        [1, 1, False] if new else [2, 2, True]
    )
    how = "failed (ValueError)" if end else "finished"
    said = f"This is a new run in the same folder; the run before {how} at {at(25)}, after 20 steps."
    assert (said in found.verdict) is new


def test_an_attempt_that_ends_before_it_loads_its_checkpoint_is_no_new_run(tmp_path):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25).write()
    Process(tmp_path, begin=600, pid=2).window(4).write()
    Process(tmp_path, begin=1200, pid=3).resumed(10).end(25)
    assert told(tmp_path, "end") == ["killed", "killed", "finished"]


def test_a_checkpoint_that_is_not_complete_does_not_count(tmp_path):
    process = Process(tmp_path, begin=0, pid=1).checkpoint(5).checkpoint(10, complete=False)
    process.checkpoint(12, holds_optimizer=False).window(25).write()
    assert told(tmp_path, "end", "lost_steps") == [("killed", 15)]


def test_a_checkpoint_of_all_ranks_is_complete_when_all_have_written_it(tmp_path):
    Process(tmp_path, 0, begin=0, pid=1, world=2).checkpoint(5).checkpoint(10).window(25).write()
    Process(tmp_path, 1, begin=0, pid=2, world=2).checkpoint(5).window(25).write()
    assert told(tmp_path, "lost_steps") == [15]


def test_an_attempt_that_was_killed_before_its_first_step_changes_nothing(tmp_path):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25).write()
    Process(tmp_path, begin=30, pid=2).window(4).write()
    Process(tmp_path, begin=40, pid=3).window(4).write()
    assert told(tmp_path, "end", "lost_steps") == [("killed", 10), ("killed", 0), ("killed", 0)]
    assert spent(tmp_path)["startup"] == pytest.approx(5 + 4 + 4)


def test_an_older_checkpoint_costs_earlier_attempts_their_steps_too(tmp_path):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25).write()
    Process(tmp_path, begin=30, pid=2).resumed(10).checkpoint(5).window(15).write()
    Process(tmp_path, begin=60, pid=3).resumed(4).window(25).write()
    assert told(tmp_path, "lost_steps") == [16, 10, 20]


@pytest.mark.parametrize(("loads", "lost", "resumed"), [(True, 10, (10, "assumed")), (False, 20, (None, "assumed"))])
def test_without_a_position_the_newest_checkpoint_is_assumed_if_anything_is_loaded(tmp_path, loads, lost, resumed):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25).write()
    second = Process(tmp_path, begin=30, pid=2)
    second.resumption |= dict(restore_seconds=1.0) if loads else {}
    second.window(15).end(25)
    first, again = told(tmp_path, "lost_steps", "resumed_from_step", "resumed_from")
    assert (first[0], again[1:]) == (lost, resumed)


def test_gradient_accumulation_is_counted_in_steps_of_the_loop(tmp_path):
    save = dict(complete=True, holds_optimizer=True, steps_total=40, optimizer_steps_total=10, seconds=0.1)
    process = Process(tmp_path, begin=0, pid=1)
    process.line("phase", 15, name="checkpoint", loop_seconds={"compute": 9.0, "data_wait": 1.0}, **save)
    process.window(25, 80, optimizer_steps_total=20).write()
    Process(tmp_path, begin=30, pid=2).resumed(10).end(15)
    assert told(tmp_path, "lost_steps") == [40, 0]


def test_replayed_batches_are_no_steps(tmp_path):
    process = Process(tmp_path, begin=0, pid=1).resumed(10)
    process.resumption |= dict(replayed_batches=10, replay_seconds=6.0, replay_wait_seconds=1.5)
    process.window(25, 20, optimizer_steps_total=10).write()
    assert told(tmp_path, "steps") == [10]
    assert spent(tmp_path)["replay"] == pytest.approx(6)


@pytest.mark.parametrize(
    ("killed_at", "batches", "done"), [(14, 9, 0), (16, 11, 1)], ids=["in it", "one step behind it"]
)
def test_an_attempt_that_was_killed_in_its_replay_or_soon_after(tmp_path, killed_at, batches, done):
    """The agent does not know yet what was replay. The attempt before tells."""
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25).write()
    Process(tmp_path, begin=30, pid=2).resumed(10).window(killed_at, batches, optimizer_steps_total=done).write()
    assert told(tmp_path, "steps", "lost_steps")[1] == (done, done)
    assert spent(tmp_path)["replay"] == pytest.approx(batches - done)
    assert spent(tmp_path)["redone"] == pytest.approx(10 + done)


def test_the_report_says_what_the_attempts_cost_and_how_often_to_save(tmp_path):
    for number in range(4):
        process = Process(tmp_path, begin=5000 * number, pid=1 + number)
        process.line("gpu", 2, name="H100")
        process = process.resumed(3000 * number) if number else process
        process.checkpoint(3000).window(4500).write()
    text = text_of(load(tmp_path))
    assert "Of 5.4 GPU-hours, 3.0 were productive (55 %): 1.7 redone after 4 kills, " in text
    for log in (tmp_path / "logs").iterdir():
        log.write_text("".join(each for each in log.read_text().splitlines(keepends=True) if '"gpu"' not in each))
    assert "Of 5.4 h, 3 h were productive (55 %): 100 min redone after 4 kills, " in text_of(load(tmp_path)), "no GPU"
    assert "attempt 3: killed, 4495 steps on 1 rank, resumed at step 9000, 1495 steps lost" in text
    assert re.search(r"write a checkpoint every 6\d\S* s instead of every 75 min", text), text


# -- how an attempt ended, and which processes belong to it ---------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        (dict(exception="ValueError", lost_peer=False), "failed"),
        (dict(exit_status=3), "failed"),
        (dict(exit_status=0), "finished"),
        (dict(exception="KeyboardInterrupt", lost_peer=False), "killed"),
        ({}, "finished"),
    ],
)
def test_the_last_line_tells_the_end(tmp_path, fields, end):
    Process(tmp_path, begin=0, pid=1).end(25, **fields)
    assert told(tmp_path, "end") == [end]


@pytest.mark.parametrize(("lost_peer", "end"), [(True, "killed"), (False, "failed")])
def test_the_rank_that_ended_first_tells_the_end_of_all(tmp_path, lost_peer, end):
    """Of two ranks one was killed: either first, and the other lost its peer; or by the launcher, as the other failed."""
    Process(tmp_path, 0, begin=0, pid=1, world=2).window(25).beat(25).write()
    Process(tmp_path, 1, begin=0, pid=2, world=2).end(25.4, exception="RuntimeError", lost_peer=lost_peer)
    assert told(tmp_path, "end") == [end]


def test_a_process_that_still_writes_is_running(tmp_path):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25).write()
    Process(tmp_path, begin=30, pid=2).resumed(10).window(15).write()
    first, second = job(tmp_path, now=T0.timestamp() + 50)["attempts"]
    assert (first["end"], second["end"], second["ended"], second["lost_steps"]) == ("killed", "running", None, 0)


@pytest.mark.parametrize("stepped", [-3600.0, 3600.0])
def test_a_clock_that_is_stepped_changes_no_length(tmp_path, stepped):
    Process(tmp_path, begin=0, pid=1, clock=stepped).checkpoint(10).window(25).write()
    Process(tmp_path, begin=30 + stepped, pid=2).resumed(10).end(25)
    assert told(tmp_path, "end") == ["killed", "finished"]
    assert job(tmp_path)["goodput"]["wall_seconds"] == pytest.approx(55)
    assert spent(tmp_path)["down"] == pytest.approx(5)


def test_another_number_of_ranks_is_another_attempt(tmp_path):
    for rank in range(4):
        Process(tmp_path, rank, begin=rank / 10, pid=10 + rank, world=4).checkpoint(10).window(25).write()
    for rank in range(2):
        Process(tmp_path, rank, begin=30, pid=20 + rank, world=2).resumed(10).end(15)
    for rank in (3, 2, 1, 0):
        Process(tmp_path, rank, begin=50, pid=30 + rank, world=4).resumed(20).end(15)
    assert told(tmp_path, "ranks") == [4, 2, 4]
    assert job(tmp_path)["ranks"] == 4
    assert job(tmp_path)["goodput"]["wall_seconds"] == pytest.approx(65, abs=0.5)


@pytest.mark.parametrize("late", [True, False], ids=["rank 1 starts late", "rank 1 never started"])
def test_what_the_launcher_started_once_is_one_attempt(tmp_path, late):
    """Rank 0 of the first attempt fails at once, before rank 1 has started, if it does; then both are started again."""
    launcher = dict(launcher="torchrun", launch="7-1", world=2)
    Process(tmp_path, 0, begin=0, pid=1, restarts=0, **launcher).end(1.5, exception="ValueError")
    if late:
        Process(tmp_path, 1, begin=2, pid=2, restarts=0, **launcher).window(8).write()
    Process(tmp_path, 1, begin=12, pid=3, restarts=1, **launcher).end(20)
    Process(tmp_path, 0, begin=12.5, pid=4, restarts=1, **launcher).end(20)
    assert told(tmp_path, "end", "ranks") == [("failed", 1 + late), ("finished", 2)]


def test_a_process_that_goes_on_as_another_program_was_not_killed(tmp_path):
    """Its log has no last line. It has the same pid and start as the next one, whose agent started later."""
    before = Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25)
    after = Process(tmp_path, begin=27, pid=1).resumed(10)
    after.lines[0] |= dict(process_started=at(0), life="after")
    after.lines = before.lines + after.lines  # in the same file, as the pid is the same
    after.end(40)
    first, second = told(tmp_path, "end", "started", "ended", "lost_steps", "resumed_from_step")
    assert first == ("finished", at(0), at(25), 10, None)
    assert (second[0], second[1], second[4]) == ("finished", at(25), 10)
    assert spent(tmp_path)["down"] == 0


# -- times without progress -----------------------------------------------------------------------------------------


def test_a_rank_that_was_killed_early_is_down_while_the_others_hang(tmp_path):
    Process(tmp_path, 0, begin=0, pid=1, world=2).window(25).write()
    Process(tmp_path, 1, begin=0, pid=2, world=2).window(15).write()
    assert spent(tmp_path)["down"] == pytest.approx(5), "ten seconds of one of two ranks"


def test_a_run_that_hung_before_it_was_killed_was_stuck(tmp_path):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(20).stuck("compute", 40, 20.0).window(95).write()
    assert spent(tmp_path)["stuck"] == pytest.approx(75)
    assert spent(tmp_path)["redone"] == pytest.approx(5)


def test_a_hang_in_a_checkpoint_is_taken_from_the_checkpoint(tmp_path):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(20).stuck("checkpoint", 60, 20.0).window(90, 20).write()
    assert spent(tmp_path)["stuck"] == pytest.approx(50)
    assert spent(tmp_path)["checkpoint"] == pytest.approx(0)


def hung(process: Process, place: str) -> Process:
    """Stuck for 100 s after 15 steps of a second, of which a tenth is wait."""
    return process.stuck(place, 50.0, 30.0, until=120.0)


def until(process: Process, event: str, seconds: float) -> None:
    process.line(event, seconds, **process.totals(seconds, int(seconds - 105))).write()


BOOKS = ("productive", "data_wait", "redone", "stuck", "startup")
HANGS = {
    "a hang that ends is no wait and no compute": (
        lambda p, c: until(hung(p.window(20), c), "run_end", 220), (103.5, 11.5, 0.0)
    ),
    "before the newest checkpoint it takes nothing from redone": (
        lambda p, c: until(hung(p.window(20), c).saved(100, 205), "window", 265), (90.0, 10.0, 60.0)
    ),
    "after it, it is taken from redone": (
        lambda p, c: until(hung(p.saved(15, 20).window(20), c), "window", 265), (13.5, 1.5, 145.0)
    ),
    "in the step of the checkpoint, before it": (
        lambda p, _: until(hung(p, "compute").saved(16, 121), "window", 265), (14.4, 1.6, 144.0)
    ),
    "in the step of the checkpoint, after it": (
        lambda p, _: until(hung(p.saved(16, 20), "compute"), "window", 265), (13.5, 1.5, 145.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("category", ["data_wait", "compute"])
@pytest.mark.parametrize("name", HANGS)
def test_where_a_hang_is_booked(tmp_path, name, category):
    run, (productive, data_wait, redone) = HANGS[name]
    run(Process(tmp_path, begin=0, pid=1), category)
    found = [round(spent(tmp_path)[each], 3) for each in BOOKS]
    assert found == [productive, data_wait, redone, 100.0, 5.0]


def test_a_hang_of_the_first_batch_is_no_startup(tmp_path):
    process = Process(tmp_path, begin=0, pid=1).stuck("startup", 545, 540.0, until=605)
    process.line("run_end", 705, **process.totals(705, 100), first_wait_seconds=600.0).write()
    assert [round(spent(tmp_path)[each], 3) for each in BOOKS] == [90.0, 10.0, 0.0, 600.0, 5.0]


def test_a_hang_in_a_checkpoint_that_went_on_is_no_usual_cost_of_one(tmp_path):
    process = Process(tmp_path, begin=0, pid=1).checkpoint(10).stuck("checkpoint", 40, 20.0, until=50)
    process.checkpoint(45, seconds=30.5).checkpoint(55).window(70).write()
    (log,) = load(tmp_path)
    assert (log.saves_total, log.save_seconds) == (3, pytest.approx(1.5))


# -- the OOM killer ------------------------------------------------------------------------------------------------

GROUP = dict(memory_group="0123abcd-7", memory_events="/nowhere/memory.events", oom_kills_total=0)
ONE = GROUP | dict(oom_kills_total=1)


def killed(folder, rank=0, world=1):
    """A rank that was killed, 25 s after its start."""
    Process(folder, rank, begin=0, pid=1 + rank, world=world, **GROUP).counts(0).window(15).beat(25).write()


def of_the_same_cgroup(folder, **head):
    return Process(folder, 1, begin=0, pid=2, world=2, **GROUP | head).counts(0)


def test_another_rank_of_the_same_cgroup_tells(tmp_path):
    killed(tmp_path, world=2)
    peer = of_the_same_cgroup(tmp_path).window(15).window(25).counts(1)
    peer.end(26.0, exception="RuntimeError", lost_peer=True)
    assert told(tmp_path, "end", "reason") == [("killed", "rank 0 killed by the OOM killer")]
    text = text_of(load(tmp_path))
    assert "Killed: rank 0 killed by the OOM killer.\n" in text and "  do:     raise the memory limit" in text


def test_a_kill_after_the_process_was_dead_is_not_its_own(tmp_path):
    """Its peer was there for ten more seconds, and only then the OOM killer killed something."""
    killed(tmp_path, world=2)
    peer = of_the_same_cgroup(tmp_path).window(15).window(35).counts(1).window(45)
    peer.end(46, exception="RuntimeError", lost_peer=True)
    assert told(tmp_path, "end", "reason") == [("killed", None)]


@pytest.mark.parametrize(
    ("ranks", "begin", "head", "kills", "reason"),
    [
        pytest.param(1, 30, ONE, 1, "rank 0 killed by the OOM killer", id="the next attempt tells"),
        pytest.param(3, 30, ONE, 1, "the OOM killer killed 1 of ranks 0-2", id="it may have been any"),
        pytest.param(1, 3600, ONE, 1, "rank 0 probably killed by the OOM killer", id="much later"),
        pytest.param(1, 30, GROUP, 0, None, id="the counter stands"),
        pytest.param(1, 30, ONE | dict(memory_group="0123abcd-8"), 1, None, id="another cgroup"),
        pytest.param(1, 30, {}, None, None, id="no counter"),
    ],
)
def test_the_next_attempt_tells_of_the_oom_killer(tmp_path, ranks, begin, head, kills, reason):
    for rank in range(ranks):
        killed(tmp_path, rank, ranks)
    Process(tmp_path, begin=begin, pid=9, **head).counts(kills).resumed(5).window(15).end(25)
    assert told(tmp_path, "end", "reason")[0] == ("killed", reason)


@pytest.mark.parametrize(
    ("end", "lost_peer", "reason"),
    [
        (25, False, "RuntimeError; the OOM killer killed a process of rank 0"),
        (125, False, "RuntimeError"),
        (25, True, None),  # a peer had ended
    ],
)
def test_an_exception_soon_after_the_oom_killer_killed_a_worker(tmp_path, end, lost_peer, reason):
    process = Process(tmp_path, begin=0, pid=1, **GROUP).counts(0).window(15).window(16).counts(1).window(24)
    process.end(end, exception="RuntimeError", lost_peer=lost_peer)
    assert told(tmp_path, "end", "reason") == [("failed", reason)]


# -- errors of GPUs --------------------------------------------------------------------------------------------------

CLEANUP, OFF_THE_BUS = 45, 79


@pytest.mark.parametrize(
    ("seconds", "xids", "reason"),
    [
        pytest.param(23.9, [OFF_THE_BUS, 43], "AcceleratorError; Xid 79 on rank 1", id="the first is the cause"),
        pytest.param(23.9, [CLEANUP], "AcceleratorError", id="it only follows"),
        pytest.param(23.9, [CLEANUP, 12345], "AcceleratorError; Xid 12345 on rank 1", id="a code without a name"),
        pytest.param(-40.0, [OFF_THE_BUS], "AcceleratorError", id="too long before"),
    ],
)
def test_an_error_of_the_gpu_soon_before_a_failure_is_its_cause(tmp_path, seconds, xids, reason):
    Process(tmp_path, 0, begin=0, pid=1, world=2).window(15).end(25, exception="RuntimeError", lost_peer=True)
    process = Process(tmp_path, 1, begin=0, pid=2, world=2).window(15)
    for xid in xids:
        process.line("gpu_error", seconds, gpu=3, uuid="GPU-3", xid=xid)
    process.end(24.0, exception="AcceleratorError")
    assert told(tmp_path, "end", "reason") == [("failed", reason)]
    said = f"GPU 3 of rank 1 on node n had reported Xid {reason.partition('Xid ')[2].partition(' ')[0]}"
    assert (said in text_of(load(tmp_path))) == ("Xid" in reason)


def test_a_process_that_was_killed_after_an_error_of_its_gpu(tmp_path):
    process = Process(tmp_path, begin=0, pid=1).window(15).line("gpu_error", 24.0, gpu=0, uuid="GPU-0", xid=95)
    process.beat(25).write()
    assert told(tmp_path, "end", "reason") == [("killed", "Xid 95 on rank 0")]
    said = " ".join(text_of(load(tmp_path)).split())
    assert (
        "Killed: rank 0 did not end by itself. GPU 0 on node n had reported Xid 95: its memory has an error that cannot "
        "be corrected and is not contained."
    ) in said
    assert "do: have the node checked (nvidia-smi -q, dmesg) before it is used again" in said


@pytest.mark.parametrize("end", [{}, {"exception": "KeyboardInterrupt"}])
def test_a_run_that_goes_on_after_an_error_or_is_interrupted_does_not_end_by_it(tmp_path, end):
    process = Process(tmp_path, begin=0, pid=1).window(15).line("gpu_error", 24.0, gpu=0, uuid="GPU-0", xid=94)
    process.end(25, **end)
    assert told(tmp_path, "reason") == [None]
    assert "Xid" not in text_of(load(tmp_path))


# -- the best interval between checkpoints --------------------------------------------------------------------------

FAILURES = 200


def simulated(interval: float, cost: float, mean: float, restart: float, seed: int) -> tuple[float, float]:
    """Effective training time and productive time, as shares of the wall clock, of a run with so many failures."""
    chance = random.Random(seed)
    effective = productive = wall = 0.0
    for _ in range(FAILURES):
        until = chance.expovariate(1 / mean)
        kept = until // (interval + cost)
        effective += kept * (interval + cost)
        productive += kept * interval
        wall += until + restart
    return effective / wall, productive / wall


@pytest.mark.parametrize(
    ("cost", "mean", "restart"),
    [
        pytest.param(30.0, 3600.0, 300.0, id="usual"),
        pytest.param(2.0, 40000.0, 60.0, id="rare failures"),
        pytest.param(120.0, 1200.0, 200.0, id="many failures"),
        pytest.param(300.0, 700.0, 30.0, id="expensive checkpoints"),
    ],
)
def test_the_predicted_effective_time_comes_true_and_no_other_interval_is_much_better(cost, mean, restart):
    best = best_interval(cost, mean)
    for seed in (1, 2):
        assert ettr(best, cost, mean, restart) == pytest.approx(simulated(best, cost, mean, restart, seed)[0], abs=0.05)
    others = [simulated(best * factor, cost, mean, restart, 3)[1] for factor in (0.25, 0.5, 0.8, 1.25, 2, 4)]
    assert simulated(best, cost, mean, restart, 3)[1] >= max(others) - 0.02


def test_the_advice_learned_from_a_run_comes_true_in_the_next():
    cost, mean, restart, interval = 20.0, 3000.0, 240.0, 3600.0
    chance = random.Random(7)
    runs = [chance.expovariate(1 / mean) for _ in range(FAILURES)]
    told = Experience(FAILURES, sum(runs), int(sum(until // (interval + cost) for until in runs)), cost, restart)
    advised = told.advised()
    assert told.gain(advised) > 0.2
    assert advised.best_interval_seconds < interval / 5
    effective, productive = simulated(advised.best_interval_seconds, cost, mean, restart, 8)
    assert advised.predicted_ettr_ratio == pytest.approx(effective, abs=0.05)
    assert productive > simulated(interval, cost, mean, restart, 8)[1] + 0.2


def test_nothing_is_advised_that_is_not_known():
    assert Experience(1, 1000.0, 10, 5.0, 60.0).advised() is None, "one failure tells no rate"
    assert Experience(5, 1000.0, 0, 0.0, 60.0).advised() is None, "no checkpoint tells no cost"
    good = Experience(10, 36000.0, 80, 30.0, 60.0)
    assert good.gain(good.advised()) < 0.01, "it is close to the best already"


# -- throughput, energy and money -----------------------------------------------------------------------------------


def test_a_price_is_a_number_and_there_is_none_by_default():
    assert Config.load({}, {}).gpu_hour_price is None
    assert Config.load({"gpu_hour_price": "2.5"}, {}).gpu_hour_price == 2.5
    assert Config.load({"gpu_hour_price": "none"}, {}).gpu_hour_price is None
    with pytest.raises(SettingError):
        Config.load({"gpu_hour_price": -1}, {})


def rank(folder, number: int, *, price: float | None = None, world: int = 1, **more) -> None:
    head = line("run_start", number, **START, world_size=world, settings={"gpu_hour_price": price})
    last = line("run_end", number, **totals(wait=10.0, compute=29.0, steps=10)) | more
    write(folder, number, head, last | {"time": "2026-01-01T00:00:40.000Z"})


def whole(folder) -> tuple[dict, str]:
    """The values of the report, and its text."""
    found = report_of(folder, load(folder), LATER)
    return msgspec.to_builtins(found.values), as_text(found)


def test_throughput_is_the_sum_over_the_ranks(tmp_path):
    rank(tmp_path, 0, world=2, samples_total=390, tokens_total=3900)
    rank(tmp_path, 1, world=2, samples_total=780, tokens_total=3900)
    found, text = whole(tmp_path)
    assert [*found["throughput"].values()] == [1170, 30.0, 7800, 200.0]
    assert "throughput: 1170 samples, 30 per second of the training loop; 7800 tokens, 200 per second" in text
    rank(tmp_path, 1, world=2)  # it does not know them
    found, text = whole(tmp_path)
    assert set(found["throughput"].values()) == {None}
    assert "throughput" not in text


def test_samples_of_all_attempts_are_added_up(tmp_path):
    rank(tmp_path, 0, samples_total=390)
    first = (tmp_path / "logs" / "rank-0.10.jsonl").read_text()
    second = first.replace("2026-01-01T00:0", "2026-01-01T01:0").replace('"pid":10', '"pid":99')
    second = second.replace(
        '"samples_total"', '"resumption":{"resumed_step":9,"resumed_from":"optimizer"},"samples_total"'
    )
    (tmp_path / "logs" / "rank-0.99.jsonl").write_text(second)
    throughput = whole(tmp_path)[0]["throughput"]
    assert (throughput["samples"], throughput["samples_per_second"]) == (780, 10.0)


def test_energy_of_ranks_that_share_a_gpu_counts_once(tmp_path):
    for number, uuid in enumerate(("GPU-1", "GPU-1", "GPU-2")):
        energy = {"data_wait": 1.8e6 + number, "compute": 3.6e6}
        rank(tmp_path, number, world=3, gpu_energy_total_joules=energy, gpu_uuid=uuid)
    found, text = whole(tmp_path)
    assert found["gpu_energy_joules"]["data_wait"] == 2 * 1.8e6 + 1 + 2
    assert "energy: 1 of 3 kWh went into waits for data (33 %)" in text


def test_energy_of_an_agent_that_was_started_again_adds_up(tmp_path):
    def lives(number, *seconds, joules, compute=29.0):
        lines = []
        for began, ended in seconds:
            times = [f"2026-01-01T00:{each // 60:02d}:{each % 60:02d}.000Z" for each in (began, ended)]
            energy = dict(gpu_energy_total_joules={"data_wait": joules, "compute": 3.6e6}, gpu_uuid="GPU-1")
            lines.append(line("run_start", number, started=times[0], life=f"{number}{began}",
                              process_started="2026-01-01T00:00:00.000Z") | {"time": times[0]})  # fmt: skip
            last = line("run_end", number, **totals(wait=10.0, compute=compute, steps=10), **energy)
            lines.append(last | {"time": times[1]})
        write(tmp_path, number, *lines)

    lives(0, (1, 41), (61, 101), joules=1.8e6)
    lives(1, (1, 101), joules=1.9e6, compute=69.0)
    found, _ = whole(tmp_path)
    assert {entry["attempt"] for entry in found["ranks"]} == {0}
    assert found["gpu_energy_joules"]["data_wait"] == 3.6e6  # that of rank 0, in both of its parts


def test_money_is_gpu_hours_times_the_price(tmp_path):
    rank(tmp_path, 0)
    found, text = whole(tmp_path)
    assert found["cost"] is None and found["gpu_energy_joules"] is None
    assert "cost:" not in text and "energy:" not in text
    rank(tmp_path, 0, price=3600.0)
    found, text = whole(tmp_path)
    cost = found["cost"]
    assert cost["total"] == pytest.approx(cost["gpu_hours"] * 3600)
    assert (cost["waiting"], cost["stalls"], cost["restarts"]) == (pytest.approx(10.0), 0.0, 0.0)
    assert "; of that 10.00 waiting, 0.00 stalls, 0.00 restarts" in text
    rank(tmp_path, 0, price=3600.0, exposed_wait_total_seconds=None)
    found, text = whole(tmp_path)
    assert found["cost"]["waiting"] is None, "as what the GPU felt of it"
    assert "waiting" not in next(row for row in text.splitlines() if row.startswith("cost:"))


def test_stalls_of_logs_that_were_rotated_away_cost_money_too(tmp_path):
    rank(tmp_path, 0, price=3600.0, stall_lost_total_seconds={"workers_io_bound": 7200.0})
    found, text = whole(tmp_path)
    assert found["stalls"] == [] and found["cost"]["stalls"] == pytest.approx(7200.0)
    assert "lost in stalls, over all ranks: workers_io_bound 2 h (" in text
