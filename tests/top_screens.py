"""What the tests of ``telemetry top`` share: frames as text, and ranks in the logs of a run folder."""

from __future__ import annotations

from datetime import datetime, timezone

from telemetry.records import CATEGORIES
from telemetry.top.text import Frame

FRAME = Frame("ascii", False, "RUN")
NOW = 1_800_000_000.0


def iso(unix_seconds: float) -> str:
    return (
        datetime.fromtimestamp(unix_seconds, tz=timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def text_of(lines) -> str:
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


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


ADVICE = {
    "action": "use more workers",
    "setting": "num_workers",
    "value": "8",
    "predicted_speedup": 1.9,
    "because": "why",
}
