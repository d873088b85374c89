"""Follows whether this rank stalls, and why: turns ticks into stalls with a cause and advice."""

from __future__ import annotations

import importlib
import os
import re
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from telemetry.agent.hangs import HangMonitor
from telemetry.agent.stall_report import slow_rank, stall_fields
from telemetry.diagnosis import lines as work
from telemetry.diagnosis.hangs import EXPECTED, OVERDUE, longest_phase, paused
from telemetry.diagnosis.lines import line_advice, line_verdict, verdict_part
from telemetry.diagnosis.stalls import StallDetector
from telemetry.diagnosis.stragglers import held_up_by, mostly_in_sync, short_of_cores
from telemetry.diagnosis.verdict import batches_unseen, costliest, lost_seconds, weight
from telemetry.node.metrics import StallView
from telemetry.records import CHECKPOINT, DATA_WAIT, DEBUGGED, EVALUATION, Tick
from telemetry.sources.lines import LineSampler
from telemetry.util.clock import NS, now_ns, sleep
from telemetry.util.errors import kind_of
from telemetry.util.files import remove_file, replace_file
from telemetry.util.sampling import StackProfile
from telemetry.util.threads import OwnThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from telemetry.agent.accounting import Accounting
    from telemetry.agent.hangs import Hang
    from telemetry.agent.stall_report import StallCounts
    from telemetry.config import Config
    from telemetry.diagnosis.lines import LineShare
    from telemetry.diagnosis.stalls import Stall
    from telemetry.hooks.loaders import LoaderHandle
    from telemetry.hooks.tracker import StepTracker
    from telemetry.records import Advice, RankPace, Totals
    from telemetry.sources.stacks import StuckPlace
    from telemetry.util.errors import ErrorLog


# -- stall callback --------------------------------------------------------------------------------------------------
#
# The user's callback for stalls: called on a thread of its own, one call at a time.

_SOURCE: Final = "on_stall"


class StallCallback:
    """Calls the user's function for each stall. The caller never waits for it.

    A thread exists only while a call is in progress. If a stall opens meanwhile, the function is not called for it.
    That is counted as an error, and the log names the stall. An exception in the function is counted, too.

    Args:
        callback: the function, or its dotted name, which is resolved at the first stall; None if it is not set.
        errors: counts failed calls and skipped stalls. Used only on the caller's thread.
    """

    def __init__(self, callback: Callable[[dict[str, Any]], Any] | str | None, errors: ErrorLog) -> None:
        self._callback = callback
        self._errors = errors
        self._thread: OwnThread | None = None
        self._failed: deque[str] = deque()

    def tell(self, stall: dict[str, Any]) -> None:
        """Start a call of the function with the fields of a stall. Returns at once."""
        if self._callback is None:
            return
        self.note_failures()
        if self._thread is not None and self._thread.is_alive():
            cause = stall.get("cause")
            self._errors.note(_SOURCE, f"not told of a stall ({cause}): the call for an earlier one has not returned")
            return
        thread = OwnThread(self._call, self._callback, stall, name="telemetry-on-stall", others_code=True)
        with self._errors.contained(_SOURCE):  # no thread can be started
            thread.start()
            self._thread = thread

    def note_failures(self) -> None:
        """Count the calls that have failed since the last time."""
        while self._failed:
            self._errors.note(_SOURCE, self._failed.popleft())

    def wait(self, seconds: float) -> None:
        """Wait for the call in progress, at most this many seconds."""
        thread = self._thread
        if thread is None:
            return
        thread.join(seconds)
        self.note_failures()
        if thread.is_alive():
            self._errors.tell(_SOURCE, "the run has ended, and the call for a stall has not returned")

    def _call(self, callback: Callable[[dict[str, Any]], Any] | str, stall: dict[str, Any]) -> None:
        try:
            _resolve(callback)(stall)
        except BaseException as error:  # includes sys.exit(): Python would print other exceptions to stderr
            self._failed.append(kind_of(error))


def _resolve(callback: Callable[[dict[str, Any]], Any] | str) -> Callable[[dict[str, Any]], Any]:
    """Resolve a callback given by its dotted name. By the first stall, its module has long been imported."""
    if not isinstance(callback, str):
        return callback
    module, _, name = callback.rpartition(".")
    found: Callable[[dict[str, Any]], Any] = getattr(importlib.import_module(module), name)
    return found


# -- profiles of stalls: folded stacks in the run folder, one file per stall and rank ----------------------------------

MAX_BYTES: Final = 1 << 18
"""Maximum size of a file."""

MAX_FILES: Final = 20
"""Maximum number of files of a rank, over all attempts of the run. The oldest are removed."""


class ProfileFolder:
    """Writes the profiles of one process.

    Args:
        path: the folder; made with the first profile.
        pid: pid of the process.
    """

    def __init__(self, path: Path, pid: int) -> None:
        self._path = path
        self._pid = pid

    def write(self, rank: int, number: int, cause: str, content: bytes) -> None:
        """Write the profile of a stall over the one before. ``number``: of the stall in this process.

        Raises:
            OSError: it cannot be written.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        replace_file(self._path / f"rank-{rank}.{self._pid}.stall-{number}.{cause}.folded", content[:MAX_BYTES], 0o644)
        self._remove_oldest(rank)

    def _remove_oldest(self, rank: int) -> None:
        name = re.compile(rf"rank-{rank}\.\d+\.stall-\d+\.\w+\.folded")
        own = [entry for entry in os.scandir(self._path) if name.fullmatch(entry.name)]
        if len(own) > MAX_FILES:
            for entry in sorted(own, key=lambda entry: entry.stat().st_mtime_ns)[:-MAX_FILES]:
                remove_file(entry.path)


# -- line monitor ----------------------------------------------------------------------------------------------------
#
# Follows which lines of the user's code a stall spends its time in. Works only while a stall is open.

_AHEAD_NS: Final = 5 * NS
"""Workers are asked for this long at a time. If the agent ends, they stop sampling then."""

_FIRST_SECONDS: Final = 60
_EVERY_SECONDS: Final = 60
_PART_SECONDS: Final = 10
"""Samples are taken in the first minute of a stall, and then in ten seconds of each minute."""

_MAX_FIRST_SECONDS: Final = 600
"""The first minute is extended up to ten, until there are enough samples to name a line. Checkpoints may be rare, and
where C calls hold the GIL all the time, the agent thread gets few turns."""

_FIRST_LINES_SECONDS: Final = 10.0
_MAX_BETWEEN_SECONDS: Final = 600.0
"""The lines are logged 10 s after a stall has opened, or once there are enough samples. After that they are logged at
intervals that double up to ten minutes."""


@dataclass(frozen=True, slots=True)
class LineFindings:
    """The lines of a stall.

    Attributes:
        lines: the lines, largest share first. ``work``: of what these are shares.
        samples: number of samples.
        verdict: a sentence on the first line.
        advice: what a change of the first line would bring.
    """

    lines: tuple[LineShare, ...]
    work: str
    samples: int
    verdict: str
    advice: tuple[Advice, ...]

    def evidence(self) -> dict[str, Any]:
        """The lines as fields of the evidence in the log."""
        return {
            "lines": [line.as_field() for line in self.lines],
            "lines_of": self.work,
            "line_samples": self.samples,
            "line_verdict": self.verdict,
        }


class LineMonitor:
    """Follows one rank. Runs on the agent thread.

    Args:
        tracker: state of the training thread, and its loaders.
        folder: gets the folded stacks.
        pid: pid of this process.
        errors: counts profiles that cannot be written.
        emit: writes a line of the log.
        rank: returns the rank.

    Attributes:
        sampler: samples the threads of this process.
    """

    def __init__(
        self,
        tracker: StepTracker,
        folder: Path,
        pid: int,
        *,
        errors: ErrorLog,
        emit: Callable[[str, dict[str, Any]], Any],
        rank: Callable[[], int],
    ) -> None:
        self.sampler = LineSampler(lambda: tracker.thread, lambda: _doing(tracker))
        self._tracker = tracker
        self._files = ProfileFolder(folder, pid)
        self._errors = errors
        self._emit = emit
        self._rank = rank
        self._session = 0
        self._slow = False
        self._number = 0
        self._lines_due = _FIRST_LINES_SECONDS
        self._named: tuple[str, ...] = ()  # the kinds of work whose samples are enough to name a line
        self._asked: dict[int, LoaderHandle] = {}
        self._ended_workers = StackProfile()

    def tick(self, stall: Stall | None, *, holds_others_up: bool = False) -> bool:
        """Follow the open stall; None without one. Returns whether its lines should be logged now.

        Args:
            stall: the open stall.
            holds_others_up: whether other ranks wait for this one, which has no stall itself. Then its steps are
                sampled, and their lines are logged for the report, which shows them with the stalls of those ranks.
        """
        slow = holds_others_up and stall is None
        kinds = work.SLOW_RANK if slow else ()
        if stall is not None and not stall.is_hang:
            kinds = work.WORK.get(stall.cause, ())
        elif not slow:
            self._forget()
        self._keep_ended()
        if not kinds:
            self._pause()
            return False
        if not self._session or slow != self._slow:
            self._begin(slow=slow)
        passed = (now_ns() - self._session) / NS
        if self._samples_at(passed, stall, kinds):
            self._sample(kinds, stall.evidence.source if stall is not None else None)
        else:
            self._pause()
        if passed < self._lines_due or not self._names_a_line(stall, kinds):
            return False
        self._lines_due = passed + min(passed, _MAX_BETWEEN_SECONDS)
        if slow:
            self._log_slow_steps()
        return not slow

    def close(self) -> None:
        """End the sampling, also that of the workers, at the end of the run."""
        self._pause()
        self._forget()

    def findings(self, stall: Stall) -> LineFindings | None:
        """The lines of a stall so far, also written as folded stacks. None if there are too few samples."""
        if not self._session or stall.is_hang or self._slow:
            return None
        profile, kind = self._profile_of(stall)
        if profile is None:
            return None
        self._write(profile, kind, stall.cause)
        lines = work.line_shares(profile, kind)
        if not lines:
            return None
        return LineFindings(
            lines,
            kind,
            profile.samples,
            line_verdict(stall.evidence, kind, lines[0], cause=stall.cause),
            line_advice(stall.evidence, kind, lines[0], cause=stall.cause),
        )

    def _samples_at(self, passed: float, stall: Stall | None, kinds: tuple[str, ...]) -> bool:
        """Whether samples are taken so many seconds after the stall has opened."""
        if passed < _FIRST_SECONDS or passed % _EVERY_SECONDS < _PART_SECONDS:
            return True
        return passed < _MAX_FIRST_SECONDS and not self._names_a_line(stall, kinds)

    def _names_a_line(self, stall: Stall | None, kinds: tuple[str, ...]) -> bool:
        """Whether there are enough samples to name a line."""
        if self._named != kinds:
            profile, kind = self._slow_steps() if stall is None else self._profile_of(stall)
            if profile is not None and work.line_shares(profile, kind):
                self._named = kinds
        return self._named == kinds

    def _slow_steps(self) -> tuple[StackProfile | None, str]:
        return self.sampler.profiles.get(work.STEP), work.STEP

    def _log_slow_steps(self) -> None:
        profile, _ = self._slow_steps()
        lines = work.line_shares(profile, work.STEP) if profile is not None else ()
        if profile is None or not lines:
            return
        self._write(profile, work.STEP, "straggler")
        text = f"{verdict_part(lines[0], work.STEP)} of rank {self._rank()} is {lines[0].named}"
        found = LineFindings(lines, work.STEP, profile.samples, text, ())
        self._emit("straggler_lines", {"evidence": found.evidence()})

    def _write(self, profile: StackProfile, kind: str, cause: str) -> None:
        with self._errors.contained("profiles"):
            content = profile.folded(f"rank {self._rank()} {kind}", MAX_BYTES)
            self._files.write(self._rank(), self._number, cause, content)

    def _begin(self, *, slow: bool) -> None:
        self._forget()
        self._slow = slow
        self._session = now_ns()
        self._number += 1
        self._named = ()
        self._lines_due = _FIRST_LINES_SECONDS

    def _forget(self) -> None:
        """Forget a stall that has closed, and end the sampling of its workers."""
        if self._session:
            for handle in self._asked.values():
                if handle.block is not None:
                    handle.block.ask_samples(self._session, 1)
            self._session = 0
            self._asked = {}
            self._ended_workers = StackProfile()
            self.sampler.begin()

    def _sample(self, wanted: tuple[str, ...], source: str | None) -> None:
        kinds = frozenset(wanted)
        sources = self._tracker.sources
        live = sources.live()
        if wanted[0] == work.FETCH:
            sources.sampling = self._session, now_ns() + _AHEAD_NS
            self._ask(live)
        threads = any(handle.threads for handle in live) or source == "read_ahead"
        self.sampler.want(kinds if threads else kinds - {work.FETCH})

    def _pause(self) -> None:
        self._tracker.sources.sampling = (0, 0)
        self._tracker.sources.asked.clear()
        self.sampler.want(frozenset())

    def _ask(self, live: list[LoaderHandle]) -> None:
        """Ask the workers of all training loaders."""
        sources = self._tracker.sources
        while sources.asked:
            handle = sources.asked.popleft()
            self._asked[id(handle)] = handle
        trained = any(handle.training for handle in live)
        for handle in live:
            if handle.block is not None and (handle.training or not trained):
                handle.block.ask_samples(*sources.sampling)
                self._asked[id(handle)] = handle

    def _keep_ended(self) -> None:
        """Keep what workers have written whose loader has ended, but not the loader."""
        alive = set(map(id, self._tracker.sources.live()))
        for key in [key for key in self._asked if key not in alive]:
            self._ended_workers.merge(self._sampled_by(self._asked.pop(key)))

    def _sampled_by(self, handle: LoaderHandle) -> StackProfile:
        """What the workers of an iterator have written in this session."""
        profile = StackProfile()
        if handle.block is None or not handle.training:
            return profile
        for found in handle.block.sampled():
            if found.session == self._session:
                try:
                    profile.merge(StackProfile.unpacked(found.content))
                except ValueError:
                    continue  # it was read while the worker wrote it
                sleep(0)  # the training thread gets its turn
        return profile

    def _profile_of(self, stall: Stall) -> tuple[StackProfile | None, str]:
        """The samples that count for a stall, else None; and of what they are."""
        kinds, profiles = work.WORK.get(stall.cause, ()), self.sampler.profiles
        if kinds[:1] == (work.WAIT,) and stall.evidence.source != "read_ahead":
            kind = work.SAMPLER if stall.evidence.source == "workers" else work.WAIT
            return profiles.get(work.WAIT), kind
        profile = StackProfile()
        for each in kinds:
            if each in profiles:
                profile.merge(profiles[each])
        if work.FETCH in kinds:
            profile.merge(self._ended_workers)
            for handle in self._asked.values():
                profile.merge(self._sampled_by(handle))
        kind = work.FETCH if work.FETCH in kinds else kinds[0] if kinds else ""
        return (profile if profile.samples else None), kind


def _doing(tracker: StepTracker) -> str | None:
    """What the training thread does now: a kind of work that can be sampled; None for anything else."""
    if tracker.waiting_since > 0:
        return work.WAIT
    if tracker.checkpointing:
        return work.CHECKPOINT
    return work.STEP if tracker.stepping and not tracker.waiting_since else None


# -- stall monitor ---------------------------------------------------------------------------------------------------
#
# Follows whether this rank stalls, and why: turns ticks into stalls with a cause and advice.

_WORTH_TIMING: Final = 0.02
_TIMED_WAITS: Final = 32
"""If waits take this share of the loop, this many of the next batches are timed in parts instead of one: a sampler may
work only once in a few batches. With 5 µs each, this takes less than 0.2 ms a second."""

_SAMPLE_SECONDS: Final = 0.1
_CLOSE_SAMPLE_SECONDS: Final = 0.02
"""Seconds between samples of the training thread: usually, and while one rank holds the others up. A sample costs the
agent thread 0.12 ms, including its wake-up. A rank of the zoo's `straggler-compute` pauses for 60 ms in steps of 71 ms.
Predictions were up to 42 % off with ten samples a second, and up to 15 % with fifty."""


class StallMonitor:
    """Follows the stalls of one rank.

    Args:
        config: window and ratios.
        tracker: the current state of the training thread.
        counts: counts of stalls, updated here.
        errors: counts failed and skipped calls of the user's callback.
        emit: writes a line of the log.
        timestamp: returns the current time, ISO-8601.
        lines: returns the lines that a stall spends its time in; None if they are not known.
        rank: the rank.
        node: name of this node.
    """

    def __init__(
        self,
        config: Config,
        tracker: StepTracker,
        counts: StallCounts,
        *,
        errors: ErrorLog,
        emit: Callable[[str, dict[str, Any]], Any],
        timestamp: Callable[[], str],
        lines: Callable[[Stall], LineFindings | None] = lambda _: None,
        rank: int = 0,
        node: str = "",
    ) -> None:
        self._detector = StallDetector(
            config.stall_window_seconds, config.stall_enter_ratio, config.stall_exit_ratio, rank
        )
        self._hang_monitor = HangMonitor(config, tracker)
        self._hang: Hang | None = None
        self._phase: str | None = None
        self._stuck_setting = config.stuck_seconds
        self._enter_ratio = config.stall_enter_ratio
        self._longest_phase = self._phase_waited_for = 0.0
        self._one_is_slow = self._peer_is_stuck = False
        self._last = Tick()
        self._last_step = Tick()  # the newest tick in which a step has ended
        self._waits_matter = False
        self._interval = config.interval_seconds
        self._errors = errors
        self._callback = StallCallback(config.on_stall, errors)
        self._emit = emit
        self._timestamp = timestamp
        self._lines = lines
        self._opened = ""
        self._counts = counts
        self._node = node
        self._costliest: dict[str, Any] | None = None

    def tick(self, tick: Tick, accounting: Accounting, *, intervals: int = 1) -> None:
        """Add a tick, which was due ``intervals`` after the last one. Logs a stall that opens or closes."""
        self._callback.note_failures()
        added, peers = tick.totals.passed_since(self._last.totals), tick.conditions.peers
        self._peer_is_stuck = any(peer.stuck for peer in peers)
        did_not_run = paused(added.seconds, self._interval, added.process_cpu_seconds, intervals=intervals)
        category = accounting.ledger.category
        self._phase = category if category in {CHECKPOINT, EVALUATION} else None
        peer_phase = None if added.steps or did_not_run else self._phase_of(peers)
        if not added.steps and not did_not_run:
            debugged = self._hang_monitor.in_debugger()
            did_not_run = debugged or any(peer.phase == DEBUGGED for peer in peers)
            self._phase = DEBUGGED if debugged else self._phase
        self._last = tick
        if added.steps:
            self._last_step = tick
            self._longest_phase, self._phase_waited_for = max(self._longest_phase, self._phase_waited_for), 0.0
        self._waits_matter = added.wait_seconds >= _WORTH_TIMING * added.loop_seconds > 0
        hang = self._hang = self._hang_monitor.tick(
            0.0 if did_not_run else added.loop_seconds,
            tick.conditions.source,
            accounting,
            seconds=0.0 if did_not_run else added.seconds,
            waits_for_far_ranks=any(peer.node is not None for peer in peers) and self._waits_for_ranks(),
            peer_phase=peer_phase,
        )
        if hang is not None and hang.kind != "held":
            self._take_hang(hang, tick)
        elif did_not_run or peer_phase == EXPECTED:
            self._detector.skip(tick)
        else:
            self._take(tick)
        self._one_is_slow = "straggler" in {self.active_cause, *(peer.cause for peer in peers)}

    @property
    def waits_to_time(self) -> int:
        """How many of the next batches to time in parts: more if waits matter."""
        return _TIMED_WAITS if self._waits_matter else 1

    @property
    def stuck_for_seconds(self) -> float:
        """For how long the run has been stuck now; 0 if it is not."""
        return 0.0 if self._hang is None else self._hang.seconds

    @property
    def stuck_in(self) -> str | None:
        """The category of the ledger in which it is stuck, or was until now; None if it is not."""
        return None if self._hang is None else self._hang.category

    @property
    def sample_seconds(self) -> float:
        """Mean time between two samples of the training thread, in seconds.

        It is shorter while this rank waits for a slow rank, or a peer does: the slow rank is sampled as often. It is
        also shorter before that, if this rank seems to wait: with ten samples a second over 10 s, a rank that was 12 %
        slower seemed to cost 23 %.
        """
        closely = self._one_is_slow or self._detector.may_have_straggler
        return _CLOSE_SAMPLE_SECONDS if closely else _SAMPLE_SECONDS

    @property
    def hang(self) -> Hang | None:
        """The hang of this rank at the newest tick; None without one."""
        hang = self._hang
        return hang if hang is not None and hang.kind != "closed" else None

    @property
    def job_hangs(self) -> bool:
        """Whether this rank or one of its peers hangs."""
        return self._peer_is_stuck or self.hang is not None

    @property
    def still_seconds(self) -> float:
        """Since the hooks last saw the training thread go on."""
        return self._hang_monitor.still_seconds

    @property
    def fetch(self) -> StuckPlace | None:
        """Where the worker of this rank stands that has been in a fetch for longest; None without one."""
        return self._hang_monitor.fetch

    def _phase_of(self, peers: Sequence[RankPace]) -> str | None:
        """Whether a peer evaluates or writes a checkpoint, and whether it may still make progress."""
        still = [peer.still_seconds for peer in peers if peer.phase in {CHECKPOINT, EVALUATION}]
        if not still:
            return None
        self._phase_waited_for = max(self._phase_waited_for, *still)
        return EXPECTED if max(still) < longest_phase(self._stuck_setting, self._longest_phase) else OVERDUE

    def _waits_for_ranks(self) -> bool:
        """Whether this rank has spent the time since its newest step in calls in which ranks wait for one another."""
        now, then = self._last.totals.own, self._last_step.totals.own
        return mostly_in_sync(now.samples - then.samples, now.in_sync_samples - then.in_sync_samples)

    def _take(self, tick: Tick) -> None:
        before = self._detector.stall
        change = self._detector.update(tick)
        if change is None:
            if self._detector.stall is None:
                self._tell_lack_of_cores()
            return
        self._count_lost(change.stall, before)
        if change.kind == "opened":
            self._opened_now(change.stall)
        elif change.kind == "closed":
            self._close(change.stall)

    def _tell_lack_of_cores(self) -> None:
        """Say why no straggler is named although this rank waits for one."""
        window = self._detector.window
        if window is None:
            return
        own = window.pace
        slow = short_of_cores(own, window.peers, window.earlier_paces)
        if slow is None or slow.lost * own.steps < self._enter_ratio * own.seconds:
            return
        text = f"no straggler is named: {slow.name} {slow.why}; run less on that machine, or give it more cores"
        self._errors.tell("diagnose", text)

    def _take_hang(self, hang: Hang, tick: Tick) -> None:
        """Follow a hang. Only one stall is open at a time, so a hang replaces an open stall."""
        before = self._detector.stall
        if before is not None:
            self._close(before)
        if hang.kind == "closed":
            self._detector.close_hang(tick)
            return
        pace = self.pace()
        named = hang.cause != "unknown" or self._phase is not None
        missing = held_up_by(pace, tick.conditions.peers) if pace is not None and not named else None
        if missing is not None:
            hang = self._hang = self._hang_monitor.blame(hang, missing)
        stall = self._detector.open_hang(hang.cause, hang.seconds, tick)
        self._count_lost(stall, None)
        self._opened_now(stall, with_stacks=True)

    def adopt(self, rank: int) -> None:
        """Use another rank: the rank of this process has become known or has changed."""
        self._detector.rank = rank

    def end(self, totals: Totals) -> None:
        """Close the open stall at the end of the run."""
        self._last = replace(self._last, totals=totals)
        change = self._detector.last()
        if change is not None:
            self._count_lost(change.stall, None)
            self._opened_now(change.stall)
        stall = self._detector.stall
        if stall is not None:
            self._close(stall)

    def wait_for_callback(self, seconds: float) -> None:
        """Wait for a call of the user's callback in progress, at most this many seconds."""
        self._callback.wait(seconds)

    def pace(self) -> RankPace | None:
        """The pace of this rank, for the other ranks."""
        pace = self._detector.pace()
        if pace is None:
            return None
        now, then = self._last.totals, self._last_step.totals
        return structs.replace(
            pace,
            phase=self._phase,
            seconds_without_step=(now.wall_seconds - then.wall_seconds) - (now.startup_seconds - then.startup_seconds),
            stuck=self.hang is not None,
            still_seconds=round(self._hang_monitor.still_seconds, 1),
            **self._of_run(now),
            waits_for_ranks=self._waits_for_ranks(),
        )

    def _of_run(self, totals: Totals) -> dict[str, Any]:
        """What a pace tells of the whole run."""
        stall, closed = self._detector.stall, self._costliest
        found = [] if closed is None else [(closed["cause"], lost_seconds(closed))]
        found += [] if stall is None else [(stall.cause, stall.lost_seconds.get(stall.cause, 0.0))]
        cause, lost = max(found, key=lambda each: weight(*each), default=(None, 0.0))
        unseen = batches_unseen(totals.unseen_steps, totals.steps)
        return {
            "run_wait_seconds": totals.ledger_seconds.get(DATA_WAIT, 0.0),
            "run_loop_seconds": totals.loop_seconds + totals.first_wait_seconds,
            "run_first_wait_seconds": totals.first_wait_seconds,
            "run_exposed_seconds": None if unseen else totals.exposed_wait_seconds,
            "run_cause": cause,
            "run_lost_seconds": lost,
        }

    @property
    def costliest(self) -> dict[str, Any] | None:
        """The fields of the closed stall that has cost most; None without one."""
        return self._costliest

    def hang_at_end(self, steps: int) -> Hang | None:
        """The hang in which the run ends, after so many steps; None if a step has ended since it began."""
        return (self.hang or self._hang_monitor.left) if steps == self._last_step.totals.steps else None

    @property
    def active_cause(self) -> str | None:
        """The cause of the open stall; None without one."""
        return None if self._detector.stall is None else self._detector.stall.cause

    def view(self) -> StallView:
        """Stalls so far, for the endpoint."""
        stall, cause = self._detector.stall, self.active_cause
        slow = None if stall is None else slow_rank(stall, self._hang)
        return StallView(cause, dict(self._counts.opened), dict(self._counts.lost_seconds), slow.rank if slow else None)

    @property
    def open_stall(self) -> Stall | None:
        """The open stall; None without one."""
        return self._detector.stall

    @property
    def holds_others_up(self) -> bool:
        """Whether a peer waits for a slow rank, and this rank has no stall itself: it may be that rank."""
        return self._detector.stall is None and self._one_is_slow

    def stall_fields(self) -> dict[str, Any] | None:
        """Fields of the open stall, as in the log; None without one."""
        stall = self._detector.stall
        return None if stall is None else self._fields(stall) | {"opened": self._opened}

    def log_lines(self) -> None:
        """Log the lines that the open stall has spent its time in so far. A run that is killed logs no close."""
        fields = self.stall_fields()
        if fields is not None and "lines" in fields["evidence"]:
            self._emit("stall_lines", fields)

    def _fields(self, stall: Stall) -> dict[str, Any]:
        return stall_fields(stall, self._hang, self._node, self._lines(stall))

    def _count_lost(self, stall: Stall, before: Stall | None) -> None:
        for cause, seconds in stall.lost_seconds.items():
            self._counts.lost_seconds[cause] += seconds - (
                before.lost_seconds.get(cause, 0.0) if before is not None else 0.0
            )

    def _opened_now(self, stall: Stall, *, with_stacks: bool = False) -> None:
        self._opened = self._timestamp()
        self._counts.opened[stall.cause] += 1
        fields = stall_fields(stall, self._hang, self._node) | {"opened": self._opened}
        if with_stacks:
            with self._errors.contained("stacks"):
                fields["evidence"]["stacks"] = self._hang_monitor.stacks()
        self._emit("stall_open", fields)
        self._callback.tell(fields)

    def _close(self, stall: Stall) -> None:
        when = {"opened": self._opened, "closed": self._timestamp()}
        fields = self._fields(stall) | when | {"last_step": self._last.totals.steps}
        self._costliest = costliest([fields] if self._costliest is None else [self._costliest, fields])
        self._emit("stall_close", fields)
