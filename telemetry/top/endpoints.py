"""Follows a run through the metrics endpoints of its nodes. Advice is only in the run folder, not in metrics."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.request
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from telemetry.log_lines import GpuLine, HangLine, RunStartLine, StallOpenLine, Suspect, TotalsLine, WaitingRanges
from telemetry.records import CATEGORIES, Advice
from telemetry.report.attempts import FINISHED, RUNNING
from telemetry.report.process_log import ProcessLog
from telemetry.top.view import JobView, RankRow, RecentTotals, job_view, most_time, waiting
from telemetry.util.clock import iso_time

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence


_TIMEOUT_SECONDS: Final = 2.0
"""Timeout for each part of a response."""

_WHOLE_SECONDS: Final = 10.0
_MAX_BYTES: Final = 64 << 20
_CHUNK: Final = 1 << 18

_MAX_THREADS: Final = 8
_GONE_SECONDS: Final = 600.0
"""A rank that no endpoint has shown for this time is left out."""

_RESIDENT_MEMORY: Final = "training_process_resident_memory_bytes"
_EXPOSED_WAIT: Final = "training_exposed_wait_seconds_total"
_FIGURES: Final = {
    "training_gpu_utilization_ratio": "utilization_ratio",
    "training_gpu_sm_active_ratio": "sm_active_ratio",
    "training_gpu_memory_used_bytes": "memory_used_bytes",
    "training_gpu_memory_total_bytes": "memory_total_bytes",
    "training_gpu_power_watts": "power_watts",
    "training_gpu_temperature_celsius": "temperature_celsius",
}
_STEPS: Final = "training_steps_total"
_SAMPLES: Final = "training_samples_total"
_TOKENS: Final = "training_tokens_total"
_BY_LABEL: Final = {
    "training_time_seconds_total": "category",
    "training_compute_seconds_total": "part",
    "training_stall_lost_seconds_total": "cause",
    "training_stall_active": "cause",
    "training_hang_active": "kind",
}
"""Metrics that a rank has several times, and the label in which they differ."""

_NAMES: Final = frozenset(
    {
        *_FIGURES, *_BY_LABEL, _STEPS, _SAMPLES, _TOKENS, _RESIDENT_MEMORY, _EXPOSED_WAIT, "training_run_info",
        "training_gpu_info",
        "training_run_ended", "training_straggler_rank", "training_hang_suspect_rank",
    }
)  # fmt: skip

_ADVICE: Final = Advice("metrics have no advice: run telemetry report or top on the run folder")


class ScrapeError(Exception):
    """The endpoint gave no metrics; the text has the reason."""


_without_proxy: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(url: str) -> str:
    """The exposition at a URL. A proxy that the environment names is not used.

    Raises:
        ScrapeError: there is no response within 10 s, it is not status 200, or it is larger than 64 MiB.
    """
    deadline, body = time.monotonic() + _WHOLE_SECONDS, bytearray()
    try:
        where = urlsplit(url)
        if where.scheme not in {"http", "https"} or not where.hostname:
            raise ScrapeError(f"{url} is no URL of metrics: it begins with http:// and names a host and a port")
        if not where.path:
            where = where._replace(path="/metrics")
        with _without_proxy.open(where.geturl(), timeout=_TIMEOUT_SECONDS) as answer:
            while chunk := answer.read1(_CHUNK):
                body += chunk
                if len(body) > _MAX_BYTES or time.monotonic() > deadline:
                    limits = f"{_MAX_BYTES >> 20} MiB, or takes longer than {_WHOLE_SECONDS:.0f} s"
                    raise ScrapeError(f"{url} does not answer: the response is larger than {limits}")
    except HTTPError as error:
        raise ScrapeError(
            f"{url} answers {error.code}: {error.read(200).decode('utf-8', 'replace').strip()}"
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ScrapeError(f"{url} does not answer: {getattr(error, 'reason', error)}") from error
    return body.decode("utf-8", "replace")


def metric_values(text: str, names: Collection[str] | None = None) -> Iterator[tuple[str, dict[str, str], float]]:
    """The name, labels and value of each sample of an exposition; with ``names`` only of these metrics.

    Raises:
        ValueError: the text is no exposition.
    """
    if names is not None:
        wanted = (line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in names)
        text = "\n".join(wanted)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


@dataclass(slots=True)
class _Scraped:
    """The values of one rank in one exposition.

    Attributes:
        values: values by metric. ``by_label``: values by label for each metric of `_BY_LABEL`.
        info: labels of ``training_run_info``. ``gpu``: name of the GPU.
    """

    rank: int
    run: str
    values: dict[str, float] = field(default_factory=dict)
    by_label: dict[str, dict[str, float]] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)
    gpu: str = ""

    def active(self, name: str) -> str | None:
        return next((label for label, value in self.by_label.get(name, {}).items() if value), None)

    def whole(self, name: str) -> int | None:
        return int(self.values[name]) if name in self.values else None


def _by_rank(text: str) -> list[_Scraped]:
    """The values of each rank.

    Raises:
        ValueError: the text is no exposition.
    """
    found: dict[tuple[str, str], _Scraped] = {}
    for name, labels, value in metric_values(text, _NAMES):
        rank, run = labels.get("rank", ""), labels.get("run", "")
        if not rank.isdecimal() or len(rank) > 7 or not abs(value) < 1e18:
            continue
        scraped = found.setdefault((run, rank), _Scraped(int(rank), run))
        if name in _BY_LABEL:
            scraped.by_label.setdefault(name, {})[labels.get(_BY_LABEL[name], "unknown")] = value
        elif name == "training_run_info":
            scraped.info = labels
        elif name == "training_gpu_info":
            scraped.gpu = scraped.gpu or labels.get("name", "")
        else:
            scraped.values.setdefault(name, value)  # of several GPUs the first
    return list(found.values())


@dataclass(slots=True)
class _Known:
    """One rank over time. ``changed``: when its ledger last grew, by this machine's monotonic clock."""

    recent: RecentTotals
    row: RankRow
    ledger: dict[str, float] = field(default_factory=dict)
    changed: float = 0.0
    opened: float | None = None

    def row_at(self, now: float, here: float) -> RankRow:
        """Its row at a time, by Unix time and by this machine's monotonic clock."""
        silent = here - self.changed
        return self.row if self.row.how != RUNNING else replace(self.row, seen=now - silent, silent_seconds=silent)


class Endpoints:
    """Follows the endpoints at URLs such as ``http://node:9464/metrics``. ``read`` returns the exposition at a URL."""

    pause_seconds = 2.0

    def __init__(self, urls: Sequence[str], read: Callable[[str], str] = fetch) -> None:
        self._urls = list(dict.fromkeys(urls))
        self._read = read
        self._answers: dict[str, tuple[str, float]] = {}
        self._errors: dict[str, str] = {}
        self._known: dict[tuple[str, int], _Known] = {}

    def poll(self) -> JobView:
        """Read all endpoints, some at a time, and make the view of their values."""
        shares = [self._urls[first::_MAX_THREADS] for first in range(min(_MAX_THREADS, len(self._urls)))]
        threads = [threading.Thread(target=self._scrape, args=(share,), daemon=True) for share in shares]
        self._answers, self._errors = {}, {}
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._view(time.time(), time.monotonic())

    def _scrape(self, urls: Sequence[str]) -> None:
        for url in urls:
            try:
                self._answers[url] = self._read(url), time.monotonic()
            except Exception as error:
                text = str(error) if isinstance(error, ScrapeError) else f"{url} cannot be read: {type(error).__name__}"
                self._errors[url] = text

    def _view(self, now: float, here: float) -> JobView:
        for url in self._urls:
            text, at = self._answers.get(url, ("", here))
            try:
                for scraped in _by_rank(text):
                    self._take(scraped, now, at)
            except ValueError as error:
                self._errors[url] = f"{url} does not show metrics: {error}"
        notes = [self._errors[url] for url in self._urls if url in self._errors]
        self._known = {key: known for key, known in self._known.items() if here - known.changed <= _GONE_SECONDS}
        rows = [known.row_at(now, here) for known in self._known.values()]
        if not rows:
            return waiting("Waiting for the endpoints: none has shown a rank yet.", now, notes)
        run = rows[-1].log.run
        return job_view([row for row in rows if row.log.run == run], now, notes)

    def _take(self, scraped: _Scraped, now: float, at: float) -> None:
        key = scraped.run, scraped.rank
        known = self._known.get(key)
        if known is None:
            row = RankRow(ProcessLog(scraped.rank, 0, run=scraped.run))
            known = self._known[key] = _Known(RecentTotals(from_start=False), row, changed=at)
        log, now_in = known.row.log, known.row.now_in
        world = scraped.info.get("world_size", "")
        log.head = RunStartLine(
            node=scraped.info.get("node", ""), world_size=int(world) if world.isdecimal() and len(world) < 8 else None
        )
        ledger = {c: s for c, s in scraped.by_label.get("training_time_seconds_total", {}).items() if c in CATEGORIES}
        values = scraped.values
        totals = TotalsLine(
            ledger_total_seconds=ledger,
            wall_seconds=sum(ledger.values()),
            compute_total_seconds=dict(scraped.by_label.get("training_compute_seconds_total", {})),
            stall_lost_total_seconds=scraped.by_label.get("training_stall_lost_seconds_total", {}),
            steps_total=scraped.whole(_STEPS),
            samples_total=scraped.whole(_SAMPLES),
            tokens_total=scraped.whole(_TOKENS),
            exposed_wait_total_seconds=values.get(_EXPOSED_WAIT),
        )
        if ledger and ledger != known.ledger:
            before = known.ledger
            now_in = most_time({name: s - before.get(name, 0.0) for name, s in ledger.items()}) if before else ""
            known.ledger, known.changed = ledger, at
            known.recent.add(totals)
        self._note_stall(known, scraped, now)
        hang = scraped.active("training_hang_active")
        log.hangs[:] = [] if hang is None else [_hang_line(scraped, hang, now)]
        known.row = RankRow(
            log=log,
            how=FINISHED if scraped.values.get("training_run_ended") else RUNNING,
            seen=now,
            totals=totals,
            recent=known.recent.over(),
            live=known.recent.over(),
            now_in=now_in,
            gpu=GpuLine(
                name=scraped.gpu or None,
                **{ours: values[name] for name, ours in _FIGURES.items() if name in values},  # type: ignore[arg-type]
            ),
            resident_memory_bytes=values.get(_RESIDENT_MEMORY),
        )

    def _note_stall(self, known: _Known, scraped: _Scraped, now: float) -> None:
        """Add the open stall to the log, with the time at which it was first seen here."""
        log, cause = known.row.log, scraped.active("training_stall_active")
        if cause is None:
            log.stalls.clear()
            known.opened = None
            return
        if known.opened is None or log.stalls[-1].cause != cause:
            known.opened = now
        straggler = scraped.whole("training_straggler_rank")
        evidence = {} if straggler is None else {"straggler_rank": straggler}
        opened = iso_time(known.opened)
        log.stalls[:] = [StallOpenLine(cause=cause, opened=opened, evidence=evidence, advice=[_ADVICE])]


def _hang_line(scraped: _Scraped, kind: str, now: float) -> HangLine:
    """A hang as a line of a log. Metrics contain its kind, and the first of the ranks that the others wait for."""
    suspect = scraped.whole("training_hang_suspect_rank")
    waits = "" if suspect is None else f"; the others wait for rank {suspect}"
    return HangLine(
        time=iso_time(now),
        verdict=f"the job goes no further ({kind}){waits}; its logs say why",
        kind=kind,
        suspects=[] if suspect is None else [Suspect(rank=suspect, doing="others wait")],
        waiting=[WaitingRanges(ranks=[(scraped.rank, scraped.rank)])],
    )
