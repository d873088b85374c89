"""What is written into the log, and when."""

from __future__ import annotations

import os
import platform
import secrets
from typing import TYPE_CHECKING, Any, Final

from telemetry._version import __version__
from telemetry.clock import NS, WallClock
from telemetry.collect import children
from telemetry.publish import fields
from telemetry.publish.jsonl import JsonLog
from telemetry.records import CATEGORIES, COMPUTE, DATA_WAIT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from telemetry.accounts import Accounts
    from telemetry.config import Config
    from telemetry.faults import Faults
    from telemetry.records import Identity
    from telemetry.sampling import Sampler

_FIRST_WINDOW_SECONDS: Final = 1.0
"""The first window of a run; each following one is twice as long, up to the log interval, so that young runs show."""

_SHORTEST_PHASE_SECONDS: Final = 0.001
"""Shorter ones are in the ledger, but no line of the log."""


class Logbook:
    """Turns the books and the samples of one rank into lines.

    Args:
        run_dir: the log goes into its ``logs``.
        status: where the metrics are, and what the agent has cost.
        lost: seconds lost in stalls, by cause.
    """

    def __init__(
        self,
        run_dir: Path,
        identity: Identity,
        config: Config,
        *,
        accounts: Accounts,
        sampler: Sampler,
        faults: Faults,
        wall: WallClock,
        status: Callable[[], tuple[str | None, dict[str, float]]],
        lost: Callable[[], dict[str, float]],
    ) -> None:
        self._identity = identity
        self._claimed_rank = identity.rank
        self._config = config
        self._accounts = accounts
        self._sampler = sampler
        self._faults = faults
        self._wall = wall
        self._status = status
        self._lost = lost
        self.log = JsonLog(
            run_dir / "logs",
            identity,
            timestamp=wall.iso,
            step=lambda: accounts.steps_total,
            head=self.head_fields,
            max_bytes=config.log_max_bytes,
            max_files=config.log_max_files,
        )
        self._seconds = min(_FIRST_WINDOW_SECONDS, config.log_interval_seconds)
        self._life, self._began = secrets.token_hex(8), False
        self._started_ns = accounts.ledger.start_ns
        self._spent_before: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
        self._exposed_before: float | None = 0.0
        self._optimizer_before = 0
        self._children = 0

    def emit(self, event: str, values: dict[str, Any]) -> bool:
        """Write a line; what cannot be written is counted. Returns whether it is in the file."""
        try:
            if self.log.emit(event, values):
                return True
            self._faults.note("jsonl", self.log.file.last_error or "the log cannot be written")
        except Exception as error:
            self._faults.note("jsonl", error)
        return False

    def start(self) -> bool:
        """The first line of the run."""
        self._began = True
        return self.emit("run_start", self.head_fields())

    def adopt(self, identity: Identity, claimed_rank: int) -> None:
        """The rank of this process is another one than was known so far: the log goes on under it, and says so.

        Args:
            identity: with the rank it is shown under.
            claimed_rank: the rank it takes itself to be.
        """
        self._identity, self._claimed_rank = identity, claimed_rank
        with self._faults.contained("jsonl"):
            self.log.adopt(identity)
        if self._began:
            self.emit("run_start", self.head_fields() | {"continued": True})

    def write_what_is_due(self) -> None:
        """Phases and errors as they come; a window, and the samples of it, when its time is over."""
        for span in (*self._accounts.ledger.take_phases(), *self._accounts.take_named_phases()):
            if span.seconds >= _SHORTEST_PHASE_SECONDS:
                self.emit("phase", fields.phase(span, self._wall.iso(span.start_ns)))
        self._children = max(self._children, children.started())
        now = self._accounts.ledger.at_ns
        if now - self._started_ns >= self._seconds * NS:
            self._seconds = min(2 * self._seconds, self._config.log_interval_seconds)
            self.window(now)
            for event, values in self._sampler.take_log_fields().items():
                self.emit(event, values)
        self.write_errors()

    def window(self, now: int) -> None:
        """The window that ends now, and the run so far."""
        self._look_after_file()
        accounts = self._accounts
        ledger, window = accounts.ledger.seconds(), accounts.stats.take_window()
        spent = {category: ledger[category] - self._spent_before[category] for category in CATEGORIES}
        exposed, before = accounts.exposed_seconds, self._exposed_before
        in_window = None if exposed is None or before is None else exposed - before
        loop = spent[DATA_WAIT] + spent[COMPUTE]
        optimizer = accounts.optimizer_steps
        line = {
            "window_seconds": (now - self._started_ns) / NS,
            "steps": window.steps,
            "optimizer_steps": optimizer - self._optimizer_before,
            "ledger_seconds": spent,
            "exposed_wait_seconds": in_window,
            "exposed_wait_ratio": in_window / loop if in_window is not None and loop > 0 else None,
            "exposed_wait_source": None if accounts.blind else accounts.exposed_source,
            "step_seconds": fields.percentiles(window.step.percentiles()),
            "data_wait_seconds": fields.percentiles(window.wait.percentiles()),
            "step_sketch": window.step.as_log_field(),
            "data_wait_sketch": window.wait.as_log_field(),
        }
        self.emit("window", fields.rounded(line) | self._totals())
        accounts.stats.commit(
            window
        )  # after the line: should it begin a new file, that file's head has what was before
        self._started_ns, self._spent_before = now, ledger
        self._exposed_before, self._optimizer_before = exposed, optimizer

    def _look_after_file(self) -> None:
        """A file that others have deleted or renamed is not written any further."""
        found = self.log.file.look_after()
        if found is None:
            return
        text, lost = found
        if lost:
            self._faults.note("jsonl", f"{text}; {lost} lines are lost", count=lost)
        else:
            self._faults.tell("jsonl", text)

    def head_fields(self) -> dict[str, Any]:
        """What a log file begins with; after a rotation also the run so far, whose windows may be gone by then."""
        head: dict[str, Any] = {
            "started": self._wall.iso(self._accounts.ledger.start_ns),
            "world_size": self._identity.world_size,
            "launcher": self._identity.launcher,
            "rank_source": self._identity.rank_source,
            "claimed_rank": self._claimed_rank,
            "life": self._life,
            "telemetry_version": __version__,
            "python_version": platform.python_version(),
            "cpu_count": os.cpu_count(),
            "metrics_url": self._status()[0],
            "settings": self._config.as_log_fields(),
        }
        stats = self._accounts.stats
        for name, sketch in (("step", stats.run_step), ("data_wait", stats.run_wait)):
            if sketch.total:
                head[f"{name}_sketch"] = sketch.as_log_field()
                head[f"{name}_max_seconds"] = fields.rounded(sketch.largest)
        return head

    def end_fields(self) -> dict[str, Any]:
        """The last line of the run."""
        return self._totals() | {
            "errors_total": dict(self._faults.counts),
            "log_lines_dropped": self.log.file.dropped,
        }

    def write_errors(self) -> None:
        """The errors that are not in the log yet."""
        for line in self._faults.take_lines():
            self.emit("error", line)

    def close(self) -> None:
        """Give the file back: there is no line after the last one."""
        self.log.file.forget()

    def _totals(self) -> dict[str, Any]:
        """The run so far: in every window line, so that the newest line alone tells where the time went."""
        accounts = self._accounts
        totals = {
            "steps_total": accounts.steps_total,
            "wall_seconds": accounts.ledger.wall_seconds,
            "ledger_total_seconds": accounts.ledger.seconds(),
            "exposed_wait_total_seconds": accounts.exposed_seconds,
            "exposed_wait_absent": accounts.exposed_absent,
            "first_wait_seconds": accounts.ledger.first_wait_ns / NS,
            "overhead_seconds": self._status()[1],
            "stall_lost_total_seconds": self._lost(),
            "dropped_steps_total": accounts.dropped_steps,
            "child_processes": self._children,
            "unseen_steps_total": accounts.unseen_steps,
        }
        return {key: fields.rounded(value) for key, value in totals.items()}
