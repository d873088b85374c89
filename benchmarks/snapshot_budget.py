"""Memory and time that a snapshot adds to a training whose steps have many small operators.

Each number of operators is run without the agent and with it, several times, in processes of their own. The steps to
record are as large as that; the other steps are small. Of the times the shortest counts, because other work on the
machine only adds to them, and of the memory the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks import child

_OPERATORS: Final = (300, 6_000, 25_000, 60_000, 200_000, 1_000_000)
_STEPS: Final = 5
_SMALL: Final = 300
_RUNS: Final = 5
_HEADINGS = (
    "| operators a step | added memory | a step without the agent | with it | added pauses | outcome |"
    "\n| --- | --- | --- | --- | --- | --- |"
)


def measure(*, operators: int, agent: bool) -> dict[str, Any]:
    """Mean seconds of a large step, peak memory in MiB, and the log line of the snapshot."""
    import torch
    from torch.utils.data import DataLoader

    import telemetry

    torch.set_num_threads(1)
    first, second = torch.ones(4), torch.ones(4)
    durations: list[float] = []
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as folder:
        started: Any = telemetry.start(folder, port="off", start_line=False, interval_seconds=0.1) if agent else None
        for number, _ in enumerate(DataLoader(range(1_000_000))):
            if number == 10 and started is not None:
                telemetry.request_snapshot(steps=_STEPS)
            if started is not None and sum(started.snapshots.counts.values()):
                break
            capture = started.snapshots._capture if started is not None else None
            export = capture._export if capture is not None else None
            large = number >= 10 if capture is None else export and capture._ended >= export.plan.first_step - 1
            begin = time.perf_counter()
            for _ in range(operators if large else _SMALL):
                first + second
            if large:
                durations.append(time.perf_counter() - begin)
            if started is None and len(durations) > _STEPS:
                break
        telemetry.stop()
        line = _snapshot_line(folder) if agent else {}
    return {"step": statistics.mean(durations), "peak": _peak_mib(), "line": line}


def _snapshot_line(folder: str) -> dict[str, Any]:
    for path in Path(folder).glob("logs/*.jsonl"):
        for text in path.read_text(encoding="utf-8").splitlines():
            if json.loads(text)["event"] == "snapshot":
                return dict(json.loads(text))
    return {}


def _peak_mib() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", type=int, nargs="*", default=_OPERATORS)
    print(_HEADINGS)
    for operators in parser.parse_args().operators:
        runs = [
            [child.run("benchmarks.snapshot_budget", {"operators": operators, "agent": agent}) for _ in range(_RUNS)]
            for agent in (False, True)
        ]
        bare, observed = ({name: [run[name] for run in each] for name in ("step", "peak", "line")} for each in runs)
        lines = observed["line"]
        paused = min(sum([*line["pause_seconds"].values(), *line.get("held_seconds", {}).values()]) for line in lines)
        memory = statistics.median(observed["peak"]) - statistics.median(bare["peak"])
        outcomes = {f"{line['result']}: {line['why'] or 'all steps'}" for line in lines}
        cells = [
            f"{operators}",
            f"+{memory:.0f} MiB",
            f"{1e3 * min(bare['step']):.1f} ms",
            f"{1e3 * min(observed['step']):.1f} ms",
            f"{paused:.2f} s",
            "; ".join(sorted(outcomes)),
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        child.answer(measure)
    else:
        main()
