"""The logs of a run, written by hand for the tests of the report."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from telemetry.log.process import ProcessLog
from telemetry.model.records import CATEGORIES
from telemetry.report.as_text import as_text
from telemetry.report.summary import Report, report_of
from telemetry.util.sketch import Sketch


def line(event: str, rank: int = 0, **fields) -> dict:
    base = dict(
        time="2026-01-01T00:00:10.000Z", event=event, run="r", rank=rank, local_rank=rank, node="n", pid=10 + rank
    )
    return base | dict(tid=1, step=0) | fields


def totals(*, wait: float, compute: float, steps: int, exposed: float | None = -1.0) -> dict:
    ledger = dict.fromkeys(CATEGORIES, 0.0) | {"data_wait": wait, "compute": compute, "startup": 1.0}
    return dict(
        steps_total=steps,
        wall_seconds=sum(ledger.values()),
        ledger_total_seconds=ledger,
        exposed_wait_total_seconds=wait if exposed == -1.0 else exposed,
        overhead_seconds={"training": 1e-4, "agent": 0.01},
    )


def window(rank: int = 0, *, seconds=(), **kwargs) -> dict:
    sketch = Sketch()
    for value in seconds:
        sketch.add([value])
    return line("window", rank, step_sketch=sketch.as_log_field(), step_seconds={"max": sketch.largest}) | totals(
        **kwargs
    )


def write(folder: Path, rank: int, *lines: dict, pid: int | None = None, suffix: str = "") -> Path:
    (folder / "logs").mkdir(exist_ok=True)
    path = folder / "logs" / f"rank-{rank}.{pid or 10 + rank}.jsonl{suffix}"
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in lines))
    return path


START = dict(started="2026-01-01T00:00:00.000Z")


def reported(processes: list[ProcessLog], folder: Path = Path("/nowhere")) -> Report:
    """The report of processes that were loaded; the traces of snapshots are in the run folder."""
    return report_of(folder, processes, time.time())


def summarize(processes: list[ProcessLog]) -> dict:
    """What ``report --json`` prints."""
    return msgspec.to_builtins(reported(processes).values)


def text_of(processes: list[ProcessLog]) -> str:
    return as_text(reported(processes))
