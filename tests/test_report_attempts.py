"""The attempts of a run: how each ended, what was lost, and what the run cost."""

from __future__ import annotations

import json
import random
import re
from datetime import datetime, timedelta, timezone

import msgspec
import pytest

from telemetry.agent.totals import EnergyReading, added_energy
from telemetry.config import Config, SettingError
from telemetry.records import CATEGORIES, Totals
from telemetry.report.attempts import stuck_in_saves
from telemetry.report.command import report
from telemetry.report.goodput import Experience, best_interval, ettr
from telemetry.report.logs import load
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
        self.resumption = {}
        self.lines = []
        self._line("run_start", 1.0, started=at(begin + 1), process_started=at(begin), world_size=world,
                   life=self.life, **head)  # fmt: skip

    def _line(self, event, moment, **fields):
        written = at(self.begin + moment + (self.clock if moment > 3 else 0))  # a clock that is stepped is so early
        self.lines.append(
            line(event, self.rank, time=written, pid=self.pid, node=self.node) | fields
        )  # fmt: skip

    def totals(self, seconds: float, steps: int) -> dict:
        ledger = dict.fromkeys(CATEGORIES, 0.0) | {"startup": min(4.0, seconds - 1)}
        ledger |= {"compute": 0.9 * (seconds - 5), "data_wait": 0.1 * (seconds - 5)} if seconds > 5 else {}
        return dict(
            steps_total=steps, optimizer_steps_total=steps, wall_seconds=seconds - 1, ledger_total_seconds=ledger
        ) | dict(resumption=self.resumption)

    def resumed(self, step: int):
        self.resumption |= dict(resumed_step=step, resumed_from="optimizer", restore_seconds=1.0)
        return self

    def window(self, seconds: float):
        self._line("window", seconds, **self.totals(seconds, max(0, int(seconds - 5))))
        return self

    def checkpoint(self, step: int, *, complete=True, holds_optimizer=True):
        spent = self.totals(5 + step, step)["ledger_total_seconds"]
        loop = {name: spent.get(name, 0.0) for name in ("data_wait", "compute")}
        self._line("phase", 5 + step, name="checkpoint", category="checkpoint", seconds=0.5, complete=complete,
                   holds_optimizer=holds_optimizer, steps_total=step, optimizer_steps_total=step,
                   loop_seconds=loop)  # fmt: skip
        return self

    def end(self, seconds: float, **how):
        self._line("run_end", seconds, **self.totals(seconds, int(seconds - 5)), **how)
        return self.write()

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


def ends(found: dict) -> list[str]:
    return [each["end"] for each in found["attempts"]]


def test_a_run_that_ends_by_itself_is_one_attempt(tmp_path):
    Process(tmp_path, begin=0, pid=1).window(15).end(25)
    found = job(tmp_path)
    (only,) = found["attempts"]
    assert (only["end"], only["steps"], only["lost_steps"], only["resumed_from_step"]) == ("finished", 20, 0, None)
    seconds = found["goodput"]["seconds"]
    assert seconds["productive"] == pytest.approx(18)
    assert seconds["startup"] == pytest.approx(5), "from the start of the process, not that of the agent"
    assert found["goodput"]["wall_seconds"] == pytest.approx(25)


def test_a_kill_costs_the_steps_after_the_checkpoint_and_the_downtime(tmp_path):
    Process(tmp_path, begin=0, pid=1).window(15).checkpoint(10).window(25).beat(28).write(torn=b'{"time":"2026-')
    Process(tmp_path, begin=60, pid=2).resumed(10).window(15).end(25)
    found = job(tmp_path)
    assert ends(found) == ["killed", "finished"]
    first, second = found["attempts"]
    assert (first["ended"], first["steps"], first["lost_steps"]) == (at(28), 23, 13), "the heartbeat is the newest"
    assert second["resumed_from_step"] == 10
    seconds = found["goodput"]["seconds"]
    assert seconds["redone"] == pytest.approx(13)
    assert seconds["down"] == pytest.approx(32)
    assert seconds["restore"] == pytest.approx(1)
    assert found["goodput"]["wall_seconds"] == pytest.approx(85)


def test_a_checkpoint_that_is_not_complete_does_not_count(tmp_path):
    process = Process(tmp_path, begin=0, pid=1).checkpoint(5).checkpoint(10, complete=False)
    process.checkpoint(12, holds_optimizer=False).window(25).write()
    (only,) = job(tmp_path)["attempts"]
    assert (only["end"], only["lost_steps"]) == ("killed", 15)


def test_a_checkpoint_of_all_ranks_is_complete_when_all_have_written_it(tmp_path):
    Process(tmp_path, 0, begin=0, pid=1, world=2).checkpoint(5).checkpoint(10).window(25).write()
    Process(tmp_path, 1, begin=0, pid=2, world=2).checkpoint(5).window(25).write()
    (only,) = job(tmp_path)["attempts"]
    assert only["lost_steps"] == 15


def test_an_attempt_that_was_killed_before_its_first_step_changes_nothing(tmp_path):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25).write()
    Process(tmp_path, begin=30, pid=2).window(4).write()
    Process(tmp_path, begin=40, pid=3).window(4).write()
    found = job(tmp_path)
    assert ends(found) == ["killed"] * 3
    assert [each["lost_steps"] for each in found["attempts"]] == [10, 0, 0]
    assert found["goodput"]["seconds"]["startup"] == pytest.approx(5 + 4 + 4)


def test_an_older_checkpoint_costs_earlier_attempts_their_steps_too(tmp_path):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25).write()
    Process(tmp_path, begin=30, pid=2).resumed(10).checkpoint(5).window(15).write()
    Process(tmp_path, begin=60, pid=3).resumed(4).window(25).write()
    assert [each["lost_steps"] for each in job(tmp_path)["attempts"]] == [16, 10, 20]


def test_without_a_position_the_newest_checkpoint_is_assumed(tmp_path):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25).write()
    second = Process(tmp_path, begin=30, pid=2)
    second.resumption |= dict(restore_seconds=1.0)
    second.window(15).end(25)
    found = job(tmp_path)
    assert [(each["resumed_from_step"], each["resumed_from"]) for each in found["attempts"]][1] == (10, "assumed")
    assert found["attempts"][0]["lost_steps"] == 10


def test_a_start_from_nothing_after_a_kill_loses_all(tmp_path):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25).write()
    Process(tmp_path, begin=30, pid=2).window(15).end(25)
    assert job(tmp_path)["attempts"][0]["lost_steps"] == 20


ENDINGS = {
    "an exception": (dict(exception="ValueError", lost_peer=False), "failed"),
    "an exit status": (dict(exit_status=3), "failed"),
    "status 0": (dict(exit_status=0), "finished"),
    "Ctrl-C": (dict(exception="KeyboardInterrupt", lost_peer=False), "killed"),
    "nothing": ({}, "finished"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_the_last_line_tells_the_end(tmp_path, name):
    fields, end = ENDINGS[name]
    Process(tmp_path, begin=0, pid=1).end(25, **fields)
    assert ends(job(tmp_path)) == [end]


@pytest.mark.parametrize(("lost_peer", "end"), [(True, "killed"), (False, "failed")])
def test_the_rank_that_ended_first_tells_the_end_of_all(tmp_path, lost_peer, end):
    """Of two ranks one was killed: either first, and the other lost its peer; or by the launcher, as the other failed."""
    Process(tmp_path, 0, begin=0, pid=1, world=2).window(25).beat(25).write()
    Process(tmp_path, 1, begin=0, pid=2, world=2).end(25.4, exception="RuntimeError", lost_peer=lost_peer)
    assert ends(job(tmp_path)) == [end]


def test_a_process_that_still_writes_is_running(tmp_path):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25).write()
    Process(tmp_path, begin=30, pid=2).resumed(10).window(15).write()
    found = job(tmp_path, now=T0.timestamp() + 50)
    assert ends(found) == ["killed", "running"]
    assert found["attempts"][1]["ended"] is None
    assert found["attempts"][1]["lost_steps"] == 0


@pytest.mark.parametrize("stepped", [-3600.0, 3600.0])
def test_a_clock_that_is_stepped_changes_no_length(tmp_path, stepped):
    Process(tmp_path, begin=0, pid=1, clock=stepped).checkpoint(10).window(25).write()
    Process(tmp_path, begin=30 + stepped, pid=2).resumed(10).end(25)
    found = job(tmp_path)
    assert ends(found) == ["killed", "finished"]
    assert found["goodput"]["wall_seconds"] == pytest.approx(55)
    assert found["goodput"]["seconds"]["down"] == pytest.approx(5)


def test_another_number_of_ranks_is_another_attempt(tmp_path):
    for rank in range(4):
        Process(tmp_path, rank, begin=rank / 10, pid=10 + rank, world=4).checkpoint(10).window(25).write()
    for rank in range(2):
        Process(tmp_path, rank, begin=30, pid=20 + rank, world=2).resumed(10).end(15)
    for rank in (3, 2, 1, 0):
        Process(tmp_path, rank, begin=50, pid=30 + rank, world=4).resumed(20).end(15)
    found = job(tmp_path)
    assert [each["ranks"] for each in found["attempts"]] == [4, 2, 4]
    assert found["ranks"] == 4
    assert found["goodput"]["wall_seconds"] == pytest.approx(65, abs=0.5)


def test_what_the_launcher_started_once_is_one_attempt(tmp_path):
    """Rank 0 of the first attempt fails at once, before rank 1 has started; then both are started again."""
    told = dict(launcher="torchrun", launch="7-1")
    Process(tmp_path, 0, begin=0, pid=1, world=2, restarts=0, **told).end(1.5, exception="ValueError")
    Process(tmp_path, 1, begin=2, pid=2, world=2, restarts=0, **told).window(8).write()
    Process(tmp_path, 1, begin=12, pid=3, world=2, restarts=1, **told).end(20)
    Process(tmp_path, 0, begin=12.5, pid=4, world=2, restarts=1, **told).end(20)
    found = job(tmp_path)
    assert ends(found) == ["failed", "finished"]
    assert [each["ranks"] for each in found["attempts"]] == [2, 2]


def test_a_new_rank_is_of_the_attempt_in_which_it_was_started(tmp_path):
    """Rank 1 of the first attempt is killed before its agent starts; in the second attempt it starts first."""
    told = dict(launcher="torchrun", launch="7-1")
    Process(tmp_path, 0, begin=0, pid=1, world=2, restarts=0, **told).end(1.5, exception="ValueError")
    Process(tmp_path, 1, begin=5, pid=2, world=2, restarts=1, **told).end(20)
    Process(tmp_path, 0, begin=5.5, pid=3, world=2, restarts=1, **told).end(20)
    found = job(tmp_path)
    assert ends(found) == ["failed", "finished"]
    assert [each["ranks"] for each in found["attempts"]] == [1, 2]


def test_a_rank_that_was_killed_early_is_down_while_the_others_hang(tmp_path):
    Process(tmp_path, 0, begin=0, pid=1, world=2).window(25).write()
    Process(tmp_path, 1, begin=0, pid=2, world=2).window(15).write()
    seconds = job(tmp_path)["goodput"]["seconds"]
    assert seconds["down"] == pytest.approx(5), "ten seconds of one of two ranks"


def test_a_run_that_hung_before_it_was_killed_was_stuck(tmp_path):
    process = Process(tmp_path, begin=0, pid=1).checkpoint(10).window(20)
    evidence = {"stuck_in": "compute", "stuck_for_seconds": 20.0}
    process._line("stall_open", 40, opened=at(40), cause="unknown", evidence=evidence, first_step=15)
    process.window(95).write()
    seconds = job(tmp_path)["goodput"]["seconds"]
    assert seconds["stuck"] == pytest.approx(75)
    assert seconds["redone"] == pytest.approx(5)


def test_a_hang_in_a_checkpoint_is_taken_from_the_checkpoint(tmp_path):
    process = Process(tmp_path, begin=0, pid=1).checkpoint(10).window(20)
    evidence = {"stuck_in": "checkpoint", "stuck_for_seconds": 20.0}
    process._line("stall_open", 60, opened=at(60), cause="unknown", evidence=evidence, first_step=15)
    totals = process.totals(90, 20)
    totals["ledger_total_seconds"] |= {"checkpoint": 50.0, "compute": totals["ledger_total_seconds"]["compute"] - 50.0}
    process._line("window", 90, **totals)
    process.write()
    seconds = job(tmp_path)["goodput"]["seconds"]
    assert seconds["stuck"] == pytest.approx(50)
    assert seconds["checkpoint"] == pytest.approx(0)


def test_gradient_accumulation_is_counted_in_steps_of_the_loop(tmp_path):
    process = Process(tmp_path, begin=0, pid=1)
    save = dict(complete=True, holds_optimizer=True, steps_total=40, optimizer_steps_total=10, seconds=0.1)
    process._line("phase", 15, name="checkpoint", loop_seconds={"compute": 9.0, "data_wait": 1.0}, **save)
    process._line("window", 25, **process.totals(25, 80) | dict(optimizer_steps_total=20))
    process.write()
    Process(tmp_path, begin=30, pid=2).resumed(10).end(15)
    assert job(tmp_path)["attempts"][0]["lost_steps"] == 40


def test_replayed_batches_are_no_steps(tmp_path):
    process = Process(tmp_path, begin=0, pid=1).resumed(10)
    process.resumption |= dict(replayed_batches=10, replay_seconds=6.0, replay_wait_seconds=1.5)
    process._line("window", 25, **process.totals(25, 20) | dict(optimizer_steps_total=10))
    process.write()
    found = job(tmp_path)
    assert found["attempts"][0]["steps"] == 10
    assert found["goodput"]["seconds"]["replay"] == pytest.approx(6)


def test_an_attempt_that_was_killed_in_its_replay_was_in_replay(tmp_path):
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25).write()
    process = Process(tmp_path, begin=30, pid=2).resumed(10)
    process._line("window", 14, **process.totals(14, 9) | dict(optimizer_steps_total=0))
    process.write()
    found = job(tmp_path)
    assert found["attempts"][1]["steps"] == 0
    assert found["goodput"]["seconds"]["replay"] == pytest.approx(9)
    assert found["goodput"]["seconds"]["redone"] == pytest.approx(10), "the first attempt's alone"


def test_an_attempt_killed_after_one_step_behind_its_replay(tmp_path):
    """What was replay is known from the second step on. Here, the attempt before tells."""
    Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25).write()
    process = Process(tmp_path, begin=30, pid=2).resumed(10)
    process._line("window", 16, **process.totals(16, 11) | dict(optimizer_steps_total=1))
    process.write()
    found = job(tmp_path)
    assert (found["attempts"][1]["steps"], found["attempts"][1]["lost_steps"]) == (1, 1)
    assert found["goodput"]["seconds"]["replay"] == pytest.approx(11)
    assert found["goodput"]["seconds"]["redone"] == pytest.approx(10), "the first attempt's alone"


def test_the_report_says_what_the_attempts_cost_and_how_often_to_save(tmp_path):
    for number in range(4):
        process = Process(tmp_path, begin=5000 * number, pid=1 + number)
        process = process.resumed(3000 * number) if number else process
        process.checkpoint(3000).window(4500)
        process.write()
    text = text_of(load(tmp_path))
    assert "Of 5.4 GPU-hours, 3.0 were productive (55 %): 1.7 redone after 4 kills, " in text
    assert "attempt 3: killed, 4495 steps on 1 ranks, resumed at step 9000, 1495 steps lost" in text
    assert re.search(r"write a checkpoint every 6\d\S* s instead of every 75 min", text), text


def test_one_attempt_needs_no_section(tmp_path):
    Process(tmp_path, begin=0, pid=1).end(25)
    assert "attempts:" not in text_of(load(tmp_path))


def test_a_process_that_goes_on_as_another_program_was_not_killed(tmp_path):
    """Its log has no last line. It has the same pid and start as the next one, whose agent started later."""
    before = Process(tmp_path, begin=0, pid=1).checkpoint(10).window(25)
    after = Process(tmp_path, begin=27, pid=1).resumed(10)
    after.lines[0] |= dict(process_started=at(0), life="after")
    after.lines = before.lines + after.lines  # in the same file, as the pid is the same
    after.end(40)
    found = job(tmp_path)
    first, second = found["attempts"]
    assert (first["end"], first["lost_steps"], first["ended"]) == ("finished", 10, at(25))
    assert (second["end"], second["resumed_from_step"], second["started"]) == ("finished", 10, at(25))
    assert found["goodput"]["seconds"]["down"] == 0


class StuckOnce(Process):
    """Steps of a second from five seconds on, a tenth of it wait, and 100 s after 15 of them without progress."""

    category = "compute"

    def stuck(self, category: str, *, begin=20.0):
        when = dict(opened=at(begin + 30), cause="unknown", first_step=15)
        when["evidence"] = {"stuck_in": category, "stuck_for_seconds": 30.0}
        self.category = category
        self._line("stall_open", begin + 30, **when)
        self._line("stall_close", begin + 100, closed=at(begin + 100), last_step=16, **when)
        return self

    def totals(self, seconds, steps):
        found = super().totals(seconds if seconds <= 20 else seconds - 100, steps)
        if seconds > 20:
            found["ledger_total_seconds"][self.category] += 100
            found |= dict(wall_seconds=seconds - 1)
        return found

    def until(self, event, seconds: float):
        steps = int(seconds - 105)
        self._line(event, seconds, **self.totals(seconds, steps))
        return self

    def saved(self, step: int, seconds: float):
        loop = self.totals(seconds, step)["ledger_total_seconds"]
        self._line("phase", seconds, name="checkpoint", started=at(seconds), seconds=0.0, complete=True, steps_total=step,
                   optimizer_steps_total=step, loop_seconds={c: loop[c] for c in ("data_wait", "compute")})  # fmt: skip
        return self


STUCK = dict.fromkeys(["productive", "data_wait", "redone", "stuck", "startup"], 0.0) | dict(stuck=100.0, startup=5.0)
OF_100_KEPT_60_LOST = STUCK | dict(productive=90.0, data_wait=10.0, redone=60.0)


def booked(folder) -> dict[str, float]:
    seconds = job(folder)["goodput"]["seconds"]
    return {category: round(seconds[category], 3) for category in STUCK}


@pytest.mark.parametrize("category", ["data_wait", "compute"])
def test_a_hang_that_ends_is_no_wait_and_no_compute(tmp_path, category):
    StuckOnce(tmp_path, begin=0, pid=1).window(20).stuck(category).until("run_end", 220).write()
    assert booked(tmp_path) == STUCK | dict(productive=103.5, data_wait=11.5)


@pytest.mark.parametrize("category", ["data_wait", "compute"])
def test_a_hang_before_the_newest_checkpoint_takes_nothing_from_redone(tmp_path, category):
    process = StuckOnce(tmp_path, begin=0, pid=1).window(20).stuck(category)
    process.saved(100, 205).until("window", 265).write()
    assert booked(tmp_path) == OF_100_KEPT_60_LOST


@pytest.mark.parametrize("category", ["data_wait", "compute"])
def test_a_hang_after_the_newest_checkpoint_is_taken_from_redone(tmp_path, category):
    process = StuckOnce(tmp_path, begin=0, pid=1).saved(15, 20).window(20).stuck(category)
    process.until("window", 265).write()
    assert booked(tmp_path) == STUCK | dict(productive=13.5, data_wait=1.5, redone=145.0)


def test_a_hang_in_the_step_of_the_checkpoint_before_it(tmp_path):
    process = StuckOnce(tmp_path, begin=0, pid=1).stuck("compute")
    process.saved(16, 121).until("window", 265).write()
    assert booked(tmp_path) == STUCK | dict(productive=14.4, data_wait=1.6, redone=144.0)


def test_a_hang_in_the_step_of_the_checkpoint_after_it(tmp_path):
    process = StuckOnce(tmp_path, begin=0, pid=1).saved(16, 20).stuck("compute")
    process.until("window", 265).write()
    assert booked(tmp_path) == STUCK | dict(productive=13.5, data_wait=1.5, redone=145.0)


def test_a_hang_of_the_first_batch_is_no_startup(tmp_path):
    process = Process(tmp_path, begin=0, pid=1)
    evidence = {"stuck_in": "data_wait", "stuck_for_seconds": 540.0}
    process._line("stall_open", 545, opened=at(545), cause="unknown", evidence=evidence, first_step=0)
    process._line("stall_close", 605, opened=at(545), closed=at(605), evidence=evidence, first_step=0, last_step=1)
    totals = process.totals(705, 100)
    totals["ledger_total_seconds"] |= dict(data_wait=610.0, compute=90.0)
    process._line("run_end", 705, first_wait_seconds=600.0, **totals)
    process.write()
    assert booked(tmp_path) == dict(stuck=600.0, startup=5.0, productive=90.0, data_wait=10.0, redone=0.0)


@pytest.mark.parametrize(("closes", "seconds"), [(True, 0.5), (False, 30.5)])
def test_a_hang_in_a_checkpoint_that_went_on_is_no_usual_cost_of_one(tmp_path, closes, seconds):
    """One that was killed in it has written no checkpoint, so that its time is not in their sum."""
    process = Process(tmp_path, begin=0, pid=1).window(20)
    evidence = {"stuck_in": "checkpoint", "stuck_for_seconds": 20.0}
    process._line("stall_open", 40, opened=at(40), cause="unknown", evidence=evidence, first_step=15)
    if closes:
        process._line("stall_close", 50, opened=at(40), closed=at(50), cause="unknown", evidence=evidence)
    process.checkpoint(15)
    process.lines[-1]["seconds"] = 30.5
    process.window(60).write()
    (log,) = load(tmp_path)
    assert log.save_seconds - stuck_in_saves(log) == pytest.approx(seconds)


GROUP = dict(memory_group="0123abcd-7", memory_events="/nowhere/memory.events", oom_kills_total=0)


class Counting(Process):
    """A process whose lines have the counter of its cgroup."""

    kills = 0

    def totals(self, seconds, steps):
        return super().totals(seconds, steps) | dict(oom_kills_total=self.kills)

    def counts(self, kills: int) -> Counting:
        self.kills = kills
        return self


def reasons(folder) -> list[tuple[str, str | None]]:
    return [(each["end"], each["reason"]) for each in job(folder)["attempts"]]


def test_the_next_attempt_in_the_same_cgroup_tells(tmp_path):
    Counting(tmp_path, begin=0, pid=1, **GROUP).window(15).beat(25).write()
    Counting(tmp_path, begin=30, pid=2, **GROUP | dict(oom_kills_total=1)).counts(1).window(15).end(25)
    assert reasons(tmp_path) == [("killed", "rank 0 killed by the OOM killer"), ("finished", None)]


def test_another_rank_of_the_same_cgroup_tells(tmp_path):
    Counting(tmp_path, 0, begin=0, pid=1, world=2, **GROUP).window(15).beat(25).write()
    peer = Counting(tmp_path, 1, begin=0, pid=2, world=2, **GROUP).window(15).window(25).counts(1)
    peer.end(26.0, exception="RuntimeError", lost_peer=True)
    assert reasons(tmp_path) == [("killed", "rank 0 killed by the OOM killer")]
    assert "The run has ended: rank 0 killed by the OOM killer. Raise the memory limit" in text_of(load(tmp_path))


def test_of_ranks_that_ended_at_once_it_may_have_been_any(tmp_path):
    for rank in range(3):
        Counting(tmp_path, rank, begin=0, pid=1 + rank, world=3, **GROUP).window(15).beat(25).write()
    Counting(tmp_path, begin=30, pid=9, **GROUP | dict(oom_kills_total=1)).counts(1).window(15).end(25)
    assert reasons(tmp_path)[0] == ("killed", "the OOM killer killed 1 of ranks 0-2")


def test_a_counter_that_is_read_much_later_is_a_probable_reason(tmp_path):
    Counting(tmp_path, begin=0, pid=1, **GROUP).window(15).beat(25).write()
    Counting(tmp_path, begin=3600, pid=2, **GROUP | dict(oom_kills_total=1)).counts(1).end(25)
    assert reasons(tmp_path)[0] == ("killed", "rank 0 probably killed by the OOM killer")


NOT_IT = {
    "the counter stands": (GROUP, 0),
    "another cgroup": (GROUP | dict(memory_group="0123abcd-8", oom_kills_total=1), 1),
    "no counter": ({}, None),
}


@pytest.mark.parametrize("why", NOT_IT)
def test_without_evidence_a_kill_has_no_reason(tmp_path, why):
    head, kills = NOT_IT[why]
    Counting(tmp_path, begin=0, pid=1, **GROUP).window(15).beat(25).write()
    later = Counting(tmp_path, begin=30, pid=2, **head)
    later.counts(kills).window(15).end(25)
    assert reasons(tmp_path)[0] == ("killed", None)


def test_a_kill_after_the_process_was_dead_is_not_its_own(tmp_path):
    """Its peer was there for ten more seconds, and only then the OOM killer killed something."""
    Counting(tmp_path, 0, begin=0, pid=1, world=2, **GROUP).window(15).beat(25).write()
    peer = Counting(tmp_path, 1, begin=0, pid=2, world=2, **GROUP).window(15).window(35).counts(1).window(45)
    peer.end(46, exception="RuntimeError", lost_peer=True)
    assert reasons(tmp_path) == [("killed", None)]


def test_an_exception_after_the_oom_killer_killed_a_worker(tmp_path):
    process = Counting(tmp_path, begin=0, pid=1, **GROUP).window(15).window(24).counts(1)
    process.end(25, exception="RuntimeError", lost_peer=False)
    assert reasons(tmp_path) == [("failed", "RuntimeError; the OOM killer killed a process of rank 0")]


def test_an_old_kill_in_the_cgroup_is_not_why_it_failed(tmp_path):
    process = Counting(tmp_path, begin=0, pid=1, **GROUP).window(15).counts(1).window(25)
    process.end(125, exception="RuntimeError", lost_peer=False)
    assert reasons(tmp_path) == [("failed", "RuntimeError")]


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


CASES = [
    pytest.param(30.0, 3600.0, 300.0, id="usual"),
    pytest.param(2.0, 40000.0, 60.0, id="rare failures"),
    pytest.param(120.0, 1200.0, 200.0, id="many failures"),
    pytest.param(300.0, 700.0, 30.0, id="expensive checkpoints"),
]


@pytest.mark.parametrize(("cost", "mean", "restart"), CASES)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_predicted_effective_time_comes_true(cost, mean, restart, seed):
    interval = best_interval(cost, mean)
    effective, _ = simulated(interval, cost, mean, restart, seed)
    assert ettr(interval, cost, mean, restart) == pytest.approx(effective, abs=0.05)


@pytest.mark.parametrize(("cost", "mean", "restart"), CASES)
def test_no_other_interval_is_much_better(cost, mean, restart):
    best = best_interval(cost, mean)
    productive = simulated(best, cost, mean, restart, 3)[1]
    others = [simulated(best * factor, cost, mean, restart, 3)[1] for factor in (0.25, 0.5, 0.8, 1.25, 2, 4)]
    assert productive >= max(others) - 0.02


def test_the_advice_learned_from_a_run_comes_true_in_the_next():
    cost, mean, restart, interval = 20.0, 3000.0, 240.0, 3600.0
    chance = random.Random(7)
    loop = checkpoints = 0.0
    for _ in range(FAILURES):
        until = chance.expovariate(1 / mean)
        loop += until
        checkpoints += until // (interval + cost)
    told = Experience(FAILURES, loop, int(checkpoints), cost, restart)
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


def reading(joules: float, uuid: str = "GPU-1", **ledger: float) -> EnergyReading:
    return EnergyReading(uuid, joules, ledger)


def test_energy_is_split_by_time_and_its_sum_is_the_counter_s():
    found = added_energy(None, reading(100, compute=5.0), reading(500, compute=8.0, data_wait=1.0))
    assert found == {"compute": 300.0, "data_wait": 100.0}
    more = added_energy(found, reading(500, compute=8.0, data_wait=1.0), reading(600, compute=8.0, data_wait=2.0))
    assert more == {"compute": 300.0, "data_wait": 200.0}


@pytest.mark.parametrize(
    "later",
    [
        reading(50, compute=6.0),
        reading(1e9, compute=6.0),
        reading(200, compute=5.0),
        reading(200, uuid="GPU-2", compute=6.0),
    ],
    ids=["began anew", "impossible", "no time passed", "another GPU"],
)
def test_an_interval_that_cannot_be_used_adds_nothing(later):
    assert added_energy(None, reading(100, compute=5.0), later) is None
    assert added_energy({"compute": 7.0}, reading(100, compute=5.0), later) == {"compute": 7.0}


def test_what_was_not_measured_stays_unknown_in_a_difference():
    known = Totals(gpu_energy_joules={"compute": 9.0}, samples=8)
    assert (known - Totals()).gpu_energy_joules is None
    assert (known - Totals(gpu_energy_joules={"compute": 4.0})).gpu_energy_joules == {"compute": 5.0}


def test_a_price_is_a_number_and_there_is_none_by_default():
    assert Config.load({}, {}).gpu_hour_price is None
    assert Config.load({"gpu_hour_price": "2.5"}, {}).gpu_hour_price == 2.5
    assert Config.load({"gpu_hour_price": "none"}, {}).gpu_hour_price is None
    with pytest.raises(SettingError):
        Config.load({"gpu_hour_price": -1}, {})


# -- the report ----------------------------------------------------------------------------------------------------


def rank(folder, number: int, *, price: float | None = None, world: int = 1, **more) -> None:
    head = line("run_start", number, **START, world_size=world, settings={"gpu_hour_price": price})
    last = line("run_end", number, **totals(wait=10.0, compute=29.0, steps=10)) | more
    write(folder, number, head, last | {"time": "2026-01-01T00:00:40.000Z"})


def told(folder, capsys) -> tuple[dict, str]:
    assert report(str(folder), as_json=True) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert report(str(folder), as_json=False) == 0
    return as_json, capsys.readouterr().out


def test_throughput_is_the_sum_over_the_ranks(tmp_path, capsys):
    rank(tmp_path, 0, world=2, samples_total=390, tokens_total=3900)
    rank(tmp_path, 1, world=2, samples_total=780, tokens_total=3900)
    found, text = told(tmp_path, capsys)
    assert found["throughput"] == {
        "samples": 1170, "samples_per_second": 30.0, "tokens": 7800, "tokens_per_second": 200.0
    }  # fmt: skip
    assert "throughput: 1170 samples, 30 per second of the training loop; 7800 tokens, 200 per second" in text
    assert [entry["samples"] for entry in found["ranks"]] == [390, 780]


def test_large_figures_are_no_powers_of_ten(tmp_path, capsys):
    samples, joules = 29 * 123_456, {"data_wait": 3.6e6 * 12_345, "compute": 0.0}
    rank(tmp_path, 0, price=1.0, samples_total=samples + 1234560, gpu_energy_total_joules=joules, gpu_uuid="G")
    _, text = told(tmp_path, capsys)
    assert ", 123456 per second of the training loop" in text
    assert "energy: 12345 of 12345 kWh" in text


def test_a_rank_that_does_not_know_its_samples_leaves_the_sum_unknown(tmp_path, capsys):
    rank(tmp_path, 0, world=2, samples_total=390)
    rank(tmp_path, 1, world=2)
    found, text = told(tmp_path, capsys)
    assert set(found["throughput"].values()) == {None}
    assert "throughput" not in text


def test_samples_of_all_attempts_are_added_up(tmp_path, capsys):
    rank(tmp_path, 0, samples_total=390)
    first = (tmp_path / "logs" / "rank-0.10.jsonl").read_text()
    second = first.replace("2026-01-01T00:0", "2026-01-01T01:0").replace('"pid":10', '"pid":99')
    (tmp_path / "logs" / "rank-0.99.jsonl").write_text(second)
    found, _ = told(tmp_path, capsys)
    assert (found["throughput"]["samples"], found["throughput"]["samples_per_second"]) == (780, 10.0)


def test_energy_of_ranks_that_share_a_gpu_counts_once(tmp_path, capsys):
    for number, uuid in enumerate(("GPU-1", "GPU-1", "GPU-2")):
        energy = {"data_wait": 1.8e6 + number, "compute": 3.6e6}
        rank(tmp_path, number, world=3, gpu_energy_total_joules=energy, gpu_uuid=uuid)
    found, text = told(tmp_path, capsys)
    assert found["gpu_energy_joules"]["data_wait"] == 2 * 1.8e6 + 1 + 2
    assert "energy: 1 of 3 kWh went into waits for data (33 %)" in text


def test_energy_of_an_agent_that_was_started_again_adds_up(tmp_path, capsys):
    lines = []
    for number, life in enumerate(("a", "b")):
        started, ended = (f"2026-01-01T00:0{number}:{second:02d}.000Z" for second in (1, 41))
        head = line("run_start", started=started, time=started, life=life, process_started="2026-01-01T00:00:00.000Z")
        spent = totals(wait=10.0, compute=29.0, steps=10)
        energy = {"data_wait": 1.8e6, "compute": 3.6e6}
        end = line("run_end", time=ended, gpu_energy_total_joules=energy, gpu_uuid="GPU-1", **spent)
        lines += [head, end]
    write(tmp_path, 0, *lines)
    other = {"data_wait": 1.9e6, "compute": 3.6e6}
    head = line("run_start", 1, started="2026-01-01T00:00:01.000Z", life="c")
    end = line(
        "run_end", 1, **totals(wait=10.0, compute=69.0, steps=10), gpu_energy_total_joules=other, gpu_uuid="GPU-1"
    )
    write(tmp_path, 1, head, end | {"time": "2026-01-01T00:01:41.000Z"})
    found, _ = told(tmp_path, capsys)
    assert {entry["attempt"] for entry in found["ranks"]} == {0}
    assert found["gpu_energy_joules"]["data_wait"] == 3.6e6  # that of rank 0, in both of its parts


def test_money_needs_a_price(tmp_path, capsys):
    rank(tmp_path, 0)
    found, text = told(tmp_path, capsys)
    assert found["cost"] is None and found["gpu_energy_joules"] is None
    assert "cost:" not in text and "energy:" not in text


def test_money_is_gpu_hours_times_the_price(tmp_path, capsys):
    rank(tmp_path, 0, price=3600.0)
    found, text = told(tmp_path, capsys)
    cost = found["cost"]
    assert cost["total"] == pytest.approx(cost["gpu_hours"] * 3600)
    assert (cost["waiting"], cost["stalls"], cost["restarts"]) == (pytest.approx(10.0), 0.0, 0.0)
    assert "; of that 10.00 waiting, 0.00 stalls, 0.00 restarts" in text


def test_stalls_of_logs_that_were_rotated_away_cost_money_too(tmp_path, capsys):
    rank(tmp_path, 0, price=3600.0, stall_lost_total_seconds={"workers_io_bound": 7200.0})
    found, text = told(tmp_path, capsys)
    assert found["stalls"] == [] and found["cost"]["stalls"] == pytest.approx(7200.0)
    assert "GPU-hours lost in stalls, over all ranks: workers_io_bound 2.000" in text


def test_what_waiting_cost_is_unknown_where_the_gpu_s_wait_is(tmp_path, capsys):
    rank(tmp_path, 0, price=3600.0, exposed_wait_total_seconds=None)
    found, text = told(tmp_path, capsys)
    assert found["cost"]["waiting"] is None
    assert "waiting" not in next(row for row in text.splitlines() if row.startswith("cost:"))
