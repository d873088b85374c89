"""Finds the lines of the user's code in which a stall spends its time, and writes the profiles of stalls."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.diagnosis.causes import CAUSES
from telemetry.diagnosis.hot_lines import (
    MIN_SAMPLES,
    line_advice,
    line_shares,
    line_verdict,
    verdict_part,
    whole_line,
)
from telemetry.log.lines import StragglerCodeLine
from telemetry.model.records import CodeLines
from telemetry.safety.files import remove_file, replace_file
from telemetry.util.clock import NS, now_ns, sleep
from telemetry.util.profiles import FETCH, SAMPLER, STEP, WAIT, StackProfile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from telemetry.agent.event_log import EventLog
    from telemetry.diagnosis.hot_lines import LineShare
    from telemetry.diagnosis.stalls import DetectedStall
    from telemetry.model.records import Advice
    from telemetry.safety.errors import ErrorLog
    from telemetry.seams.loaders import LoaderHandle
    from telemetry.seams.tracker import StepTracker
    from telemetry.sources.sampler import Sampler

MAX_BYTES: Final = 1 << 18
"""Maximum size of a file of folded stacks. There is one for each stall and rank."""

MAX_FILES: Final = 20
"""Maximum number of files of a rank, over all attempts of the run. The oldest are removed."""

_AHEAD_NS: Final = 5 * NS
"""Workers are asked to sample this far ahead, so that they stop soon after the agent ends."""

_FIRST_SECONDS: Final = 60
_EVERY_SECONDS: Final = 60
_PART_SECONDS: Final = 10
"""Samples are taken in the first minute of a stall, and then in ten seconds of each minute."""

_MAX_FIRST_SECONDS: Final = 600
"""The first minute grows to at most ten, until there are enough samples to name a line. Checkpoints may be rare, and
the agent thread gets few turns while C calls hold the GIL."""

_FIRST_LINES_SECONDS: Final = 10.0
_MAX_BETWEEN_SECONDS: Final = 600.0
"""The lines are logged 10 s after a stall has opened, or once there are enough samples, and then at intervals that
double up to ten minutes."""

_MOSTLY: Final = 0.5


def write_profile(folder: Path, name: str, content: bytes) -> None:
    """Write the profile of a stall over the one before, and remove the rank's oldest files if there are too many.

    Args:
        folder: the folder of the profiles, which is made if missing.
        name: ``rank-RANK.PID.stall-NUMBER.CAUSE.folded``.
        content: the profile, which is cut if it is too large.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / name, content[:MAX_BYTES], 0o644)
    of_rank = re.compile(rf"{name.partition('.')[0]}\.\d+\.stall-\d+\.\w+\.folded")
    own = [entry for entry in os.scandir(folder) if of_rank.fullmatch(entry.name)]
    if len(own) > MAX_FILES:
        for entry in sorted(own, key=lambda entry: entry.stat().st_mtime_ns)[:-MAX_FILES]:
            remove_file(entry.path)


class StallLines(NamedTuple):
    """The lines of a stall.

    ``advice``: what a change of the first one would bring. ``is_known``: whether it says what to do instead.
    """

    code: CodeLines
    advice: tuple[Advice, ...]
    is_known: bool = False


def _code(lines: Sequence[LineShare], kind: str, samples: int, verdict: str) -> CodeLines:
    told = [line.told() for line in lines]
    return CodeLines(lines=told, lines_of=kind, line_samples=samples, line_verdict=verdict)


def _work_of(stall: DetectedStall) -> tuple[str, ...]:
    """The work that is sampled during a stall.

    If a thread reads a loader ahead, or first fetches take most of the time at epoch boundaries, the fetches show the
    slow line.
    """
    kinds, evidence = CAUSES[stall.cause].work, stall.evidence
    if stall.cause == "worker_startup" and evidence.first_fetch_ratio >= _MOSTLY:
        return (FETCH,)
    return (FETCH,) if evidence.source == "watched" and evidence.read_by_thread and FETCH in kinds else kinds


class LineMonitor:
    """Has the open stall of one rank sampled, and finds its lines. Used on the agent thread.

    Args:
        tracker: has the loaders of the training thread.
        sampler: samples the threads of this process.
        folder: gets the folded stacks.
        errors: counts profiles that cannot be written.
        event_log: writes the lines of a rank that holds others up.
    """

    def __init__(
        self, tracker: StepTracker, sampler: Sampler, folder: Path, errors: ErrorLog, event_log: EventLog
    ) -> None:
        self._sampler = sampler
        self._loaders = tracker.loaders
        self._folder = folder
        self._errors = errors
        self._event_log = event_log
        self._session = 0  # the stamp of its begin; 0 without a stall
        self._slow = False
        self._number = 0
        self._lines_due = _FIRST_LINES_SECONDS
        self._named: tuple[str, ...] = ()  # the kinds of work with enough samples to name a line
        self._asked: dict[int, LoaderHandle] = {}
        self._ended_workers = StackProfile()

    def tick(self, stall: DetectedStall | None, *, holds_others_up: bool = False) -> bool:
        """Follow the open stall. Returns whether its lines should be logged now.

        Args:
            stall: the open stall; None without one.
            holds_others_up: other ranks wait for this one, which has no stall itself. Then its steps are sampled, and
                the log gets their lines. The report shows them with the stalls of the other ranks.
        """
        slow = holds_others_up and stall is None
        kinds: tuple[str, ...] = (STEP,) if slow else ()
        if stall is not None and not stall.is_stuck:
            kinds = _work_of(stall)
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
            self._sample(kinds, stall)
        else:
            self._pause()
        if passed < self._lines_due or not self._names_a_line(stall, kinds):
            return False
        self._lines_due = passed + min(passed, _MAX_BETWEEN_SECONDS)
        if slow:
            self._log_slow_steps()
        return not slow

    def close(self) -> None:
        """End the sampling in this process and in the workers, at the end of the run."""
        self._pause()
        self._forget()

    def lines_of(self, stall: DetectedStall) -> StallLines | None:
        """The lines of a stall so far, which are also written as folded stacks. None if there are too few samples."""
        if not self._session or stall.is_stuck or self._slow:
            return None
        profile, kind = self._profile_of(stall)
        if profile is None:
            return None
        self._write(profile, kind, stall.cause)
        evidence, cause, traits = stall.evidence, stall.cause, stall.evidence.traits
        lines = line_shares(profile, kind, sample_code=traits.sample_code if traits.one_by_one else None)
        if not lines:
            return None
        worst = whole_line(lines)
        code = _code(lines, kind, profile.samples, line_verdict(evidence, kind, worst, cause=cause))
        return StallLines(code, line_advice(evidence, kind, worst, cause=cause), is_known=worst.habit is not None)

    def _log_slow_steps(self) -> None:
        profile, _ = self._profile_of(None)
        lines = line_shares(profile, STEP) if profile is not None else ()
        if profile is not None and lines:
            self._write(profile, STEP, "straggler")
            text = f"{verdict_part(lines[0], STEP)} of rank {self._event_log.identity.rank} is {lines[0].named}"
            self._event_log.write(StragglerCodeLine(evidence=_code(lines, STEP, profile.samples, text)))

    def _write(self, profile: StackProfile, kind: str, cause: str) -> None:
        with self._errors.contained("profiles"):
            identity = self._event_log.identity
            content = profile.folded(f"rank {identity.rank} {kind}", MAX_BYTES)
            name = f"rank-{identity.rank}.{identity.pid}.stall-{self._number}.{cause}.folded"
            write_profile(self._folder, name, content)

    # -- when

    def _samples_at(self, passed: float, stall: DetectedStall | None, kinds: tuple[str, ...]) -> bool:
        if passed < _FIRST_SECONDS or passed % _EVERY_SECONDS < _PART_SECONDS:
            return True
        return passed < _MAX_FIRST_SECONDS and not self._names_a_line(stall, kinds)

    def _names_a_line(self, stall: DetectedStall | None, kinds: tuple[str, ...]) -> bool:
        if self._named != kinds:
            profile, kind = self._profile_of(stall)
            if profile is not None and profile.samples >= MIN_SAMPLES and line_shares(profile, kind):
                self._named = kinds
        return self._named == kinds

    def _begin(self, *, slow: bool) -> None:
        self._forget()
        self._slow = slow
        self._session = now_ns()
        self._number += 1
        self._named = ()
        self._lines_due = _FIRST_LINES_SECONDS
        self._sampler.begin_stall()

    def _forget(self) -> None:
        """Forget a closed stall, and end the sampling of its workers."""
        if self._session:
            for handle in self._asked.values():
                if handle.block is not None:
                    handle.block.ask_samples(self._session, 1)
            self._session = 0
            self._asked = {}
            self._ended_workers = StackProfile()
            self._sampler.stall = None

    def _sample(self, wanted: tuple[str, ...], stall: DetectedStall | None) -> None:
        """Have this work sampled. Fetches may be in workers, in workers that are threads, or ahead, on a thread."""
        kinds, live = frozenset(wanted), self._loaders.live()
        if wanted[0] == FETCH:
            self._loaders.sampling = self._session, now_ns() + _AHEAD_NS
            self._ask(live)
        ahead = stall is not None and (stall.evidence.source == "read_ahead" or stall.evidence.read_by_thread)
        threads = ahead or any(handle.threads for handle in live)
        self._sampler.wanted.kinds = kinds if threads else kinds - {FETCH}

    def _pause(self) -> None:
        self._loaders.sampling = (0, 0)
        self._loaders.asked.clear()
        self._sampler.wanted.kinds = frozenset()

    # -- the workers

    def _ask(self, live: list[LoaderHandle]) -> None:
        loaders = self._loaders
        while loaders.asked:
            handle = loaders.asked.popleft()
            self._asked[id(handle)] = handle
        trained = any(handle.training for handle in live)
        for handle in live:
            if handle.block is not None and (handle.training or not trained):
                handle.block.ask_samples(*loaders.sampling)
                self._asked[id(handle)] = handle

    def _keep_ended(self) -> None:
        """Keep the profiles of workers whose loader has ended, but not the loader."""
        alive = set(map(id, self._loaders.live()))
        for key in [key for key in self._asked if key not in alive]:
            self._ended_workers.merge(self._sampled_by(self._asked.pop(key)))

    def _sampled_by(self, handle: LoaderHandle) -> StackProfile:
        """What an iterator's workers have written in this session."""
        profile = StackProfile()
        trained = any(each.training for each in self._asked.values())
        if handle.block is None or (trained and not handle.training):
            return profile
        for found in handle.block.sampled():
            if found.session == self._session:
                try:
                    profile.merge(StackProfile.unpacked(found.content))
                except ValueError:
                    continue  # the worker was writing it
                sleep(0)  # the training thread gets its turn
        return profile

    def _profile_of(self, stall: DetectedStall | None) -> tuple[StackProfile | None, str]:
        """The samples that count for a stall, or for a slow rank without one, and the kind of work in them."""
        profiles = self._sampler.stall or {}
        if stall is None:
            return profiles.get(STEP), STEP
        kinds = _work_of(stall)
        if kinds[:1] == (WAIT,) and stall.evidence.source != "read_ahead":
            found = profiles.get(WAIT)
            if found is None or found.samples < MIN_SAMPLES:  # as in a run that ends soon after
                found = self._sampler.run.get(WAIT, found)
            return found, SAMPLER if stall.evidence.source == "workers" else WAIT
        profile = StackProfile()
        for each in kinds:
            if each in profiles:
                profile.merge(profiles[each])
        if FETCH in kinds:
            profile.merge(self._ended_workers)
            for handle in self._asked.values():
                profile.merge(self._sampled_by(handle))
        kind = FETCH if FETCH in kinds else kinds[0] if kinds else ""
        return (profile if profile.samples else None), kind
