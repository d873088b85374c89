"""Measures what `telemetry top` takes to show a large job: CPU, the time of a frame, memory.

    python -m benchmarks.top [--ranks 1000] [--seconds 60] [--columns 120] [--lines 40] [--markdown FILE]

The ranks are simulated: their logs and heartbeats grow like those of a real job. The command runs in a pseudo-terminal.
In the second row a key is pressed ten times a second, so that each frame differs from the one before.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import describe
from benchmarks.top_ranks import SimulatedRanks, grow_until

TARGET_CORES = 0.5
STATISTICS = "TOP_BENCHMARK_STATISTICS"


@dataclass(frozen=True, slots=True)
class Cost:
    """What the command took: cores, the frames of a second, milliseconds of each frame, and bytes."""

    name: str
    cores: float
    frames_a_second: float
    frame_ms: list[float]
    peak_bytes: int
    first_seconds: float
    written_bytes_a_second: float

    def row(self) -> str:
        """A line of the table."""
        frames = sorted(self.frame_ms)
        worst = frames[int(0.99 * len(frames))]
        return (
            f"| {self.name} | {self.cores:.2f} | {self.frames_a_second:.1f} | {statistics.median(frames):.1f} | "
            f"{worst:.1f} | {self.peak_bytes / 1e6:.0f} | {self.first_seconds:.1f} | "
            f"{self.written_bytes_a_second / 1e3:.1f} |"
        )


HEADING = (
    "| | cores | frames a second | ms of a frame, median | p99 | MB of memory, peak | s to the first ranks | "
    "KB a second to the terminal |\n|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    """Measure and print. Returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.top", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=5.0, help="of history in the logs")
    parser.add_argument("--columns", type=int, default=120)
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--markdown", type=Path, help="write the result there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return timed_command(options.child)
    with tempfile.TemporaryDirectory() as folder:
        run_dir, stop = Path(folder, "run"), Path(folder, "stop")
        ranks = SimulatedRanks(run_dir, options.ranks, options.minutes)
        writer = multiprocessing.get_context("fork").Process(target=grow_until, args=(ranks, stop))
        writer.start()
        try:
            costs = [
                measured(name, run_dir, options, keys=keys)
                for name, keys in (("no key", False), ("ten keys a second", True))
            ]
        finally:
            stop.touch()
            writer.join(30)
    text = "\n".join([HEADING, *(cost.row() for cost in costs)])
    print(text)
    if options.markdown:
        options.markdown.write_text(document(text, options), encoding="utf-8")
    return 0 if all(cost.cores < TARGET_CORES and cost.frames_a_second > 9.5 for cost in costs) else 1


def document(table: str, options: argparse.Namespace) -> str:
    """The result as a page."""
    machine = describe()
    return (
        "# What it takes to watch a large job\n\n"
        f"Measured by `python -m benchmarks.top` on {machine['cpu']}, {machine['cores']} shared cores; Python "
        f"{machine['python']}. {options.ranks} simulated ranks, "
        f"{options.seconds:.0f} s for each row, a terminal of {options.columns} columns and {options.lines} lines.\n"
        f"Targets: less than {TARGET_CORES} cores at 10 frames a second.\n\n{table}\n\n"
        "cores: CPU time of the process, its reader thread included, after the first view. All ranks have an open "
        "stall: one waits for data, the others for it. Ten keys a second move the cursor.\n"
    )


def measured(name: str, run_dir: Path, options: argparse.Namespace, *, keys: bool) -> Cost:
    """Run the command in a pseudo-terminal, and measure it."""
    main_end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", options.lines, options.columns, 0, 0))
    with tempfile.NamedTemporaryFile() as told:
        command = [sys.executable, "-m", "benchmarks.top", "--child", str(run_dir)]
        environment = os.environ | {"TERM": "xterm-256color", STATISTICS: told.name}
        began = time.monotonic()
        child = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
        os.close(terminal)
        process = psutil.Process(child.pid)
        seen = b""
        while f"run {'large'}".encode() not in seen:
            seen += _read(main_end, 1.0)
            if child.poll() is not None:
                raise SystemExit(seen.decode(errors="replace"))
        first = time.monotonic() - began
        until = time.monotonic() + 5
        while time.monotonic() < until:
            _read(main_end, 0.1)
        before, since = process.cpu_times(), time.monotonic()
        written, peak, number = 0, 0, 0
        while time.monotonic() < since + options.seconds:
            written += len(_read(main_end, 0.1))
            if keys and time.monotonic() >= since + 0.1 * number:
                os.write(main_end, b"j" if number % 40 < 20 else b"k")
                number += 1
            peak = max(peak, process.memory_info().rss)
        took, after = time.monotonic() - since, process.cpu_times()
        os.write(main_end, b"q")
        while child.poll() is None:
            _read(main_end, 0.1)
        os.close(main_end)
        frames: list[Any] = json.loads(told.read())
    inside = [ms for at, ms in frames if since <= at <= since + took]
    cores = (after.user + after.system - before.user - before.system) / took
    return Cost(name, cores, len(inside) / took, inside, peak, first, written / took)


def _read(descriptor: int, seconds: float) -> bytes:
    if not select.select([descriptor], [], [], seconds)[0]:
        return b""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def timed_command(run_dir: str) -> int:
    """`telemetry top`, with the time of each frame noted: making its lines and painting them."""
    from telemetry.top import command, screen
    from telemetry.top.painter import Painter

    frames: list[tuple[float, float]] = []
    make, paint = screen.Frame.lines, Painter.paint
    spent = 0.0

    def timed_lines(*args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        began = time.perf_counter()
        lines = make(*args, **kwargs)
        spent = time.perf_counter() - began
        return lines

    def timed_paint(*args: Any) -> None:
        began = time.perf_counter()
        paint(*args)
        frames.append((time.monotonic(), 1e3 * (spent + time.perf_counter() - began)))

    screen.Frame.lines = timed_lines  # type: ignore[method-assign]
    Painter.paint = timed_paint  # type: ignore[method-assign, assignment]
    status = command.top(run_dir, [], once=False)
    Path(os.environ[STATISTICS]).write_text(json.dumps(frames), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
