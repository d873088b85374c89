"""The simulated logs of the benchmarks have the fields that the agent writes."""

from __future__ import annotations

import dataclasses
import json

from torch.utils.data import DataLoader

import telemetry
from benchmarks.simulated_run import SimulatedRun, write_run
from telemetry.records import GpuSample, mean_of
from tests.data_sets import Numbers
from tests.running_agent import log_lines, wait_for
from tests.slice_cases import IDLE

IN_SOME_RUNS = {"environment", "loader", "memory", "resumption"}
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
