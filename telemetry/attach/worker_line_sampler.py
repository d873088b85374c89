"""Runs inside a DataLoader worker while the agent asks for it: samples which code its fetches spend their time in.

The worker's probe looks at the request once per fetch, and calls `WorkerSampler.ask` while there is one. A thread of
the worker then reads the stack of the fetching thread at random moments, and writes the profile into the shared block.
It ends when the request is over. A thread does not survive a fork, and this one holds no lock at which a child could
hang.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Final

from telemetry.core.fetch_stacks import fetch_part
from telemetry.core.sample_area import HALF_BYTES
from telemetry.core.sample_attribution import AttributedSamples, thread_waits
from telemetry.core.sample_times import SampleBursts, SampleTimes
from telemetry.core.switch_interval import restore_switch_interval, shorten_switch_interval
from telemetry.util.clock import NS, clock_gettime_ns, now_ns, pthread_getcpuclockid, sleep
from telemetry.util.stacks import stack_of
from telemetry.util.threads import OwnThread, rest, work

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.core.sample_area import SampleArea

_GAP_SECONDS: Final = 0.008
"""Mean time between samples."""

_USER: Final = "lines"

_FIRST_WRITE_NS: Final = NS // 10
_WRITE_NS: Final = NS
"""The profile is written after 0.1 s, and then at intervals that double up to 1 s: a worker may live for one short
epoch."""


class WorkerSampler:
    """Samples the fetches of this worker. Made on the thread that fetches.

    Args:
        request: returns the session and the stamp until which to sample.
        fetching: whether a fetch is in progress.
        area: gets the profile.
    """

    def __init__(self, request: Callable[[], tuple[int, int]], fetching: Callable[[], bool], area: SampleArea) -> None:
        self._request = request
        self._fetching = fetching
        self._area = area
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
        """Start the thread, if it does not run. Called at the start of a fetch."""
        self._fetches += 1
        if self._running or os.getpid() != self._pid:
            return
        self._running = True
        thread = OwnThread(self._run, name="telemetry-lines")
        try:
            thread.start()
        except RuntimeError:  # no thread can be started: not asked again in this worker
            pass

    def _run(self) -> None:
        shorten_switch_interval(_USER)
        try:
            self._sample()
        except Exception:
            pass  # it cannot be reported from here; the agent sees a worker without a profile
        finally:
            restore_switch_interval(_USER)
            self._running = False

    def _sample(self) -> None:
        times = SampleTimes(_GAP_SECONDS)
        cpu_clock = pthread_getcpuclockid(self._fetcher)
        before_ns, cpu_before = now_ns(), clock_gettime_ns(cpu_clock)
        write_after = _FIRST_WRITE_NS
        written_ns = before_ns
        bursts = SampleBursts(times, before_ns, self._fetches)
        while True:
            gap = times.gap()
            waits = thread_waits()
            due = now_ns() + int(gap * NS)
            rest()
            sleep(gap)
            work()
            now = now_ns()
            waits = thread_waits() - waits - 1  # for the GIL; one was the sleep
            session, until = self._request()
            if session != self._session:
                self._session, self._began_ns, self._samples = session, now, AttributedSamples()
            if now >= until:
                break
            stack = fetch_part(stack_of(self._fetcher, self._loop)) if self._fetching() else ()
            cpu = clock_gettime_ns(cpu_clock)
            if stack:
                wall = times.weight_ns(due, now)
                on_core = min(1.0, (cpu - cpu_before) / max(1, now - before_ns))
                delay = times.delay_ns(due, now)
                cpu_ns = int(wall * on_core)
                self._samples.add(stack, wall, cpu_ns, delay_ns=delay, waits=waits, fetch=self._fetches)
            before_ns, cpu_before = now, cpu
            if now - written_ns >= write_after:
                written_ns, write_after = now, min(2 * write_after, _WRITE_NS)
                self._write()
            times.taken()
            pause = bursts.rest(now_ns())
            if pause is not None:
                if pause:
                    _pause(pause)
                    before_ns, cpu_before = now_ns(), clock_gettime_ns(cpu_clock)
                bursts.begin(now_ns(), self._fetches)
        self._write()

    def _write(self) -> None:
        if self._samples.samples:
            self._area.write(self._session, self._pid, self._began_ns, self._samples.profile().packed(HALF_BYTES))


def _pause(seconds: float) -> None:
    """Wait, with the switch interval that this process has without samples."""
    restore_switch_interval(_USER)
    rest()
    sleep(seconds)
    work()
    shorten_switch_interval(_USER)
