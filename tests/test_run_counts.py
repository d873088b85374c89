"""Samples and tokens of a run while it is there: over attempts, as figures, in the log, and on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from html_pages import Page, page_of
from report_logs import START, line, window, write

from telemetry.log.reader import load
from tests.faults.warm_python import warm_python
from tests.report_logs import summarize

SCRIPT = """
import json, os, signal, sys, time
import telemetry
import torch
from quick_optimizers import QuickSGD
from torch.utils.data import DataLoader

kill, counts = sys.argv[1] == "kill", sys.argv[2]
weight = torch.zeros(1, requires_grad=True)
optimizer, loader = QuickSGD([weight], lr=0.1), DataLoader(range(60), 4, num_workers=2, multiprocessing_context="fork")
for _ in range(2):
    for number, batch in enumerate(loader, 1):
        weight.sum().backward()
        optimizer.step()
        telemetry.tokens(100 + number)
        if number == 11:
            break
with open(counts) as file:
    samples = (1 + len(file.readlines())) * 88
deadline = time.monotonic() + 60
while telemetry.metrics().get("samples_total") != samples:
    assert time.monotonic() < deadline, (telemetry.metrics(), samples)
    time.sleep(0.02)
with open(counts, "a") as file:
    file.write(json.dumps(telemetry.metrics()) + "\\n")
if kill:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def attempt(folder: Path, how: str) -> int:
    (folder / "train.py").write_text(SCRIPT)
    command = ("-m", "telemetry", "run", "--run-dir", "run", "--port", "off", "--interval-seconds", "0.1",
               "train.py", how, "counts")  # fmt: skip
    environment = {"PYTHONPATH": str(Path(__file__).parent), "PATH": "/usr/bin:/bin"}
    return warm_python(*command, cwd=folder, env=environment).returncode


def test_counts_go_on_over_attempts_and_are_the_scripts_own(tmp_path):
    (tmp_path / "counts").touch()
    assert [attempt(tmp_path, how) for how in ("kill", "end", "kill", "end")] == [-9, 0, -9, 0]
    shown = [json.loads(each) for each in (tmp_path / "counts").read_text().splitlines()]
    tokens = 2 * (11 * 100 + sum(range(12)))
    assert [(each["samples_total"], each["tokens_total"]) for each in shown] == [
        (88 * n, tokens * n) for n in range(1, 5)
    ]
    ranks = summarize(load(tmp_path / "run"))["ranks"]
    # The third is a new run in the folder, because the second had finished: the report is about it. What a killed process
    # has not written into its log is not in the report.
    assert [(rank["samples"], rank["tokens"]) for rank in ranks][1:] == [(88, tokens)]


# -- the page ----------------------------------------------------------------------------------------------------------


def tables(text: str) -> dict[str, list[str]]:
    """The rows of the page's tables under the charts of rates: lowest, mean, highest, last."""
    found = Page(text).text
    return {
        name: re.search(rf"{name} per second ([\d.]+) ([\d.]+) ([\d.]+) ([\d.]+)", found).groups()
        for name in ("samples", "tokens")
        if re.search(rf"{name} per second [\d.]+", found)
    }


def rank_log(folder: Path, rank: int, *, samples: bool = True, tokens: bool = True) -> None:
    lines = [line("run_start", rank, **START)]
    for seconds in (10, 20, 30):
        fields = window(rank, wait=0.1 * seconds, compute=0.9 * seconds, steps=seconds, seconds=[1.0] * 10)
        fields |= {"time": f"2026-01-01T00:00:{seconds + 1}.000Z"}
        fields |= {"samples_total": 80 * seconds} if samples else {}
        fields |= {"tokens_total": 4000 * seconds} if tokens and seconds > 10 else {}
        lines.append(fields)
    write(folder, rank, *lines)


def test_the_page_has_rates_over_time_summed_over_the_ranks(tmp_path):
    pytest.importorskip("bokeh")
    rank_log(tmp_path, 0)
    rank_log(tmp_path, 1)
    found = tables(page_of(tmp_path))
    assert {name: float(row[1]) for name, row in found.items()} == {"samples": 160.0, "tokens": 8000.0}


def test_rates_that_one_rank_does_not_know_are_not_on_the_page(tmp_path):
    pytest.importorskip("bokeh")
    rank_log(tmp_path, 0)
    rank_log(tmp_path, 1, tokens=False)
    assert set(tables(page_of(tmp_path))) == {"samples"}
