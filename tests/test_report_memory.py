"""What the report says of memory that grows: while the run lives, when it was killed, and after a restart."""

from __future__ import annotations

import time

import orjson
import pytest

from telemetry.report.command import report
from telemetry.util.clock import iso_time
from telemetry.util.text import rough_duration
from tests.report_logs import line, totals, window, write

GROWS = {
    "growth_bytes_per_hour": 1_200_000_000,
    "where": "workers",
    "exhausted_in_seconds": 10_800.0,
    "exhausted": "memory",
    "copied_on_write": True,
    "advice": "a list is copied on write",
}
USED = {"wait": 1.0, "compute": 9.0, "steps": 10}


def at(ago: float, a_line: dict) -> dict:
    return a_line | {"time": iso_time(time.time() - ago)}


def start(ago: float, rank: int = 0) -> dict:
    return at(ago, line("run_start", rank, started=iso_time(time.time() - ago), world_size=1))


def grown(ago: float, rank: int = 0, **changes) -> dict:
    field = {name: value for name, value in (GROWS | changes).items() if value is not None}
    return at(ago, window(rank, **USED) | {"memory": field})


def text_and_json(tmp_path, capsys):
    assert report(str(tmp_path), as_json=False) == 0
    text = capsys.readouterr().out
    assert report(str(tmp_path), as_json=True) == 0
    return text, orjson.loads(capsys.readouterr().out)


def test_a_run_that_goes_on_says_when_and_what(tmp_path, capsys):
    write(tmp_path, 0, start(60), grown(1))
    text, as_json = text_and_json(tmp_path, capsys)
    said = "Node n runs out of memory in about 3 h: the workers of rank 0 grow 1.2 GB/h; a list is copied on write."
    assert said in text
    assert said in as_json["verdict"]
    assert as_json["ranks"][0]["memory"] == {
        "growth_bytes_per_hour": 1_200_000_000, "where": "workers", "exhausted_in_seconds": 10_800.0,
    }  # fmt: skip
    assert "memory: the workers of rank 0 grow 1.2 GB/h; a list is copied on write, used up in about 3 h\n" in text


@pytest.mark.parametrize(
    ("exhausted", "where", "said"),
    [
        (
            "shared_memory",
            "shared_memory",
            "/dev/shm of node n is full in about 3 h: /dev/shm of rank 0 grows 1.2 GB/h",
        ),
        ("cuda", "cuda", "The GPU of rank 0 runs out of memory in about 3 h: the tensors on the GPU of rank 0 grow"),
        (
            "memory",
            None,
            "Node n runs out of memory in about 3 h: memory outside of this run's processes grows 1.2 GB/h",
        ),
    ],
)
def test_what_is_used_up_is_named(tmp_path, capsys, exhausted, where, said):
    write(tmp_path, 0, start(60), grown(1, exhausted=exhausted, where=where))
    assert said in text_and_json(tmp_path, capsys)[1]["verdict"]


def test_a_dead_run_still_says_what_grew(tmp_path, capsys):
    write(tmp_path, 0, start(9060), grown(9000, exhausted_in_seconds=12.0))
    text, as_json = text_and_json(tmp_path, capsys)
    assert "When its log ends, memory was to run out in about 12 s: the workers of rank 0 grew" in as_json["verdict"]
    assert "memory: the workers of rank 0 grew 1.2 GB/h" in text
    assert as_json["ranks"][0]["memory"]["where"] == "workers"


def test_a_restarted_run_still_says_what_grew_before(tmp_path, capsys):
    write(tmp_path, 0, start(9060), grown(9000, exhausted_in_seconds=12.0), pid=10)
    write(tmp_path, 0, start(60), at(1, window(**USED)), pid=11)
    text, as_json = text_and_json(tmp_path, capsys)
    assert "memory" not in as_json["verdict"]
    assert "memory: the workers of rank 0 grew 1.2 GB/h" in text
    assert [rank["memory"]["where"] for rank in as_json["ranks"]] == ["workers", None]


def test_the_rank_that_fills_the_memory_is_named_before_one_that_sees_it(tmp_path, capsys):
    write(tmp_path, 0, start(60), grown(1, where=None, advice=None, exhausted_in_seconds=10_000.0))
    write(tmp_path, 1, start(60, 1), grown(1, 1))
    assert "the workers of rank 1 grow" in text_and_json(tmp_path, capsys)[1]["verdict"]


def test_a_run_that_has_finished_and_one_that_does_not_grow_say_nothing(tmp_path, capsys):
    write(tmp_path, 0, start(60), grown(5), at(1, line("run_end", **totals(**USED)) | {"memory": GROWS}))
    write(tmp_path, 1, start(60, 1), at(1, window(1, **USED)))
    text, as_json = text_and_json(tmp_path, capsys)
    assert "memory" not in as_json["verdict"]
    assert as_json["ranks"][1]["memory"] == dict.fromkeys(("growth_bytes_per_hour", "where", "exhausted_in_seconds"))
    assert text.count("memory: ") == 1, "how it grew is still of interest"


def test_a_damaged_field_is_left_out(tmp_path, capsys):
    write(tmp_path, 0, start(60), grown(1, exhausted_in_seconds="soon", where=7))
    text, as_json = text_and_json(tmp_path, capsys)
    assert as_json["ranks"][0]["memory"]["where"] is None
    assert "2 field(s) of its log are of the wrong type" in text


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0 s"), (119, "119 s"), (720, "12 min"), (10_800, "3 h"), (432_000, "5 days")]
)
def test_durations_in_a_sentence(seconds, words):
    assert rough_duration(seconds) == words
