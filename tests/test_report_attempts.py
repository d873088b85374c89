"""Attempts of a run, told apart in logs written by hand."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

import orjson
import pytest

from telemetry.records import CATEGORIES
from telemetry.report.goodput import as_job, goodput_of
from telemetry.report.goodput_text import section, verdict
from telemetry.report.log_reader import load
from tests.report_logs import line

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
        (self.folder / "attempts" / f"{self.life}.beat").write_bytes(orjson.dumps(state) + b"  \n")
        return self

    def write(self, torn: bytes = b""):
        (self.folder / "logs").mkdir(exist_ok=True)
        path = self.folder / "logs" / f"rank-{self.rank}.{self.pid}.jsonl"
        path.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in self.lines) + torn)


def job(folder, now=LATER) -> dict:
    processes = load(folder)
    found = as_job(processes, goodput_of(processes, now))
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
    processes = load(tmp_path)
    goodput = goodput_of(processes, LATER)
    assert verdict(goodput).startswith("Of 5.4 GPU-hours, 3.0 were productive (55 %): 1.7 redone after 4 kills, ")
    text = "\n".join(section(goodput))
    assert "attempt 3: killed, 4495 steps on 1 ranks, resumed at step 9000, 1495 steps lost" in text
    assert re.search(r"write a checkpoint every 6\d\S* s instead of every 75 min", text), text


def test_one_attempt_needs_no_section(tmp_path):
    Process(tmp_path, begin=0, pid=1).end(25)
    assert section(goodput_of(load(tmp_path), LATER)) == []


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
