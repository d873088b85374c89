"""What the DataLoader workers did, as tracks of a trace. The profiler records the training process only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from telemetry.core.worker_records import WorkerCounters

CATEGORY: Final = "dataloader_worker"
"""Category of our events. The profiler has no such category, so no reader takes them for the training process's."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One fetch of a worker while a trace was recorded. ``number`` counts its fetches; stamps are Unix nanoseconds."""

    worker: int
    pid: int
    tid: int
    number: int
    started_ns: int
    ended_ns: int


def fetches(counters: Iterable[WorkerCounters], first_ns: int, last_ns: int, offset_ns: int) -> tuple[Fetch, ...]:
    """The fetches that were in progress during a recording. Each worker remembers its newest ones only.

    Args:
        counters: the counters of the workers.
        first_ns: start of the recording, monotonic.
        last_ns: its end, monotonic.
        offset_ns: Unix time minus monotonic time.
    """
    found = []
    for worker in counters:
        kept = len(worker.recent_finished_ns)
        for number in range(max(0, worker.ended - kept), worker.ended):
            began, ended = worker.recent_started_ns[number % kept], worker.recent_finished_ns[number % kept]
            if first_ns <= ended and began <= min(last_ns, ended):
                found.append(Fetch(worker.worker, worker.pid, worker.tid, number, began + offset_ns, ended + offset_ns))
    return tuple(found)


def as_events(found: Iterable[Fetch], zero_ns: int) -> bytes:
    """The fetches as events of a Chrome trace, to be inserted before its own: JSON objects, a comma after each.

    Args:
        found: the fetches.
        zero_ns: Unix time in nanoseconds from which the trace's microseconds count.
    """
    return b"".join(json.dumps(event).encode() + b",\n" for event in _events(found, zero_ns))


def _events(found: Iterable[Fetch], zero_ns: int) -> Iterator[dict[str, Any]]:
    named = set()
    for fetch in found:
        where = {"pid": fetch.pid, "tid": fetch.tid}
        if fetch.pid not in named:
            named.add(fetch.pid)
            name = {"name": f"DataLoader worker {fetch.worker}"}
            yield {"ph": "M", "name": "process_name", "ts": 0, **where, "args": name}
        begin = (fetch.started_ns - zero_ns) / 1e3
        yield {
            "ph": "X",
            "cat": CATEGORY,
            "name": "fetch",
            **where,
            "ts": begin,
            "dur": (fetch.ended_ns - fetch.started_ns) / 1e3,
            "args": {"worker": fetch.worker, "number": fetch.number},
        }
