"""How well the end of the memory is forecast: ``python -m tests.faults.leak_campaign [--times 8] [--only WHAT]``.

Training scripts leak in several ways until the kernel kills a process of their memory cgroup, after one to three
minutes. What the log said when half of that time was over is compared with what came. It needs the right to make a
memory cgroup. With ``--results FILE`` the table is also written there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from tests.faults.memory_group import MIB, MemoryGroup
from tests.faults.processes import environment, events

SCRIPT = Path(__file__).with_name("leaking_training.py")

WAYS = {
    "kept_tensors": "training", "copied_list": "workers", "worker_cache": "workers", "worker_mmap": "workers",
    "kept_batches": "shared_memory",
}  # fmt: skip
"""What leaks, and where that is."""


class LeakingRun(contextlib.ExitStack):
    """A run of the script under the agent, in a memory cgroup.

    Args:
        folder: where it runs.
        what: of `WAYS`.
        bytes_per_second: how fast it leaks, all processes together.
        limit_bytes: of the group.

    Raises:
        OSError: no group can be made here.
    """

    def __init__(
        self, folder: Path, what: str, *, bytes_per_second: float, limit_bytes: int, workers: int = 2,
        list_bytes: int = 300 * MIB,
    ) -> None:  # fmt: skip
        super().__init__()
        self.run_dir, self._stderr = folder / "run", folder / "stderr"
        self.group = MemoryGroup(limit_bytes)
        self.callback(self.group.close)
        arguments = map(str, (SCRIPT, what, bytes_per_second, workers, 600.0, list_bytes))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "telemetry", "run", "--run-dir", "run", *arguments],
            cwd=folder,
            env=environment(TELEMETRY_LOG_INTERVAL_SECONDS="2", OMP_NUM_THREADS="1"),
            stdout=subprocess.DEVNULL,
            stderr=self._stderr.open("wb"),
            preexec_fn=self.group.enter,  # noqa: PLW1509 - no thread of ours holds a lock
        )
        self.callback(self.end)
        self.killed_at: float | None = None

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def windows(self) -> list[dict]:
        return events(self.run_dir, "window", running=True)

    def wait(self, seconds: float = 900.0) -> None:
        """Until it has ended. Notes when the OOM killer came."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            if self.killed_at is None and self.group.kills():
                self.killed_at = time.time()
            if ended:
                break
            time.sleep(0.1)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)


# -- the campaign --------------------------------------------------------------------------------------------------

LIST_BYTES = 430 * MIB
BASE_BYTES = {"copied_list": 870 * MIB}
MAX_BASE_BYTES = 170 * MIB
"""What a run needs before it leaks, about."""

ROOM_BYTES = {"copied_list": 330 * MIB}
MAX_ROOM_BYTES = 700 * MIB
"""What is left of the limit when the training begins. The list is not read to its end before it is used up."""

SECONDS = (100.0, 160.0)
"""How long a run is to live, about."""


@dataclass(frozen=True)
class Forecast:
    """What the log of one run said at half its life.

    Attributes:
        what: of `WAYS`. ``seconds``: how long it lived, from its first step.
        where: the part that was named; None for none.
        left_seconds: what was really left then. ``said_seconds``: what was said to be left; None for nothing.
        first_ratio: when anything was said first, as a share of its life.
    """

    what: str
    seconds: float
    where: str | None
    left_seconds: float
    said_seconds: float | None
    first_ratio: float | None
    why: str = ""

    @property
    def off(self) -> float | None:
        """By how much the forecast was wrong, as a share of what was left."""
        return None if self.said_seconds is None else abs(self.said_seconds / self.left_seconds - 1)


def leak(what: str, seconds: float, workers: int) -> Forecast:
    """One run that leaks until it is killed."""
    room, base = ROOM_BYTES.get(what, MAX_ROOM_BYTES), BASE_BYTES.get(what, MAX_BASE_BYTES)
    with (
        tempfile.TemporaryDirectory() as folder,
        LeakingRun(
            Path(folder),
            what,
            bytes_per_second=room / seconds,
            limit_bytes=base + room,
            workers=workers,
            list_bytes=LIST_BYTES,
        ) as run,
    ):
        run.wait()
        windows = run.windows()
        stepping = [line for line in windows if line["steps_total"]]
        if run.killed_at is None or not stepping:
            why = f"not killed: {run.stderr[-300:]!r}"
            return Forecast(what, 0.0, None, 0.0, None, None, why)
        began = unix(stepping[0]["time"])
        life = run.killed_at - began
        known = [line for line in windows if unix(line["time"]) <= began + life / 2]
        told = [unix(line["time"]) for line in windows if "exhausted_in_seconds" in line.get("memory", {})]
        newest = known[-1]
        said = newest.get("memory", {})
        return Forecast(
            what,
            life,
            said.get("where"),
            run.killed_at - unix(newest["time"]),
            said.get("exhausted_in_seconds"),
            (told[0] - began) / life if told else None,
        )


def unix(stamp: str) -> float:
    """Unix time of a log stamp."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def table(forecasts: Sequence[Forecast]) -> list[str]:
    """A line for each way."""
    lines = [
        "| what leaks | runs | lived | part named | off at half its life: median, largest | within 25 % | said from |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for what, where in WAYS.items():
        own = [f for f in forecasts if f.what == what]
        if not own:
            continue
        offs = [f.off for f in own if f.off is not None]
        off = f"{100 * median(offs):.0f} %, {100 * max(offs):.0f} %" if offs else "-"
        first = [f.first_ratio for f in own if f.first_ratio is not None]
        lines.append(
            f"| `{what}` | {len(own)} | {min(f.seconds for f in own):.0f} to {max(f.seconds for f in own):.0f} s | "
            f"{sum(f.where == where for f in own)} | {off} | {sum(off <= 0.25 for off in offs)} | "
            f"{f'{100 * median(first):.0f} % of its life' if first else '-'} |"
        )
    right = sum(f.where == WAYS[f.what] for f in forecasts)
    within = sum(f.off is not None and f.off <= 0.25 for f in forecasts)
    return [*lines, "", f"{right} of {len(forecasts)} parts named rightly, {within} of {len(forecasts)} within 25 %."]


def about(options: argparse.Namespace, loads: tuple[float, float]) -> str:
    """What was run. ``loads``: load averages of the machine, at the start and at the end."""
    command = f"python -m tests.faults.leak_campaign --times {options.times} --seed {options.seed}"
    command += f" --together {options.together}" + (f" --only {options.only}" if options.only else "")
    return (
        f"`{command}`: scripts that leak in a memory cgroup until "
        f"the kernel kills one of their processes. The machine has {os.cpu_count()} cores. Its load average was "
        f"{loads[0]:.1f} at the start and {loads[1]:.1f} at the end."
    )


def main() -> None:
    """Run the campaign and print a line for each run, then the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.leak_campaign")
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--together", type=int, default=4, help="runs at the same time; each uses a tenth of a core")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    ways = [options.only] if options.only else list(WAYS)
    runs = [(what, chosen.uniform(*SECONDS), chosen.choice([2, 2, 3])) for _ in range(options.times) for what in ways]
    forecasts: list[Forecast] = []
    load = os.getloadavg()[0]
    with ThreadPoolExecutor(options.together) as pool:
        for found in pool.map(lambda run: leak(*run), runs):
            forecasts.append(found)
            print(found, f"off {found.off:.2f}" if found.off is not None else "", flush=True)
    lines = table(forecasts)
    print("\n".join(lines))
    if options.results:
        loads = (load, os.getloadavg()[0])
        heading = ["# Forecasts of the end of memory", "", about(options, loads), ""]
        options.results.write_text("\n".join([*heading, *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
