"""``telemetry report RUN_DIR [--json] [--html FILE]``: the report of a run, and what is missing in its logs."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from telemetry.report import page_command
from telemetry.report.attempts import KILLED, MISSED_WINDOWS, RUNNING, log_interval
from telemetry.report.energy_cost import (
    cost_lines,
    cost_of,
    energy_lines,
    energy_of,
    throughput_lines,
    throughput_of,
)
from telemetry.report.goodput import as_job, goodput_of
from telemetry.report.goodput_text import ended_by_oom, section, verdict
from telemetry.report.log_files import NoRunError
from telemetry.report.log_reader import load
from telemetry.report.memory_report import memory_lines, memory_verdict
from telemetry.report.rank_processes import not_replaced
from telemetry.report.report_text import render
from telemetry.report.snapshot_traces import read_snapshots, verdict_of
from telemetry.report.stall_losses import lost_by_cause
from telemetry.report.summary import summarize
from telemetry.util.text import complain, show, show_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.goodput import Goodput
    from telemetry.report.process_log import ProcessLog


def report(run_dir: str, *, as_json: bool, html: str | None = None) -> int:
    """Print the report of a run, or write it as an HTML page.

    Args:
        run_dir: the run folder.
        as_json: print one JSON object instead of text.
        html: the file of the page; then its path is all that is printed.

    Returns:
        The exit status: 1 if there is no run in the folder, or the page cannot be written.
    """
    try:
        recorder = None if html is None else page_command.recorder()
        processes = load(Path(run_dir), recorder, side_by_side=True)
    except (NoRunError, page_command.PageError) as error:
        complain(str(error))
        return 1
    goodput = goodput_of(processes, time.time())
    summary = summarize(processes) | {"job": as_job(processes, goodput)}
    _name_attempts(summary["ranks"], processes, goodput)
    summary["throughput"] = throughput_of(summary["ranks"])
    summary["gpu_energy_joules"] = energy_of(summary["ranks"], processes)
    summary["cost"] = cost_of(summary["ranks"], processes, goodput)
    problems = read_snapshots(Path(run_dir), summary["snapshots"])
    summary["verdict"] += verdict_of(summary["snapshots"])
    over = {id(life.log) for course in goodput.courses for life in course.attempt.lives if life.how != RUNNING}
    growth = memory_verdict(not_replaced(processes), over)
    for sentence in (verdict(goodput), ended_by_oom(goodput), growth):
        summary["verdict"] += f" {sentence}" if sentence else ""
    notes = [*_notes(processes, goodput), *problems]
    memory = memory_lines(processes, over)
    if html is not None and recorder is not None:
        return page_command.write(
            html,
            summary=summary,
            processes=processes,
            goodput=goodput,
            recorder=recorder,
            notes=[*(line for line in memory if line), *notes],
        )
    if as_json:
        return show_json(orjson.dumps(summary, option=orjson.OPT_INDENT_2).decode() + "\n")
    spent = [
        *throughput_lines(summary["throughput"]),
        *energy_lines(summary["gpu_energy_joules"]),
        *cost_lines(summary["cost"]),
    ]
    sections = [*memory, *spent, *section(goodput)]
    return show(render(summary, [*sections, *([""] if notes else []), *notes], lost_by_cause(processes)))


def _name_attempts(ranks: Sequence[dict[str, Any]], processes: Sequence[ProcessLog], goodput: Goodput) -> None:
    """Tell of each entry of a rank, of which there is one for each process, which attempt it was in."""
    number = {id(life.log): course.attempt.number for course in goodput.courses for life in course.attempt.lives}
    for rank, process in zip(ranks, processes, strict=True):
        rank["attempt"] = number.get(id(process))


def _notes(processes: Sequence[ProcessLog], goodput: Goodput) -> list[str]:
    """What is missing or damaged in the logs, a line each."""
    notes: list[str] = []
    now = datetime.now(tz=timezone.utc)
    lives = [life for course in goodput.courses for life in course.attempt.lives]
    killed = {id(life.log) for life in lives if life.how == KILLED}
    replaced = {id(life.log) for life in lives if life.replaced}
    by_oom = {
        id(life.log)
        for course in goodput.courses
        if (oom := course.attempt.oom) is not None and oom.all_ranks and oom.sure
        for life in course.attempt.lives
        if life.how == KILLED and life.rank in oom.ranks
    }
    for process in processes:
        who = f"rank {process.rank} (pid {process.pid})"
        if not process.ended and id(process) not in replaced:
            age = _age_seconds(process.last_time, now)
            gone = age is None or id(process) in killed or age > MISSED_WINDOWS * log_interval(process)
            how = "was killed by the OOM killer" if id(process) in by_oom else "did not end by itself"
            notes.append(f"{who} {how if gone else 'is running'}; newest line {process.last_time}")
        if process.torn_lines:
            notes.append(f"{who}: {process.torn_lines} line(s) of its log are torn and were skipped")
        if process.wrong_fields:
            notes.append(f"{who}: {process.wrong_fields} field(s) of its log are of the wrong type and were left out")
        notes += [f"{name} is no regular file and was not read" for name in process.skipped]
        failures = [line for line in process.errors if line.get("errors_total")]
        if failures:
            newest = failures[-1]
            notes.append(
                f"{who}: {len(failures)} failure(s) of the agent's own parts, the newest: {newest.get('message')}"
            )
    return notes


def _age_seconds(time: str, now: datetime) -> float | None:
    try:
        return (now - datetime.fromisoformat(time.replace("Z", "+00:00"))).total_seconds()
    except ValueError:
        return None
