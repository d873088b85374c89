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
from telemetry.log.file import LogFile, json_logger
from telemetry.model import records
from telemetry.model.records import LOG_KIND, GpuSample, ProcessSample
from telemetry.sources.polling import mean_of
from tests.data_sets import Numbers
from tests.running_agent import log_lines, wait_for
from tests.slice_cases import IDLE

FIRST = ["time", "event", "run", "rank", "local_rank", "node", "pid", "tid", "step"]
HEAD = b'{"event":"run_start"}\n'


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(file: LogFile, number: int) -> None:
    for each in range(number):
        assert file.write(b'{"number":%d}\n' % each)


def test_a_line_is_that_of_the_contract(agent):
    assert agent.event_log.emit("window", {"steps": 3, "wait_ratio": 0.123456789})
    line = log_lines(agent)[-1]  # not closed, not flushed: written
    assert list(line)[:9] == FIRST
    assert (line["event"], line["rank"], line["pid"], line["step"]) == ("window", 0, os.getpid(), 0)
    assert (line["steps"], line["wait_ratio"]) == (3, 0.123457)
    assert agent.event_log.file.path.name == f"rank-0.{os.getpid()}.jsonl"


def test_what_json_cannot_say_is_said_as_well_as_can_be():
    told = {"message": "lone \udc80 surrogate", "thing": {"path": Path("/x")}, "number": float("nan")}
    line = json.loads(json_logger().msg("error", **dict.fromkeys(FIRST[2:], 0), time="", **told))
    assert (line["message"], line["number"]) == ("lone \\udc80 surrogate", None)


@pytest.mark.parametrize(("most", "names"), [(3, ["x.jsonl", "x.jsonl.1", "x.jsonl.2"]), (1, ["x.jsonl"])])
def test_files_are_rotated_capped_and_each_has_a_head(tmp_path, most, names):
    write_lines(LogFile(tmp_path / "x.jsonl", 200, most, lambda: HEAD), 60)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    seen = []
    for name in reversed(names):
        assert (tmp_path / name).stat().st_size <= 200
        head, *rest = lines(tmp_path / name)
        assert head == {"event": "run_start"}
        seen += [line["number"] for line in rest]
    assert seen == list(range(60 - len(seen), 60))  # the newest, in order, none lost


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


# -- the samples of a window -------------------------------------------------------------------------------------------


def test_numbers_are_averaged_and_counters_and_names_are_not():
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
    energy = [
        GpuSample(0, "GPU-0", "a GPU", energy_joules=joules, power_watts=watts)
        for joules, watts in ((1e3, 200.0), (2e3, 400.0), (None, None))
    ]
    line = mean_of(energy)
    assert (line["energy_joules"], line["power_watts"]) == (2e3, 300.0)  # the newest that is known, and a mean
    line = mean_of([ProcessSample(seconds, 2, 1, children_cpu_seconds=10 * seconds) for seconds in (0.0, 1.0)])
    assert (line["cpu_seconds"], line["children_cpu_seconds"]) == (1.0, 10.0)


def test_every_field_that_may_be_a_counter_says_what_the_log_writes():
    """``_seconds`` may be a duration or a counter: the name does not tell, so the field must."""
    samples = [kind for name, kind in vars(records).items() if name.endswith("Sample")]
    specs = [(kind.__name__, spec) for kind in samples for spec in dataclasses.fields(kind)]
    assert len(samples) > 6
    assert {spec.metadata.get(LOG_KIND) for _, spec in specs} == {None, "mean", "newest", "skip"}
    unclear = [(kind, spec.name) for kind, spec in specs if spec.name.endswith(("_total", "_seconds", "_joules"))]
    named = {(kind, spec.name) for kind, spec in specs if LOG_KIND in spec.metadata}
    assert [each for each in unclear if each not in named] == []


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
    from telemetry.report.report_command import report

    write_run(tmp_path, SimulatedRun(ranks=2, seconds=200))
    assert report(str(tmp_path), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["throughput"]["samples"] > 0 and found["throughput"]["tokens_per_second"] > 0
    assert set(found["gpu_energy_joules"]) == set(found["ranks"][0]["ledger"])
