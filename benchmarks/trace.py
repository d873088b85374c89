"""What reading a large trace costs, beside Holistic Trace Analysis, each in processes of its own.

Ours gives all of ``telemetry trace --json``; theirs gives three of its figures. Imports are counted on both sides.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import child, machine, report, spread, trace_rival
from benchmarks.report import AT_LEAST, Row, Target
from benchmarks.rival import RivalError

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS: Final = Path(__file__).parent / "results"
EVENTS: Final = child.ROOT / "tests" / "traces" / "v100_resnet50_workers0.json.gz"

_ROUNDS: Final = 3
_STEP: Final = re.compile(r"ProfilerStep#(\d+)")
_APART: Final = 100_000_000  # between the ids of one repetition and of the next
_SECTION: Final = "Reading one trace"


def write_trace(source: Path, target: Path, size: int) -> int:
    """Repeat the events of a real trace, moved in time and with ids and step numbers of their own.

    Args:
        source: the trace, gzip.
        target: where to write; gzip by its name.
        size: bytes of JSON to write at least.

    Returns:
        how many events were written.
    """
    document = json.loads(gzip.decompress(source.read_bytes()))
    events: list[dict[str, Any]] = document.pop("traceEvents")
    lasting = [event for event in events if event.get("ph") == "X"]
    span = max(e["ts"] + e["dur"] for e in lasting) - min(e["ts"] for e in lasting) + 1000
    steps = sum(1 for event in lasting if _STEP.fullmatch(event["name"]))
    written = count = repetition = 0
    with gzip.open(target, "wt", compresslevel=1) if target.suffix == ".gz" else target.open("w") as file:
        written += file.write(json.dumps(document)[:-1] + ', "traceEvents": [\n')
        while written < size:
            for event in lasting if repetition else events:
                moved = json.dumps(_moved(event, repetition, span, steps))
                written += file.write((",\n" if count else "") + moved)
                count += 1
            repetition += 1
        file.write("\n]}")
    return count


def measure(command: Sequence[str]) -> tuple[float, float]:
    """Run a command to its end. Returns its wall-clock seconds and its peak resident memory in MiB.

    Raises:
        ChildError: it failed.
    """
    with tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=child.environment())
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            last = (said.read().decode(errors="replace").strip().splitlines() or ["nothing on stderr"])[-1]
            raise child.ChildError(f"{command[0]} ended with {process.returncode}: {last[:160]}")
    return seconds, usage.ru_maxrss / 1024


def compare(file: Path, rounds: int, rival: Path | None, missing: str) -> list[Row]:
    """Read a trace by turns, ours and theirs."""
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    for _ in range(rounds):
        ours.append(measure([sys.executable, "-m", "telemetry", "trace", str(file), "--json"]))
        if rival is not None:
            theirs.append(measure([str(rival), "-c", trace_rival.SCRIPT, str(file)]))
    rows = [
        Row(_SECTION, "telemetry trace --json", "s", spread.spread([seconds for seconds, _ in ours])),
        Row(_SECTION, "telemetry trace --json, peak memory", "MiB", spread.spread([mib for _, mib in ours])),
    ]
    name = f"{trace_rival.HTA} {trace_rival.VERSION}"
    for place, unit, what in ((0, "s", ""), (1, "MiB", ", peak memory")):
        above, below = [each[place] for each in theirs], [each[place] for each in ours]
        figure = spread.spread(above) if above else None
        rows.append(Row(_SECTION, name + what, unit, figure, note=missing))
        ratio = spread.ratio_of_medians(above, below) if above else None
        rows.append(Row(_SECTION, f"{name} / telemetry{what}", "x", ratio, Target(AT_LEAST, 5.0), missing))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write. Returns the exit code: 0 also where a target is missed, which is a result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description=__doc__)
    parser.add_argument("--source", type=Path, default=EVENTS, help="a gzip trace whose events are repeated")
    parser.add_argument("--megabytes", type=int, default=200, help="of JSON (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(argv)
    rival, missing = None, ""
    try:
        rival = trace_rival.python(install=True)
    except RivalError as error:
        missing = str(error)
    about = machine.describe()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as folder:
        file = Path(folder) / "trace.json.gz"
        events = write_trace(options.source, file, options.megabytes * 1_000_000)
        about["effort"] = f"{options.megabytes} MB of JSON, {events} events, {options.rounds} rounds"
        rows = compare(file, options.rounds, rival, missing)
    about["effort"] += f", {time.monotonic() - started:.0f} s"
    print(report.text(about, rows))
    title = "What reading a trace costs"
    for path in report.write(options.output, machine.slug(about), about, rows, name="trace", title=title):
        print(f"written: {path.name}")
    return 0


def _moved(event: dict[str, Any], repetition: int, span: float, steps: int) -> dict[str, Any]:
    moved = dict(event)
    if "ts" in moved:
        moved["ts"] += repetition * span
    if isinstance(moved.get("id"), int):
        moved["id"] += repetition * _APART
    args = moved.get("args")
    if isinstance(args, dict):
        shift = repetition * _APART
        ids = ("External id", "external id", "correlation")
        moved["args"] = {k: v + shift if k in ids and isinstance(v, int) and v > 0 else v for k, v in args.items()}
    match = _STEP.fullmatch(str(moved.get("name")))
    if match:
        moved["name"] = f"ProfilerStep#{int(match[1]) + repetition * steps}"
    return moved


if __name__ == "__main__":
    raise SystemExit(main())
