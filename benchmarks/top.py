"""Measures what `telemetry top` takes to show a large job: CPU, the time from a key to the screen, memory.

    python -m benchmarks.top [--ranks 1000] [--seconds 60] [--columns 120] [--lines 40] [--markdown FILE]

The ranks are simulated: their logs and heartbeats grow like those of a real job. The command runs in a pseudo-terminal.
In the second row a key is pressed ten times a second, and each moves the cursor.
"""

from __future__ import annotations

import argparse
import fcntl
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

import psutil

from benchmarks.machine import describe
from benchmarks.top_ranks import SimulatedRanks, grow_until

TARGET_CORES = 0.5
TARGET_KEY_MS = 100.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What the command took: cores, milliseconds from each key to the screen, bytes."""

    name: str
    cores: float
    key_ms: list[float]
    peak_bytes: int
    first_seconds: float
    written_bytes_a_second: float

    def row(self) -> str:
        """A line of the table."""
        return (
            f"| {self.name} | {self.cores:.2f} | {self._key(0.5)} | {self._key(0.99)} | {self.peak_bytes / 1e6:.0f} | "
            f"{self.first_seconds:.1f} | {self.written_bytes_a_second / 1e3:.1f} |"
        )

    def _key(self, share: float) -> str:
        times = sorted(self.key_ms)
        return f"{times[int(share * len(times))]:.0f}" if times else "-"

    def is_fine(self) -> bool:
        """Whether the targets are met."""
        return self.cores < TARGET_CORES and (not self.key_ms or statistics.median(self.key_ms) < TARGET_KEY_MS)


HEADING = (
    "| | cores | ms from a key to the screen, median | p99 | MB of memory, peak | s to the first ranks | "
    "KB a second to the terminal |\n|---|---|---|---|---|---|---|"
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
    options = parser.parse_args()
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
    return 0 if all(cost.is_fine() for cost in costs) else 1


def document(table: str, options: argparse.Namespace) -> str:
    """The result as a page."""
    machine = describe()
    return (
        "# What it takes to watch a large job\n\n"
        f"Measured by `python -m benchmarks.top` on {machine['cpu']}, {machine['cores']} shared cores; Python "
        f"{machine['python']}. {options.ranks} simulated ranks, "
        f"{options.seconds:.0f} s for each row, a terminal of {options.columns} columns and {options.lines} lines.\n"
        f"Targets: less than {TARGET_CORES} cores, and {TARGET_KEY_MS:.0f} ms from a key to the screen.\n\n{table}\n\n"
        "cores: CPU time of the process, its reader thread included, after the first view. All ranks have an open "
        "stall: one waits for data, the others for it. Ten keys a second move the cursor. From a key to the screen: "
        "from the byte of the key to the first byte that the command writes after it.\n"
    )


def measured(name: str, run_dir: Path, options: argparse.Namespace, *, keys: bool) -> Cost:
    """Run the command in a pseudo-terminal, and measure it."""
    main_end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", options.lines, options.columns, 0, 0))
    command = [sys.executable, "-m", "telemetry", "top", str(run_dir)]
    environment = os.environ | {"TERM": "xterm-256color"}
    began = time.monotonic()
    child = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    process = psutil.Process(child.pid)
    seen = b""
    while b"run large" not in seen:
        seen += _read(main_end, 1.0)
        if child.poll() is not None:
            raise SystemExit(seen.decode(errors="replace"))
    first = time.monotonic() - began
    until = time.monotonic() + 5
    while time.monotonic() < until:
        _read(main_end, 0.1)
    before, since = process.cpu_times(), time.monotonic()
    written, peak, number, key_ms = 0, 0, 0, []
    while time.monotonic() < since + options.seconds:
        if keys and time.monotonic() >= since + 0.1 * number:
            pressed = time.monotonic()
            os.write(main_end, b"j" if number % 40 < 20 else b"k")
            number += 1
            written += len(_read(main_end, 1.0))
            key_ms.append(1e3 * (time.monotonic() - pressed))
        written += len(_read(main_end, 0.02 if keys else 0.1))
        peak = max(peak, process.memory_info().rss)
    took, after = time.monotonic() - since, process.cpu_times()
    os.write(main_end, b"q")
    while child.poll() is None:
        _read(main_end, 0.1)
    os.close(main_end)
    cores = (after.user + after.system - before.user - before.system) / took
    return Cost(name, cores, key_ms, peak, first, written / took)


def _read(descriptor: int, seconds: float) -> bytes:
    if not select.select([descriptor], [], [], seconds)[0]:
        return b""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other end is closed
        return b""


if __name__ == "__main__":
    sys.exit(main())
