"""The log: one JSON object a line, whole or not at all, rotated and capped; simulated logs have the same fields."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import telemetry
from benchmarks.simulated_run import SimulatedRun, write_run
from telemetry import records
from telemetry.agent.collectors import mean_of
from telemetry.agent.log_file import JsonLog, LogFile
from telemetry.records import LOG_KIND, GpuSample, ProcessSample
from telemetry.util.processes import Identity
from tests.data_sets import Numbers
from tests.running_agent import log_lines, wait_for
from tests.slice_cases import IDLE

ME = Identity(run="r", rank=3, local_rank=1, world_size=4, node="n", pid=77, launcher="torchrun")


@pytest.fixture
def log(tmp_path: Path) -> JsonLog:
    return make(tmp_path)


def make(folder: Path, **settings) -> JsonLog:
    defaults = dict(max_bytes=1 << 20, max_files=3)
    return JsonLog(
        folder / "logs",
        ME,
        timestamp=lambda: "2026-01-02T03:04:05.678Z",
        step=lambda: 9,
        head=lambda: {"started": "2026-01-01T00:00:00.000Z"},
        **defaults | settings,
    )


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_that_of_the_contract(log):
    assert log.emit("window", {"steps": 3, "wait_ratio": 0.5})
    (line,) = lines(log.file.path)
    assert list(line)[:9] == ["time", "event", "run", "rank", "local_rank", "node", "pid", "tid", "step"]
    assert line["event"] == "window"
    assert (line["time"], line["run"], line["rank"], line["local_rank"]) == ("2026-01-02T03:04:05.678Z", "r", 3, 1)
    assert (line["node"], line["pid"], line["step"], line["steps"]) == ("n", 77, 9, 3)
    assert log.file.path.name == "rank-3.77.jsonl"


def test_a_line_is_on_its_way_at_once(log):
    log.emit("window", {})
    assert len(lines(log.file.path)) == 1  # not closed, not flushed: written


def test_files_are_rotated_capped_and_each_has_a_head(tmp_path):
    log = make(tmp_path, max_bytes=2000)
    for number in range(60):
        log.emit("window", {"number": number})
    files = sorted(p.name for p in (tmp_path / "logs").iterdir())
    assert files == ["rank-3.77.jsonl", "rank-3.77.jsonl.1", "rank-3.77.jsonl.2"]
    seen = []
    for name in reversed(files):
        path = tmp_path / "logs" / name
        assert path.stat().st_size <= 2000
        content = lines(path)
        assert content[0]["event"] == "run_start"
        assert content[0]["continued"] is True
        seen += [line["number"] for line in content[1:]]
    assert seen == list(range(60 - len(seen), 60))  # the newest, in order, none lost


def test_one_file_only(tmp_path):
    log = make(tmp_path, max_bytes=1000, max_files=1)
    for number in range(20):
        log.emit("window", {"number": number})
    assert [p.name for p in (tmp_path / "logs").iterdir()] == ["rank-3.77.jsonl"]
    assert lines(log.file.path)[-1]["number"] == 19


def test_what_json_cannot_say_is_said_as_well_as_can_be(log):
    log.emit("error", {"message": "lone \udc80 surrogate", "thing": {"path": Path("/x")}, "number": float("nan")})
    (line,) = lines(log.file.path)
    assert line["message"] == "lone \\udc80 surrogate"
    assert line["number"] is None


def test_what_cannot_be_written_is_counted_and_the_log_goes_on(tmp_path):
    (tmp_path / "logs").write_text("a file where the folder should be")
    log = make(tmp_path)
    assert not log.emit("window", {})
    assert log.file.dropped == 1
    assert isinstance(log.file.last_error, OSError)
    (tmp_path / "logs").unlink()
    assert log.emit("window", {})


def test_a_torn_line_is_ended_before_the_next(tmp_path):
    path = tmp_path / "x.jsonl"
    file = LogFile(path, 1 << 20, 3, lambda: b"")
    file.write(b"{}\n")
    with path.open("ab") as torn:
        torn.write(b'{"torn": ')
    file.forget()  # as after a full disk: the next line opens it again
    file.write(b"{}\n")
    assert path.read_bytes() == b'{}\n{"torn": \n{}\n'


def test_a_link_planted_in_place_of_the_log_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "x.jsonl"
    os.symlink(victim, path)
    assert not LogFile(path, 1 << 20, 3, lambda: b"").write(b"{}\n")
    assert victim.read_text() == "precious"


def test_numbers_are_averaged_and_names_are_not():
    """Between worker 0 and worker 4 there is no worker 2."""
    readings = [
        dataclasses.replace(
            IDLE, busy_ratio=busy, head_of_line_worker=worker, head_of_line_since_seconds=since, fetches_total=fetches
        )
        for busy, worker, since, fetches in ((0.2, 0, 9.0, 10), (0.4, 4, 1.0, 20), (0.6, None, None, 30))
    ]
    line = mean_of(readings)
    assert (line["busy_ratio"], line["fetches_total"]) == (pytest.approx(0.4), 30)
    assert (line["head_of_line_worker"], line["head_of_line_since_seconds"]) == (4, 1.0)
    assert mean_of([IDLE])["head_of_line_worker"] is None


def test_counters_of_a_sample_are_not_averaged():
    energy = [
        GpuSample(0, "GPU-0", "a GPU", energy_joules=joules, power_watts=watts)
        for joules, watts in ((1e3, 200.0), (2e3, 400.0), (None, None))
    ]
    line = mean_of(energy)
    assert (line["energy_joules"], line["power_watts"]) == (2e3, 300.0)  # the newest that is known, and a mean
    ended = [ProcessSample(seconds, 2, 1, children_cpu_seconds=10 * seconds) for seconds in (0.0, 1.0)]
    line = mean_of(ended)
    assert (line["cpu_seconds"], line["children_cpu_seconds"]) == (1.0, 10.0)


SAMPLES = [kind for module in (records,) for name, kind in vars(module).items() if name.endswith("Sample")]


def test_every_field_that_may_be_a_counter_says_what_the_log_writes():
    """``_seconds`` may be a duration or a counter: the name does not tell, so the field must."""
    assert len(SAMPLES) > 6
    silent = [
        f"{kind.__name__}.{spec.name}"
        for kind in SAMPLES
        for spec in dataclasses.fields(kind)
        if spec.name.endswith(("_total", "_seconds", "_joules")) and LOG_KIND not in spec.metadata
    ]
    assert silent == []


def test_the_kinds_of_fields_are_the_three_that_exist():
    kinds = {spec.metadata.get(LOG_KIND) for kind in SAMPLES for spec in dataclasses.fields(kind)}
    assert kinds == {None, "mean", "newest", "skip"}


# -- the simulated logs of the benchmarks ------------------------------------------------------------------------------

IN_SOME_RUNS = {"environment", "epochs", "loader", "memory", "resumption"}
"""Fields of few lines: what is new, and what happened."""


def test_a_simulated_line_has_the_fields_of_a_real_one(agent, tmp_path):
    for _ in DataLoader(Numbers(8), batch_size=2):
        pass
    wait_for(lambda: {"window", "host"} <= {line["event"] for line in log_lines(agent)})
    telemetry.stop()
    real: dict[str, set[str]] = {}
    for line in log_lines(agent):
        real.setdefault(line["event"], set()).update(line)
    workers = set(mean_of([IDLE])) - {"fetch_duration"}  # a histogram: none is logged
    real |= {"gpu": {field.name for field in dataclasses.fields(GpuSample)}, "workers": workers}
    write_run(tmp_path / "simulated", SimulatedRun(ranks=1, seconds=20))
    (path,) = (tmp_path / "simulated" / "logs").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    checked = [line for line in lines if line["event"] in real]
    assert {line["event"] for line in checked} == {"run_start", "window", "gpu", "host", "workers", "run_end"}
    missing = {(line["event"], name) for line in checked for name in real[line["event"]] - set(line)}
    assert [each for each in sorted(missing) if each[1] not in IN_SOME_RUNS] == []


def test_a_simulated_run_knows_its_samples_tokens_and_energy(tmp_path, capsys):
    from telemetry.report.command import report

    write_run(tmp_path, SimulatedRun(ranks=2, seconds=200))
    assert report(str(tmp_path), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["throughput"]["samples"] > 0 and found["throughput"]["tokens_per_second"] > 0
    assert set(found["gpu_energy_joules"]) == set(found["ranks"][0]["ledger"])
