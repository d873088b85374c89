"""`telemetry compare`, where other programs used the machine more during one run than during the other."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass

import pytest

from telemetry.cli import main
from telemetry.records import CATEGORIES
from telemetry.util.clock import iso_time
from tests.report_logs import START, line, write

WINDOW = 2.0


@dataclass(frozen=True)
class Load:
    """How busy the machine was: ``held_up``: run-queue delay, share of the wall clock; cores by who used them.

    ``cost``: seconds that the run loses for each second of delay. ``waiting``: share of the loop that waits for workers.
    ``thread``, ``worker``: their use of a core.
    """

    held_up: float = 0.0
    others: float = 1.0
    used: float = 0.5
    thread: float = 0.5
    cost: float = 1.0
    waiting: float = 0.0
    worker: float = 0.2
    known: bool = True
    children: int = 0
    gpu: str = ""


def run_of(folder, pace, load, *, seed=1, ranks=1, windows=40, scatter=0.01):
    """A run that does ``pace`` steps a second when nobody holds it up. The delay differs from window to window."""
    folder.mkdir()
    for rank in range(ranks):
        rng = random.Random(seed)
        steps = wall = delay = 0.0
        lines = [line("run_start", rank, **START, world_size=ranks, life=f"{folder.name}{rank}", cpu_count=8)]
        lines += [line("gpu", rank, name=load.gpu)] if load.gpu else []
        for number in range(windows):
            share = load.held_up * rng.choice((0.5, 1.0, 1.5))
            wall, delay = wall + WINDOW, delay + share * WINDOW
            steps += pace * WINDOW * (1 - load.cost * share) * (1 + scatter * rng.gauss(0, 1))
            waited = load.waiting * wall
            ledger = dict.fromkeys(CATEGORIES, 0.0) | {"data_wait": waited, "compute": wall - waited}
            cpu = {"used": load.used * wall, "others": load.others * wall, "known": wall, "thread": load.thread * wall}
            cpu |= {"thread_delay": 0.0, "worker": load.worker * wall, "worker_delay": delay} if load.waiting else {
                "thread_delay": delay
            }  # fmt: skip
            told = {"cpu_total_seconds": cpu} if load.known and number else {}  # the first window of a run has none
            totals = dict(steps_total=round(steps), wall_seconds=wall, ledger_total_seconds=ledger)
            totals |= {"child_processes": load.children} if load.children else {}
            when = iso_time(1_767_225_600 + wall)
            lines.append(line("window", rank, **totals, **told) | {"time": when})
        write(folder, rank, *lines, line("run_end", rank, **totals) | {"time": when})
    return folder


def compared(tmp_path, capsys, a, b, *options, ranks=1):
    """Compare runs of these paces and loads, each ``(pace, load)``."""
    folders = [run_of(tmp_path / n, *each, seed=s, ranks=ranks) for n, each, s in (("a", a, 1), ("b", b, 2))]
    status = main(["compare", *map(str, folders), "--json", *options])
    result = json.loads(capsys.readouterr().out)
    main(["compare", *map(str, folders)])
    return status, result, capsys.readouterr().out


def test_a_busier_machine_makes_no_slower_run(tmp_path, capsys):
    calm, busy = Load(held_up=0.02, others=0.1), Load(held_up=0.2, others=1.4)
    status, result, text = compared(tmp_path, capsys, (100.0, calm), (100.0, busy), "--fail-over", "5")
    assert (result["verdict"], status) == ("no difference", 0)
    assert result["ratio"] == pytest.approx(1, abs=0.03)
    assert result["measured"]["ratio"] == pytest.approx(0.8 / 0.98, abs=0.03)
    assert result["measured"]["interval"][1] < 1
    assert result["load"]["others_ratio"] == {"a": 0.0125, "b": 0.175}
    assert result["load"]["held_up_ratio"]["b"] == pytest.approx(0.2, abs=0.03)
    assert "held up" in result["why"]
    assert "As measured" in text
    assert "held up" in text


def test_a_slower_run_is_found_beside_other_programs(tmp_path, capsys):
    _, result, text = compared(tmp_path, capsys, (100.0, Load(held_up=0.08)), (90.0, Load(held_up=0.05)))
    assert result["verdict"] == "slower"
    assert result["ratio"] == pytest.approx(0.9, abs=0.02)
    measured, ratio = result["measured"]["ratio"], result["ratio"]
    assert (
        "B is slower: without the time in which other programs held them up, B would do "
        f"{ratio:.3f} times the steps per second of A" in text
    )
    assert f"As measured, it did {measured:.3f} times (95 % interval" in text
    assert "it does" not in text


def test_delay_that_a_run_causes_itself_is_not_left_out(tmp_path, capsys):
    """B's own workers take the cores from its training thread, on a machine that nobody else uses."""
    alone, crowded = Load(held_up=0.01, others=0.02), Load(held_up=0.3, others=0.02, used=7.9, thread=0.6)
    _, result, _ = compared(tmp_path, capsys, (100.0, alone), (100.0, crowded))
    assert result["verdict"] == "slower"
    assert result["ratio"] == pytest.approx(result["measured"]["ratio"], abs=0.03)


def test_own_processes_that_live_on_are_warned_of(tmp_path, capsys):
    _, _, text = compared(tmp_path, capsys, (100.0, Load()), (100.0, Load(children=2)))
    assert "B has started processes with multiprocessing; as long as they live, they count as other programs" in text
    assert "A has started processes" not in text


def test_delay_that_costs_nothing_makes_no_faster_run(tmp_path, capsys):
    """While the thread waits for a core, the GPU has enough to do."""
    _, result, _ = compared(tmp_path, capsys, (100.0, Load()), (100.0, Load(held_up=0.2, cost=0.0)))
    assert result["verdict"] == "no difference"
    assert result["load"]["cost"] < 0.2
    assert result["ratio"] == pytest.approx(1, abs=0.03)


def test_workers_that_are_held_up_count_in_waits(tmp_path, capsys):
    calm, busy = Load(held_up=0.02, waiting=0.95), Load(held_up=0.2, waiting=0.95)
    _, result, _ = compared(tmp_path, capsys, (100.0, calm), (100.0, busy))
    assert result["verdict"] == "no difference"
    assert result["measured"]["interval"][1] < 1


def test_without_figures_of_other_programs_it_is_as_measured(tmp_path, capsys):
    _, result, text = compared(tmp_path, capsys, (100.0, Load(known=False)), (80.0, Load(held_up=0.05)))
    assert (result["verdict"], result["why"], result["load"]) == ("slower", None, None)
    assert result["measured"] == {"ratio": result["ratio"], "interval": result["interval"]}
    assert "ther programs" not in text


def test_other_ranks_of_a_node_are_not_others(tmp_path, capsys):
    """Each of two ranks sees the other's cores as used by someone else."""
    load = Load(held_up=0.2, others=0.5, used=0.5)
    _, result, _ = compared(tmp_path, capsys, (100.0, load), (80.0, load), ranks=2)
    assert result["load"]["others_ratio"] == {"a": 0.0, "b": 0.0}
    assert result["load"]["held_up_ratio"] == {"a": 0.0, "b": 0.0}
    assert result["verdict"] == "slower"


@pytest.mark.parametrize("held_up", [0.3, 0.6])
def test_runs_that_were_held_up_most_of_the_time_are_told_nothing(tmp_path, capsys, held_up):
    """Much is left out, and how much exactly is not known: the interval is long, and has ends."""
    load = Load(held_up=held_up, others=7.5)
    _, result, _ = compared(tmp_path, capsys, (100.0, load), (95.0, Load(others=0.1)))
    low, high = result["interval"]
    assert result["verdict"] == "no difference"
    assert 0.05 < low < 0.95 < high < 20


def half(folder, capsys, load):
    """Half of the interval of two equal runs, relative to the ratio."""
    folder.mkdir()
    low, high = compared(folder, capsys, (100.0, load), (100.0, load))[1]["interval"]
    return math.log(high / low) / 2


def test_a_run_that_computes_all_the_time_is_less_certain(tmp_path, capsys):
    """Its pace follows that of the cores. A training thread with a GPU may only look as if it computed."""
    waits = half(tmp_path / "waits", capsys, Load(thread=0.02))
    assert half(tmp_path / "computes", capsys, Load(thread=0.98)) > 1.3 * waits
    assert half(tmp_path / "gpu", capsys, Load(thread=0.98, gpu="NVIDIA H100")) == pytest.approx(waits, rel=0.01)


def test_workers_that_compute_all_the_time_are_less_certain(tmp_path, capsys):
    wait, compute = (
        Load(waiting=0.95, worker=0.1, gpu="NVIDIA H100"),
        Load(waiting=0.95, worker=0.98, gpu="NVIDIA H100"),
    )
    assert half(tmp_path / "computes", capsys, compute) > 1.3 * half(tmp_path / "wait", capsys, wait)


def test_ranks_make_a_run_no_longer(tmp_path, capsys):
    """What lasts for many minutes is in all ranks at once."""
    halves = []
    for known in (True, False):
        for ranks in (1, 4):
            folder = tmp_path / f"{known}{ranks}"
            folder.mkdir()
            load = Load(known=known, thread=0.0)
            runs = [run_of(folder / name, 100.0, load, windows=2000, ranks=ranks, scatter=0.001) for name in "ab"]
            main(["compare", *map(str, runs), "--json"])
            low, high = json.loads(capsys.readouterr().out)["interval"]
            halves.append(math.log(high / low) / 2)
    assert halves == pytest.approx([halves[0]] * 4, rel=0.1)


def test_a_window_without_figures_leaves_the_ratio_as_measured(tmp_path, capsys):
    folders = [run_of(tmp_path / name, 100.0, Load(held_up=0.1), seed=seed) for seed, name in enumerate("ab")]
    path = next((folders[1] / "logs").iterdir())
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    for each in lines[15:25]:  # the collector was down: the sums do not grow, and are left out of the lines
        each.pop("cpu_total_seconds")
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    main(["compare", *map(str, folders), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["load"] is None
    assert result["ratio"] == result["measured"]["ratio"]


def test_hardly_any_time_that_is_left_gives_an_interval_with_ends(tmp_path, capsys):
    """Windows in which nothing else ran, and windows in which hardly a step was done."""
    load = Load(held_up=0.64, others=7.9, cost=1.04)
    _, result, _ = compared(tmp_path, capsys, (100.0, load), (100.0, load))
    low, high = result["interval"]
    assert 0 < low < result["ratio"] < high
    assert result["load"]["cost"] == pytest.approx(1.04, abs=0.05)
