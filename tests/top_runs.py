"""What the tests of ``telemetry top`` share: the run folder of a job, whose ranks log what a test says."""

from __future__ import annotations

import json
from datetime import datetime, timezone

from telemetry.model.records import CATEGORIES
from telemetry.top.run_folder import RunFolder

NOW = 1_800_000_000.0

ADVICE = {
    "action": "use more workers",
    "setting": "num_workers",
    "value": "8",
    "predicted_speedup": 1.9,
    "because": "why",
}


def iso(unix_seconds: float) -> str:
    return (
        datetime.fromtimestamp(unix_seconds, tz=timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def dumped(*lines: dict) -> bytes:
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def log_line(event: str, at: float, rank: int = 0, node: str = "n1", **fields) -> dict:
    return {"time": iso(at), "event": event, "run": "r", "rank": rank, "local_rank": rank, "node": node,
            "pid": 10 + rank} | fields  # fmt: skip


def start(at: float, rank: int = 0, node: str = "n1", **fields) -> dict:
    return log_line("run_start", at, rank, node, started=iso(at), life=f"a{rank}", **fields)


def window(
    at: float, seconds: float, rank: int = 0, node: str = "n1", *, wait: float = 0.0, steps: int = 0, **more
) -> dict:
    """A window whose totals are of ``seconds``, of which ``wait`` were data wait and the rest compute."""
    ledger = dict.fromkeys(CATEGORIES, 0.0) | {"data_wait": wait, "compute": seconds - wait}
    totals = {"steps_total": steps, "wall_seconds": seconds, "ledger_total_seconds": ledger,
              "exposed_wait_total_seconds": wait, "step_seconds": {"p50": 0.1, "max": 0.2}}  # fmt: skip
    return log_line("window", at, rank, node, **(totals | more))


def stall(at: float, cause: str, rank: int = 0, node: str = "n1", **more) -> dict:
    fields = {"cause": cause, "opened": iso(at), "evidence": {}, "advice": [ADVICE]} | more
    return log_line("stall_open", at, rank, node, **fields)


class Run:
    """A run folder, its clock, and the reader of it."""

    def __init__(self, path, now: float = NOW):
        self.path, self.now = path, now
        (path / "logs").mkdir(parents=True)
        self.folder = RunFolder(path, lambda: self.now)

    def log(self, rank: int = 0, pid: int | None = None):
        return self.path / "logs" / f"rank-{rank}.{pid or 10 + rank}.jsonl"

    def add(self, *lines: dict, rank: int = 0, pid: int | None = None):
        with open(self.log(rank, pid), "ab") as file:
            file.write(dumped(*lines))

    def add_rank(self, rank: int, *lines: dict, node: str = "n1", ago: float = 0.0, seconds: float = 100.0, **fields):
        """A rank with a window ``ago`` seconds before now, which has run for ``seconds``; then come some lines."""
        at = self.now - ago
        fields = {"steps": 50} | fields
        self.add(start(at - seconds, rank, node), window(at, seconds, rank, node, **fields), *lines, rank=rank)

    def beat(self, life: str, **fields):
        (self.path / "attempts").mkdir(exist_ok=True)
        (self.path / "attempts" / f"{life}.beat").write_text(json.dumps({"life": life} | fields))

    def view(self, seconds: float = 0.0):
        self.now += seconds
        return self.folder.poll()

    def row(self, rank: int = 0):
        return next(row for row in self.view().rows if row.rank == rank)
