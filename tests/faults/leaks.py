"""A training script that leaks in one of several ways, and the memory cgroup that it dies in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from tests.faults.processes import environment, write

MIB: Final = 1 << 20

SCRIPT: Final = '''
import mmap, random, sys, time
import torch
from quick_optimizers import QuickSGD
from torch.utils.data import DataLoader, Dataset

WHAT, BYTES_PER_SECOND, WORKERS, SECONDS, LIST_BYTES = (
    sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
)
STEP_SECONDS = 0.1
DOCUMENT_BYTES = 8000
torch.set_num_threads(1)


class Due:
    """What one process has to leak since the last call. By the clock, so that it leaks evenly on a busy machine."""

    def __init__(self, processes):
        self.bytes_per_second = BYTES_PER_SECOND / processes
        self.left, self.newest = 0.0, None

    def __call__(self, unit):
        now = time.monotonic()
        self.left += (now - (self.newest or now)) * self.bytes_per_second
        self.newest = now
        units = int(self.left / unit)
        self.left -= units * unit
        return units


class Documents(Dataset):
    def __init__(self):
        count = LIST_BYTES // DOCUMENT_BYTES if WHAT == "copied_list" else 64
        # Each is a list of 60 small objects.
        self.documents = [[str(word).zfill(70) for word in range(60)] for _ in range(count)]
        self.kept = []
        self.due = Due(WORKERS)
        self.order = None

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if self.order is None:
            self.order = random.Random(index).sample(range(len(self.documents)), len(self.documents))
        length = 10
        if WHAT == "copied_list":
            for _ in range(self.due(DOCUMENT_BYTES)):
                length += sum(map(len, self.documents[self.order.pop()])) % 2 if self.order else 0
        elif WHAT == "worker_cache":
            self.kept.append(b"x" * self.due(1))
        elif WHAT == "worker_mmap":
            pages = self.due(4096)
            if pages:
                leaked = mmap.mmap(-1, pages * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                leaked.write(bytes(len(leaked)))
                self.kept.append(leaked)
        elif WHAT == "kept_batches":
            length += self.due(4)
        return torch.ones(length)


def main():
    loader = DataLoader(
        Documents(), batch_size=None, num_workers=WORKERS, shuffle=True, persistent_workers=WORKERS > 0
    )
    model = torch.nn.Linear(10, 1)
    optimizer = QuickSGD(model.parameters(), lr=0.1)
    kept, due = [], Due(1)
    until = time.monotonic() + SECONDS
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch[:10]).mean()
        loss.backward()
        optimizer.step()
        if WHAT == "kept_tensors":
            kept.append(torch.ones(due(4)))
        if WHAT == "kept_batches":
            kept.append(batch)
        time.sleep(STEP_SECONDS)
        if time.monotonic() > until:
            break


if __name__ == "__main__":
    main()
'''
"""``BYTES_PER_SECOND`` is what all processes together leak."""

WAYS: Final = {
    "kept_tensors": "training",
    "copied_list": "workers",
    "worker_cache": "workers",
    "worker_mmap": "workers",
    "kept_batches": "shared_memory",
}
"""What leaks, and where that is."""


class NoMemoryGroupError(Exception):
    """This machine does not let this user limit the memory of a group of processes."""


class MemoryGroup:
    """A memory cgroup below that of this process, with a limit (version 1 or 2).

    Raises:
        NoMemoryGroupError: not allowed here.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.folder = _own_group() / f"leak-{uuid.uuid4().hex[:8]}"
        try:
            self.folder.mkdir()
        except OSError as error:
            raise NoMemoryGroupError(str(error)) from error
        self.version = 1 if (self.folder / "memory.limit_in_bytes").exists() else 2
        try:
            name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
            (self.folder / name).write_text(str(limit_bytes))
        except OSError as error:
            self.folder.rmdir()
            raise NoMemoryGroupError(str(error)) from error

    def enter(self) -> None:
        """Move this process into the group. Called in the child, between fork and exec."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def kills(self) -> int:
        """How many of its processes the OOM killer has killed."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        lines = (self.folder / name).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def close(self) -> None:
        """Kill what is left in it, and remove it."""
        for _ in range(100):
            pids = (self.folder / "cgroup.procs").read_text().split()
            for pid in pids:
                os.kill(int(pid), signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.1)
        self.folder.rmdir()


def _own_group() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        raise NoMemoryGroupError("there is no memory controller")
    (path,) = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    return Path("/sys/fs/cgroup") / path.lstrip("/")


class LeakingRun:
    """A run of the script under the agent, in a memory cgroup.

    Args:
        folder: where it runs.
        what: of `WAYS`, or ``nothing``.
        bytes_per_second: how fast it leaks, all processes together.
        limit_bytes: of the group.
        seconds: after which it ends by itself.
    """

    def __init__(
        self,
        folder: Path,
        what: str,
        *,
        bytes_per_second: float,
        limit_bytes: int,
        workers: int = 2,
        seconds: float = 600.0,
        list_bytes: int = 300 * MIB,
        **settings: str,
    ) -> None:
        self.folder = folder
        self.group = MemoryGroup(limit_bytes)
        script = write(folder, "train.py", SCRIPT)
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "telemetry", "run", "--run-dir", "run", script, what, str(bytes_per_second),
                str(workers), str(seconds), str(list_bytes),
            ],
            cwd=folder,
            env=environment(TELEMETRY_LOG_INTERVAL_SECONDS="2", OMP_NUM_THREADS="1", **settings),
            stdout=subprocess.DEVNULL,
            stderr=(folder / "stderr").open("wb"),
            preexec_fn=self.group.enter,  # noqa: PLW1509 - no thread of ours holds a lock
        )  # fmt: skip
        self.killed_at: float | None = None

    def wait(self, seconds: float = 900.0) -> None:
        """Until it has ended. Notes when the OOM killer came."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            if self.killed_at is None and self.group.kills():
                self.killed_at = time.time()
            time.sleep(0.1)
        if self.killed_at is None and self.group.kills():
            self.killed_at = time.time()

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Its log."""
        found = []
        for path in (self.folder / "run" / "logs").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:
                    continue
        return [line for line in found if line["event"] == event]

    def close(self) -> None:
        """End it, and remove its group."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        self.group.close()

    def __enter__(self) -> LeakingRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def unix(stamp: str) -> float:
    """Unix time of a log stamp."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
