"""Energy by category, throughput and money: what is summed, what is split, and what is left out."""

from __future__ import annotations

import json

import pytest

from telemetry.agent.totals import EnergyReading, added_energy
from telemetry.config import Config, SettingError
from telemetry.records import Totals
from telemetry.report.command import report
from tests.report_logs import START, line, totals, write


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
