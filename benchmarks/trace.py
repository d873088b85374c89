"""Measures what reading a large trace costs, compared with Holistic Trace Analysis, each in its own processes.

telemetry computes all of ``telemetry trace --json``; HTA computes three of its figures. Imports count for both.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import child, machine, report, spread
from benchmarks.report import AT_LEAST, Row, Target
from benchmarks.tool_environment import ToolEnvironment, ToolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HTA_VERSION: Final = "0.5.0"
HTA: Final = "Holistic Trace Analysis"

HTA_SCRIPT: Final = """
import logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
print(analysis.get_temporal_breakdown(visualize=False).to_json())
print(analysis.get_comm_comp_overlap(visualize=False).to_json())
print(analysis.get_idle_time_breakdown(visualize=False)[0].to_json())
"""
"""Its documentation recommends this for the temporal breakdown, the overlap and the idle time of one rank."""

HTA_ENVIRONMENT: Final = ToolEnvironment(
    tool=HTA,
    package="HolisticTraceAnalysis",
    version=HTA_VERSION,
    variable="HTA_PYTHON",
    folder=".venv-hta",
    packages=lambda: (f"HolisticTraceAnalysis=={HTA_VERSION}", "pandas==2.2.3", "numpy<2.3"),
)

RESULTS: Final = Path(__file__).parent / "results"
EVENTS: Final = child.ROOT / "tests" / "traces" / "v100_resnet50_workers0.json.gz"

_HIGH_WATER: Final = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)
_LOOK_SECONDS: Final = 0.02
_ROUNDS: Final = 3
_STEP: Final = re.compile(r"ProfilerStep#(\d+)")
_APART: Final = 100_000_000  # distance between the ids of one repetition and the next
_SECTION: Final = "Reading one trace"


def write_trace(source: Path, target: Path, size: int) -> int:
    """Repeat the events of a real trace, moved in time and with new ids and step numbers.

    Args:
        source: the trace, gzip.
        target: where to write; gzip by its name.
        size: minimum bytes of JSON.

    Returns:
        The number of events.
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


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a command: wall-clock seconds, CPU seconds, and the peak of its resident memory in MiB."""

    seconds: float
    cpu_seconds: float
    mib: float


def measure(command: Sequence[str]) -> Cost:
    """Run a command to its end.

    Its memory is the kernel's high-water mark, read repeatedly until the command ends: the value from ``wait4`` also
    includes this process's own memory at the fork.

    Raises:
        ChildError: it failed.
    """
    with tempfile.TemporaryFile() as said:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=child.environment())
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, _high_water_mib(process.pid))
            time.sleep(_LOOK_SECONDS)
        seconds = time.perf_counter() - started
        if process.returncode:
            said.seek(0)
            last = (said.read().decode(errors="replace").strip().splitlines() or ["nothing on stderr"])[-1]
            raise child.ChildError(f"{command[0]} ended with {process.returncode}: {last[:160]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak)


def compare(file: Path, rounds: int, hta_python: Path | None, missing: str) -> list[Row]:
    """Read a trace alternately with telemetry and with HTA."""
    ours: list[Cost] = []
    theirs: list[Cost] = []
    for _ in range(rounds):
        ours.append(measure([sys.executable, "-m", "telemetry", "trace", str(file), "--json"]))
        if hta_python is not None:
            theirs.append(measure([str(hta_python), "-c", HTA_SCRIPT, str(file)]))
    figures: list[tuple[str, str, Callable[[Cost], float], Target | None]] = [
        ("", "s", lambda cost: cost.seconds, Target(AT_LEAST, 5.0)),
        (", CPU time", "s", lambda cost: cost.cpu_seconds, None),
        (", peak memory", "MiB", lambda cost: cost.mib, Target(AT_LEAST, 5.0)),
    ]
    rows = []
    name = f"{HTA} {HTA_VERSION}"
    for what, unit, figure, target in figures:
        below, above = [figure(cost) for cost in ours], [figure(cost) for cost in theirs]
        rows.append(Row(_SECTION, f"telemetry trace --json{what}", unit, spread.spread(below)))
        rows.append(Row(_SECTION, name + what, unit, spread.spread(above) if above else None, note=missing))
        ratio = spread.ratio_of_medians(above, below) if above else None
        rows.append(Row(_SECTION, f"{name} / telemetry{what}", "x", ratio, target, missing))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write. Returns the exit code. It is 0 even if a target is missed, which is a result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description=__doc__)
    parser.add_argument("--source", type=Path, default=EVENTS, help="a gzip trace whose events are repeated")
    parser.add_argument("--megabytes", type=int, default=200, help="of JSON (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(argv)
    hta_python, missing = None, ""
    try:
        hta_python = HTA_ENVIRONMENT.python(install=True)
    except ToolError as error:
        missing = str(error)
    about = machine.describe()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as folder:
        file = Path(folder) / "trace.json.gz"
        events = write_trace(options.source, file, options.megabytes * 1_000_000)
        about["effort"] = f"{options.megabytes} MB of JSON, {events} events, {options.rounds} rounds"
        rows = compare(file, options.rounds, hta_python, missing)
    about["effort"] += f", {time.monotonic() - started:.0f} s"
    print(report.text(about, rows))
    title = "What reading a trace costs"
    for path in report.write(options.output, machine.slug(about), about, rows, name="trace", title=title):
        print(f"written: {path.name}")
    return 0


def _high_water_mib(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    found = _HIGH_WATER.search(text)
    return int(found[1]) / 1024 if found else 0.0


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
