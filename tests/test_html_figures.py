"""The figures of the page: a run of two ranks and two attempts whose every figure is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from html_pages import Page, columns_of, glyphs_of, items_of, page_of, table_of
from report_logs import line, write

from telemetry.records import CATEGORIES
from telemetry.util.clock import iso_time
from telemetry.util.sketch import Sketch

pytest.importorskip("bokeh")

from telemetry.report.html import palette

BEGAN = 1767225600.0  # 2026-01-01
BIN = 8  # seconds
ORDER = ("startup", "data_wait", "compute", "evaluation", "checkpoint", "other")
FIRST = ((4, 6, 24, 2, 3, 1), (4, 10, 20, 2, 3, 1))  # seconds by category and rank: of 40
SECOND = ((0, 7, 35, 7, 3.5, 3.5), (0, 14, 28, 7, 3.5, 3.5))  # of 56
DURATIONS = ([0.5] * 45 + [2.0] * 4 + [4.0], [0.25] * 45 + [1.0] * 4 + [2.0])
GPU = [
    dict(sm_active_ratio=0.5, utilization_ratio=0.9, memory_used_bytes=10e9, memory_total_bytes=80e9, power_watts=300,
         temperature_celsius=60, sm_clock_hertz=1e9, throttled=[]),
    dict(sm_active_ratio=0.7, utilization_ratio=1.0, memory_used_bytes=30e9, memory_total_bytes=80e9, power_watts=500,
         temperature_celsius=80, sm_clock_hertz=1.5e9, throttled=["hw_thermal"]),
]  # fmt: skip
HOST = dict(
    cpu_ratio=0.25, memory_used_bytes=100e9, memory_total_bytes=400e9, process_resident_memory_bytes=5e9,
    workers_bytes=2e9, shared_memory_bytes=1e9, pressure_ratio=dict(cpu=0.1, io=0.2, memory=0.3),
)  # fmt: skip
WORKERS = dict(workers=4, ready_batches=3, cpu_ratio=0.6, blocked_ratio=0.3, runnable_ratio=0.05)


def at(seconds: float) -> str:
    return iso_time(BEGAN + seconds)


def totals(rank: int, windows: int) -> dict:
    """After one window of 40 s, or another one of 56 s."""
    parts = [FIRST[rank], *([SECOND[rank]] if windows == 2 else [])]
    ledger = dict(zip(ORDER, map(sum, zip(*parts, strict=True)), strict=True))
    wall, steps = (40, 60) if windows == 1 else (96, 81)
    return dict(
        steps_total=steps, wall_seconds=wall, ledger_total_seconds=ledger, exposed_wait_total_seconds=ledger["data_wait"],
        overhead_seconds=dict(agent=0.02 * wall, training=0.01 * wall), samples_total=10 * steps,
        tokens_total=1000 * steps, gpu_uuid=f"GPU-{rank}",
        gpu_energy_total_joules=dict.fromkeys(CATEGORIES, 0.0) | dict(data_wait=0.9e6, compute=2.7e6),
    )  # fmt: skip


def window(rank: int, begin: float, windows: int) -> dict:
    sketch = Sketch()
    sketch.add(DURATIONS[windows - 1])
    percentiles = {name: dict(max=sketch.largest) for name in ("step_seconds", "data_wait_seconds")}
    sketches = {name: sketch.as_log_field() for name in ("step_sketch", "data_wait_sketch")}
    spent = totals(rank, windows)
    return line("window", rank, time=at(begin + spent["wall_seconds"])) | spent | percentiles | sketches


def run(folder: Path) -> None:
    """The first attempt is killed after 96 s, the second one begins 24 s later, and hangs after 96 s."""
    for rank in (0, 1):
        for attempt, begin in enumerate((0, 120)):
            fields = dict(pid=10 + 2 * attempt + rank, node=f"n{rank}", local_rank=0)
            head = line(
                "run_start", rank, time=at(begin), started=at(begin), world_size=2, settings=dict(gpu_hour_price=100)
            )
            events = [head, window(rank, begin, 1)]
            if not attempt:
                gpu, host = (line(event, rank, time=at(44)) for event in ("gpu", "host"))
                events += [gpu | GPU[rank], host | HOST, line("workers", rank, time=at(44)) | WORKERS]
            if not attempt and rank == 0:
                for name, start in (("evaluation", 50), ("checkpoint", 60)):
                    events.append(
                        line("phase", name=name, category=name, started=at(start), seconds=4.0, time=at(start + 4))
                    )
                events.append(line("change", time=at(80), at=at(76), first_step=70, ratio=1.5, part="compute"))
                shares = dict(Kernel=0.5, Memcpy=0.2, Other=0.3)
                events.append(line("snapshot", time=at(84), path="snapshots/gone.json", first_step=71, last_step=75,
                                   reason="stall", breakdown=shares))  # fmt: skip
            if not attempt and rank == 1:
                stall = dict(cause="workers_io_bound", opened=at(16), first_step=20)
                events.append(line("stall_open", 1, time=at(16)) | stall)
                evidence = dict(lost_seconds=dict(workers_io_bound=5.0))
                events.append(
                    line("stall_close", 1, time=at(32), closed=at(32), last_step=40, evidence=evidence) | stall
                )
            events.append(window(rank, begin, 2))
            if attempt and rank == 0:
                waiting = [dict(ranks=[[0, 0]], collective="all_reduce", sequence=7)]
                events.append(line("hang", time=at(216), since=at(200), verdict="rank 1 is gone", kind="rank_gone",
                                   waiting=waiting, suspects=[]))  # fmt: skip
            events.sort(key=lambda each: each["time"])
            write(folder, rank, *(each | fields for each in events), pid=fields["pid"])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    run(folder)
    return page_of(folder)


@pytest.fixture(scope="module")
def items(text):
    return items_of(Page(text))


def by_bin(item: dict) -> dict[str, list]:
    """The curves of a chart over time by their label: the figures by bin, None where there is none."""
    return {
        label: [None if value != value else pytest.approx(value, rel=2e-2) for value in values]
        for label, values in columns_of(item).items()
    }


def each_window(first, second) -> list:
    """Both attempts have the same windows: five bins, seven bins; between them three bins without a process."""
    return [first] * 5 + [second] * 7 + [None] * 3 + [first] * 5 + [second] * 7


def test_the_ledger_over_time_and_by_rank(items):
    shares = {"startup": (10, 0), "data wait": (20, 18.75), "compute": (55, 56.25), "evaluation": (5, 12.5),
              "checkpoint": (7.5, 6.25), "other": (2.5, 6.25)}  # fmt: skip
    found = by_bin(items["ledger"])
    assert set(found) == set(shares)
    for label, (first, second) in shares.items():
        assert each_window(first, second) == found[label][:27], label
    wall = 96.0
    for label, curve in columns_of(items["ledger-ranks"]).items():
        at_ = ORDER.index(label.replace(" ", "_"))
        assert curve == pytest.approx([100 * (FIRST[r][at_] + SECOND[r][at_]) / wall for r in (0, 1)], rel=1e-4), label


@pytest.mark.parametrize("chart", ["step-percentiles", "wait-percentiles"])
def test_percentiles_of_steps_and_waits(items, chart):
    found = columns_of(items[chart])
    measured = {label: [value for value in values if value == value] for label, values in found.items()}
    assert measured == {
        label: pytest.approx([first, second] * 2, rel=0.01)
        for label, first, second in (("p50", 0.5, 0.25), ("p95", 2.0, 1.0), ("p99", 4.0, 2.0))
    }


def test_pace_and_throughput(items):
    assert each_window(2.0, 0.5) == by_bin(items["pace"])["steps per second"][:27]
    assert each_window(40.0, 10.0) == by_bin(items["samples-rate"])["samples per second"][:27]
    assert each_window(4000.0, 1000.0) == by_bin(items["tokens-rate"])["tokens per second"][:27]
    cost = by_bin(items["agent-cost"])
    assert each_window(2.0, 2.0) == cost["agent thread (CPU)"][:27]
    assert each_window(1.0, 1.0) == cost["hooks on the training thread"][:27]


SAMPLED = {
    "gpu-activity": {"SM activity": ("50.0 %", "60.0 %", "70.0 %"), "utilisation": ("90.0 %", "95.0 %", "100.0 %")},
    "gpu-memory": {"used": ("10.0 GB", "20.0 GB", "30.0 GB"), "of the GPU": ("80.0 GB",) * 3},
    "gpu-power": {"power": ("300 W", "400 W", "500 W")},
    "gpu-clock": {"SM clock": ("1000 MHz", "1250 MHz", "1500 MHz")},
    "gpu-temperature": {"temperature": ("60 °C", "70 °C", "80 °C")},
    "gpu-throttled": {"samples with reduced clocks": ("0.0 %", "50.0 %", "100.0 %")},
    "workers-state": {"running": ("60.0 %",) * 3, "blocked": ("30.0 %",) * 3, "run-queue delay": ("5.0 %",) * 3},
    "workers-ready": {"ready batches of a rank": ("3.0",) * 3, "workers of a rank": ("4.0",) * 3},
    "host-memory": {"used on the node": ("100.0 GB",) * 3, "of the node": ("400.0 GB",) * 3,
                    "training process": ("5.0 GB",) * 3, "workers of a rank": ("2.0 GB",) * 3,
                    "shared memory (/dev/shm)": ("1.0 GB",) * 3},
    "host-cpu": {"CPU": ("25.0 %",) * 3, "CPU pressure": ("10.0 %",) * 3, "I/O pressure": ("20.0 %",) * 3,
                 "memory pressure": ("30.0 %",) * 3},
}  # fmt: skip


@pytest.mark.parametrize("chart", SAMPLED)
def test_what_was_sampled(text, chart):
    table = {row[0]: tuple(row[1:4]) for row in table_of(text, f'data-chart="{chart}"')[1:]}
    assert table == SAMPLED[chart]


def test_every_kind_of_mark_is_there_and_behind_the_steps(items):
    marks = {
        mark["kind"]: (mark["begin"] - BEGAN, mark["end"] and mark["end"] - BEGAN) for mark in items["marks"]["marks"]
    }
    assert marks == {
        "restart": (120, None), "stall": (16, 32), "hang": (200, 216), "evaluation": (50, 54), "checkpoint": (60, 64),
        "snapshot": (84, None), "change": (76, None),
    }  # fmt: skip
    for chart in ("step-percentiles", "wait-percentiles"):
        behind = {(kind, colour) for kind, colour in glyphs_of(items[chart]) if kind in {"Quad", "Segment"}}
        bands, times = ("stall", "hang", "evaluation", "checkpoint"), ("restart", "change", "snapshot")
        assert behind == {
            *(("Quad", palette.MARKS[kind]) for kind in bands), *(("Segment", palette.MARKS[kind]) for kind in times)
        }  # fmt: skip


def test_snapshots_goodput_and_attempts(text, items):
    parts = {label: values for label, values in columns_of(items["breakdown"]).items() if values != [0]}
    assert parts == {"Kernel": pytest.approx([50]), "Memcpy": pytest.approx([20]), "Other": pytest.approx([30])}
    wall = {label: value for label, (value,) in columns_of(items["goodput"]).items() if value}
    lost = 2 * 96.0 - sum(wall.get(name, 0.0) for name in ("startup", "evaluation", "checkpoint", "other"))
    assert wall["down"] == pytest.approx(24) and sum(wall.values()) == pytest.approx(216)
    assert (wall["startup"], wall["evaluation"]) == (pytest.approx(8), pytest.approx(18))
    assert sum(wall.get(name, 0.0) for name in ("productive", "redone", "data wait")) == pytest.approx(lost)
    headings, *rows = table_of(text, "<h3>Attempts</h3>")
    assert headings[:4] == ["attempt", "started", "ended", "end"]
    assert [row[:4] + row[5:7] for row in rows] == [
        ["0", at(0), at(96), "killed", "2", "81"], ["1", at(120), at(216), "killed", "2", "81"]
    ]  # fmt: skip


def test_the_ranks_in_sum(text):
    headings, *rows = table_of(text, "<h3>Figures of each process</h3>")
    assert headings == ["rank", "node", "pid", "steps", "step p50", "p99", "wait p50", "p99", "exposed wait",
                        *(category.replace("_", " ") for category in CATEGORIES)]  # fmt: skip
    assert [row[:4] + row[8:9] for row in rows] == [
        ["1", "n1", "11", "81", "33.3 %"], ["1", "n1", "13", "81", "33.3 %"],
        ["0", "n0", "10", "81", "18.1 %"], ["0", "n0", "12", "81", "18.1 %"],
    ]  # fmt: skip
    assert rows[0][9:] == ["4.2 %", "25.0 %", "50.0 %", "9.4 %", "6.8 %", "4.7 %"]


def test_samples_energy_and_cost(text):
    sums = [cell for (cell,) in table_of(text, "<h3>Sums of the run</h3>")[1:]]
    assert sums[0].startswith("throughput: 3240 samples, 22.5 per second") and "; 324000 tokens, 2250 per" in sums[0]
    assert sums[1].startswith("energy: 1 of 4 kWh went into waits for data (25 %)")
    assert sums[2].startswith("cost: 12.00 for 0.12 GPU-hours; of that 2.06 waiting, 0.14 stalls, ")
    assert table_of(text, "<h3>Energy of the GPUs by category</h3>")[1:] == [
        [
            category.replace("_", " "),
            *dict(data_wait=["1 kWh", "25.0 %"], compute=["3 kWh", "75.0 %"]).get(category, ["0 kWh", "0.0 %"]),
        ]
        for category in CATEGORIES
    ]
    assert "Not measured:" not in text.partition('<section id="throughput"')[2].partition("</section>")[0]


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ("samples_total", "samples (not counted on every rank)"),
        ("tokens_total", "tokens (not counted on every rank)"),
        ("gpu_energy_total_joules", "energy of the GPUs (no GPU with an energy counter was read)"),
        ("settings", "cost (gpu_hour_price is not set)"),
    ],
)
def test_each_sum_that_is_not_known_is_named(tmp_path, gone, named):
    run(tmp_path)
    for path in (tmp_path / "logs").iterdir():
        lines = [json.loads(each) for each in path.read_text().splitlines()]
        for each in lines:
            each.pop(gone, None)
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    section = page_of(tmp_path).partition('<section id="throughput"')[2].partition("</section>")[0]
    assert f"Not measured: {named}." in Page(section).text
