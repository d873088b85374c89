"""Follows a run through the metrics endpoints of its nodes. Metrics have no advice: the run folder has it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.endpoint_client import ScrapeError, fetch, samples
from telemetry.records import CATEGORIES
from telemetry.report.attempts import FINISHED, RUNNING
from telemetry.report.process_log import ProcessLog
from telemetry.top.job_view import JobView, job_view, waiting
from telemetry.top.rank_row import RankFacts
from telemetry.top.recent_totals import RecentTotals
from telemetry.util.clock import iso_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_THREADS: Final = 8
_MAX_RANKS: Final = 1 << 14
"""Of all endpoints. An endpoint that tells of more is not what it claims to be."""

_GONE_SECONDS: Final = 600.0
"""A rank that no endpoint has shown for this time is left out."""

_FIGURES: Final = {
    "training_gpu_utilization_ratio": "utilization_ratio",
    "training_gpu_sm_active_ratio": "sm_active_ratio",
    "training_gpu_memory_used_bytes": "memory_used_bytes",
    "training_gpu_memory_total_bytes": "memory_total_bytes",
    "training_gpu_power_watts": "power_watts",
    "training_gpu_temperature_celsius": "temperature_celsius",
    "training_process_resident_memory_bytes": "process_resident_memory_bytes",
}
_COUNTS: Final = {
    "training_steps_total": "steps_total",
    "training_samples_total": "samples_total",
    "training_tokens_total": "tokens_total",
}
_NAMES: Final = frozenset(
    {
        *_FIGURES,
        "training_run_info",
        "training_gpu_info",
        "training_run_ended",
        *_COUNTS,
        "training_time_seconds_total",
        "training_exposed_wait_seconds_total",
        "training_stall_active",
        "training_straggler_rank",
        "training_stall_lost_seconds_total",
        "training_hang_active",
        "training_hang_suspect_rank",
    }
)

_WHERE_TO_LOOK: Final = {"action": "metrics have no advice: run telemetry report or top on the run folder"}


@dataclass(slots=True)
class _Scraped:
    """What one exposition says of one rank."""

    rank: int
    run: str = ""
    info: dict[str, str] = field(default_factory=dict)
    ledger: dict[str, float] = field(default_factory=dict)
    totals: dict[str, Any] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    stall: str | None = None
    straggler: int | None = None
    hang: str | None = None
    suspect: int | None = None
    ended: bool = False


@dataclass(slots=True)
class _Known:
    """One rank over time. ``changed``: when its ledger was seen to grow, by this machine's monotonic clock."""

    recent: RecentTotals
    log: ProcessLog
    facts: RankFacts | None = None
    ledger: dict[str, float] = field(default_factory=dict)
    changed: float = 0.0
    now_in: str = ""
    opened: float | None = None


class Endpoints:
    """Some endpoints, each read by a thread.

    Args:
        urls: such as ``http://node:9464/metrics``.
        read: gives the exposition at a URL.
    """

    pause_seconds = 1.0

    def __init__(self, urls: Sequence[str], read: Callable[[str], str] = fetch) -> None:
        self._urls = list(dict.fromkeys(urls))
        self._read = read
        self._answers: dict[str, tuple[str, float]] = {}
        self._errors: dict[str, str] = {}
        self._known: dict[tuple[str, int], _Known] = {}
        self._taken: dict[str, float] = {}
        self._lock = threading.Lock()
        self._started = False

    def poll(self) -> JobView:
        """The view of what the endpoints have said last."""
        if not self._started:
            self._started = True
            shares = [self._urls[first::_MAX_THREADS] for first in range(min(_MAX_THREADS, len(self._urls)))]
            for share in shares:
                threading.Thread(target=self._follow, args=(share,), name="telemetry-top-url", daemon=True).start()
        return self.view()

    def read_all(self) -> None:
        """Read each endpoint once, here."""
        for url in self._urls:
            self._scrape(url)

    def view(self) -> JobView:
        """The view now."""
        now, here = time.time(), time.monotonic()
        with self._lock:
            answers, errors = dict(self._answers), dict(self._errors)
        for url, (text, at) in answers.items():
            if self._taken.get(url) != at:
                self._taken[url] = at
                for scraped in _by_rank(text):
                    self._take(scraped, now, at)
        notes = [errors[url] for url in self._urls if url in errors]
        for key in [key for key, known in self._known.items() if here - known.changed > _GONE_SECONDS]:
            del self._known[key]
        facts = [known.facts for known in self._known.values() if known.facts is not None]
        for known in self._known.values():
            if known.facts is not None and known.facts.how == RUNNING:
                known.facts.silent_seconds = here - known.changed
                known.facts.seen = now - known.facts.silent_seconds
        if not facts:
            return waiting("Waiting for the endpoints: none has shown a rank yet.", now, notes)
        run = facts[-1].log.run
        return job_view([each for each in facts if each.log.run == run], now, notes)

    def _follow(self, urls: Sequence[str]) -> None:
        while True:
            began = time.monotonic()
            for url in urls:
                self._scrape(url)
            time.sleep(max(2.0, 2 * (time.monotonic() - began)))

    def _scrape(self, url: str) -> None:
        try:
            text = self._read(url)
        except ScrapeError as error:
            with self._lock:
                self._errors[url] = str(error)
        except Exception as error:
            with self._lock:
                self._errors[url] = f"{url} cannot be read: {type(error).__name__}"
        else:
            with self._lock:
                self._errors.pop(url, None)
                self._answers[url] = text, time.monotonic()

    def _take(self, scraped: _Scraped, now: float, at: float) -> None:
        key = scraped.run, scraped.rank
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_RANKS:
                return
            log = ProcessLog(scraped.rank, 0, run=scraped.run)
            known = self._known[key] = _Known(RecentTotals(from_start=False), log, changed=at)
        world = scraped.info.get("world_size", "")
        known.log.head = {
            "node": scraped.info.get("node", ""),
            "local_rank": scraped.info.get("local_rank", ""),
            "world_size": int(world) if world.isdecimal() and len(world) < 8 else None,
        }
        totals = scraped.totals | {
            "ledger_total_seconds": scraped.ledger,
            "wall_seconds": sum(scraped.ledger.values()),
            "stall_lost_total_seconds": scraped.lost,
        }
        if scraped.ledger and scraped.ledger != known.ledger:
            added = {name: s - known.ledger.get(name, 0.0) for name, s in scraped.ledger.items()}
            known.now_in = max(added, key=lambda name: added[name]) if known.ledger else ""
            known.ledger, known.changed = scraped.ledger, at
            known.recent.add(totals)
        self._note_stall(known, scraped, now)
        known.log.hangs[:] = [_hang_line(scraped, now)] if scraped.hang is not None else []
        known.facts = RankFacts(
            log=known.log,
            how=FINISHED if scraped.ended else RUNNING,
            seen=now,
            totals=totals,
            recent=known.recent.over(),
            live=known.recent.over(),
            now_in=known.now_in,
            figures=scraped.figures,
        )

    def _note_stall(self, known: _Known, scraped: _Scraped, now: float) -> None:
        """The stall that is open, as a log would tell it, with the moment at which it was first seen here."""
        log = known.log
        if scraped.stall is None:
            log.stalls.clear()
            known.opened = None
            return
        if known.opened is None or log.stalls[-1]["cause"] != scraped.stall:
            known.opened = now
        evidence: dict[str, Any] = {} if scraped.straggler is None else {"straggler_rank": scraped.straggler}
        opened = iso_time(known.opened)
        log.stalls[:] = [
            {"event": "stall_open", "cause": scraped.stall, "opened": opened, "evidence": evidence,
             "advice": [_WHERE_TO_LOOK]}
        ]  # fmt: skip


def _hang_line(scraped: _Scraped, now: float) -> dict[str, Any]:
    """A hang as a log would tell it. Metrics know its kind, and the first of the ranks that the others wait for."""
    waits = "" if scraped.suspect is None else f"; the others wait for rank {scraped.suspect}"
    return {
        "event": "hang",
        "time": iso_time(now),
        "verdict": f"the job goes no further ({scraped.hang}){waits}; its logs say why",
        "kind": scraped.hang,
        "suspects": [] if scraped.suspect is None else [{"rank": scraped.suspect, "doing": "others wait"}],
        "waiting": [{"ranks": [(scraped.rank, scraped.rank)]}],
    }


def _by_rank(text: str) -> list[_Scraped]:
    found: dict[tuple[str, str], _Scraped] = {}
    for name, labels, value in samples(text, _NAMES):
        rank, run = labels.get("rank", ""), labels.get("run", "")
        if not rank.isdecimal() or len(rank) > 7 or not abs(value) < 1e18:
            continue
        scraped = found.setdefault((run, rank), _Scraped(int(rank), run))
        if name == "training_time_seconds_total":
            if labels.get("category") in CATEGORIES:
                scraped.ledger[labels["category"]] = value
        elif name == "training_stall_lost_seconds_total":
            scraped.lost[labels.get("cause", "")] = value
        elif name in {"training_stall_active", "training_hang_active"}:
            if value and name == "training_stall_active":
                scraped.stall = labels.get("cause", "unknown")
            elif value:
                scraped.hang = labels.get("kind", "unknown")
        else:
            _take_single(scraped, name, labels, value)
    return list(found.values())


def _take_single(scraped: _Scraped, name: str, labels: dict[str, str], value: float) -> None:
    """A metric that a rank has once."""
    if name in _FIGURES:
        scraped.figures[_FIGURES[name]] = value
    elif name == "training_run_info":
        scraped.info = labels
    elif name == "training_gpu_info":
        scraped.figures["name"] = labels.get("name", "")
    elif name == "training_run_ended":
        scraped.ended = bool(value)
    elif name in _COUNTS:
        scraped.totals[_COUNTS[name]] = int(value)
    elif name == "training_exposed_wait_seconds_total":
        scraped.totals["exposed_wait_total_seconds"] = value
    elif name == "training_straggler_rank":
        scraped.straggler = int(value)
    elif name == "training_hang_suspect_rank":
        scraped.suspect = int(value)
