"""Samples the fetches of a DataLoader worker, to find the line of code in which their time goes."""

from __future__ import annotations

import os
import random
import sys
import threading
from typing import TYPE_CHECKING, Final

from telemetry.util.clock import NS, clock_gettime_ns, now_ns, pthread_getcpuclockid, sleep
from telemetry.util.errors import let_pass
from telemetry.util.gil import restore_switch_interval, shorten_switch_interval, thread_waits
from telemetry.util.profiles import AttributedSamples
from telemetry.util.sample_times import FIRST_MAX_SHARE, FIRST_SAMPLES, MAX_SHARE, SampleTimes
from telemetry.util.stacks import fetch_part, stack_of
from telemetry.util.threads import OwnThread, rest, work

if TYPE_CHECKING:
    from telemetry.hooks.worker_block import WorkerBlock

_LINES: Final = "lines"
"""Who needs the short switch interval."""

_GAP_SECONDS: Final = 0.008

_FIRST_WRITE_NS: Final = NS // 10
_WRITE_NS: Final = NS
"""The profile is written after 0.1 s, and then at intervals that double up to 1 s: a worker may live for only one
short epoch."""

_BURST_SECONDS: Final = 0.1
"""Length of a burst, which ends with the next sample."""

_SECONDS_PER_FETCH: Final = 0.0004
_MAX_SHARE_OF_WORKER: Final = 0.009
_MAX_SHARE_OF_FETCHES: Final = 0.005
"""For a sampled worker: extra CPU seconds per fetch for the short switch interval; its largest share of a core in all;
and the largest share for the fetches. The samples take the rest. The target is 1 %, after the first samples."""

_MIN_PART: Final = 0.1
_MAX_REST_SECONDS: Final = 2.0


class WorkerSampler:
    """Samples the fetches of a DataLoader worker while the agent asks for it. Made on the thread that fetches.

    The worker's probe looks at the request once per fetch, and calls `ask` while there is one. A thread of the worker
    then reads the stack of the fetching thread at random moments, and writes the profile into the shared block. It ends
    with the request. A thread does not survive a fork, and this one holds no lock at which a child could hang.

    Args:
        block: has the requests, and gets the profile.
        worker: the number of the worker.
    """

    def __init__(self, block: WorkerBlock, worker: int) -> None:
        self._counters = block.counters(worker)
        self._area = block.profile_area(worker)
        self._pid = os.getpid()
        self._fetcher = threading.get_ident()
        self._running = False
        self._fetches = 0
        self._session = 0
        self._began_ns = 0
        self._samples = AttributedSamples()
        module = sys.modules.get("torch.utils.data._utils.worker")
        self._loop = vars(module) if module is not None else None

    def ask(self) -> None:
        """Start the thread unless it runs. Called at the start of a fetch."""
        self._fetches += 1
        if self._running or os.getpid() != self._pid:
            return
        self._running = True
        try:
            OwnThread(self._run, name="telemetry-lines").start()
        except Exception as error:
            let_pass(error)  # no thread can be started: this worker does not try again

    def _run(self) -> None:
        shorten_switch_interval(_LINES)
        try:
            self._sample()
        except Exception:
            pass  # nothing can report it from here. The agent sees a worker without a profile
        finally:
            restore_switch_interval(_LINES)
            self._running = False

    def _sample(self) -> None:
        times = SampleTimes(_GAP_SECONDS, FIRST_MAX_SHARE)
        cpu_clock = pthread_getcpuclockid(self._fetcher)
        before_ns, cpu_before = now_ns(), clock_gettime_ns(cpu_clock)
        written_ns, write_after = before_ns, _FIRST_WRITE_NS
        bursts = SampleBursts(times, before_ns, self._fetches)
        while True:
            gap = times.gap()
            waits = thread_waits()
            due = now_ns() + int(gap * NS)
            _sleep(gap)
            now = now_ns()
            waits = thread_waits() - waits - 1  # for the GIL; one was the sleep
            session, until = self._counters.sample_session, self._counters.sample_until_ns
            if session != self._session:
                self._session, self._began_ns, self._samples = session, now, AttributedSamples()
            if now >= until:
                break
            stack = fetch_part(stack_of(self._fetcher, self._loop)) if self._counters.fetching_since_ns else ()
            cpu = clock_gettime_ns(cpu_clock)
            if stack:
                wall = times.weight_ns(due, now)
                on_core = min(1.0, (cpu - cpu_before) / max(1, now - before_ns))
                delay = times.delay_ns(due, now)
                self._samples.add(stack, wall, int(wall * on_core), delay_ns=delay, waits=waits, fetch=self._fetches)
            before_ns, cpu_before = now, cpu
            if now - written_ns >= write_after:
                written_ns, write_after = now, min(2 * write_after, _WRITE_NS)
                self._write()
            times.taken()
            pause = bursts.rest(now_ns())
            if pause is not None:
                if pause:  # with the switch interval that this process has without samples
                    restore_switch_interval(_LINES)
                    _sleep(pause)
                    shorten_switch_interval(_LINES)
                    before_ns, cpu_before = now_ns(), clock_gettime_ns(cpu_clock)
                bursts.begin(now_ns(), self._fetches)
        self._write()

    def _write(self) -> None:
        if self._samples.samples:
            content = self._samples.profile().packed(self._area.HALF_BYTES)
            self._area.write(self._session, self._pid, self._began_ns, content)


def _sleep(seconds: float) -> None:
    rest()
    sleep(seconds)
    work()


class SampleBursts:
    """Decides when a worker rests between samples, with its own switch interval. Used on the sampling thread.

    The short interval has a cost: threads that send batches wake and switch more often, which takes up to 0.4 ms of CPU
    per batch (`benchmarks.line_cost`). So a worker that fetches many batches per second is sampled in bursts.

    Args:
        times: gets the part of the time in which samples are taken, and the largest share of a core for it. The part is
            the whole time while the rate of fetches is unknown or low.
        now: the stamp at which the first burst begins.
        fetches: how many fetches have begun so far.
    """

    def __init__(self, times: SampleTimes, now: int, fetches: int) -> None:
        self._times = times
        self._random = random.Random()  # noqa: S311 - our own, so that the training's numbers stay the same
        self._first = now, fetches
        self._began_ns = now

    def rest(self, now: int) -> float | None:
        """Seconds to rest at this stamp; None if the burst goes on. They are random, for an equal chance."""
        passed = (now - self._began_ns) / NS
        if passed < _BURST_SECONDS:
            return None
        return min(_MAX_REST_SECONDS, passed * (1 / self._times.part - 1) * (0.5 + self._random.random()))

    def begin(self, now: int, fetches: int) -> None:
        """Begin a burst. ``fetches``: how many have begun so far.

        Their rate decides how much of the time is sampled. It is the rate since the first burst: if each burst had its
        own rate, fetches that are short for a moment would decide how much their neighbours count.
        """
        first_ns, before = self._first
        share = _SECONDS_PER_FETCH * (fetches - before) / max(1, now - first_ns) * NS
        part = max(_MIN_PART, _MAX_SHARE_OF_FETCHES / max(share, _MAX_SHARE_OF_FETCHES))
        self._times.part = part
        most = _MAX_SHARE_OF_WORKER - min(part * share, _MAX_SHARE_OF_FETCHES)
        if self._times.samples >= FIRST_SAMPLES:
            self._times.max_share = min(MAX_SHARE, most)
        self._began_ns = now
