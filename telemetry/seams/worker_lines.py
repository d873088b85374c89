"""Samples the fetches of a DataLoader worker, to find the line of code in which their time goes."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Final

from telemetry.safety.errors import let_pass
from telemetry.safety.threads import OwnThread
from telemetry.util.clock import NS, now_ns, sleep
from telemetry.util.profiles import StackProfile
from telemetry.util.sampling import SampleClock
from telemetry.util.stacks import fetch_part

if TYPE_CHECKING:
    from telemetry.seams.worker_block import WorkerBlock

_GAP_SECONDS: Final = 0.02
_FIRST_SECONDS: Final = 20.0
_FIRST_SHARE: Final = 0.006
_MAX_SHARE: Final = 0.002
"""Mean time between samples. They take at most these shares of a core: in the first seconds of a stall, and later."""

_MAX_GAP_SECONDS: Final = 60.0

_FIRST_WRITE_NS: Final = NS // 10
_WRITE_NS: Final = NS
"""The profile is written after 0.1 s, and then at intervals that double up to 1 s: a worker may live for only one
short epoch."""


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
        self._fetcher = threading.get_ident(), threading.get_native_id()
        self._running = False
        module = sys.modules.get("torch.utils.data._utils.worker")
        self._loop = vars(module) if module is not None else None

    def ask(self) -> None:
        """Start the thread unless it runs. Called at the start of a fetch."""
        if self._running or os.getpid() != self._pid:
            return
        self._running = True
        try:
            OwnThread(self._run, name="telemetry-lines").start()
        except Exception as error:
            let_pass(error)  # no thread can be started: this worker does not try again

    def _run(self) -> None:
        try:
            while session := self._session():
                self._sample(session)
        except Exception:
            pass  # nothing can report it from here. The agent sees a worker without a profile
        finally:
            self._running = False

    def _session(self) -> int:
        """The number of the request in progress; 0 without one."""
        return self._counters.sample_session if now_ns() < self._counters.sample_until_ns else 0

    def _sample(self, session: int) -> None:
        """Take samples for one request."""
        clock, profile, (ident, native) = SampleClock(sleep), StackProfile(), self._fetcher
        began = written = now_ns()
        write_after = _FIRST_WRITE_NS
        while self._session() == session:
            share = _FIRST_SHARE if now_ns() - began < _FIRST_SECONDS * NS else _MAX_SHARE
            clock.draw(_GAP_SECONDS, share)
            clock.wait(native, _MAX_GAP_SECONDS)
            clock.wait_until_due(native)
            sample = clock.take(ident, native, self._loop)
            fetch = fetch_part(sample.stack) if self._counters.fetching_since_ns else ()
            if fetch:
                profile.add(fetch, sample.time)
            if now_ns() - written >= write_after:
                written, write_after = now_ns(), min(2 * write_after, _WRITE_NS)
                self._write(session, began, profile)
        self._write(session, began, profile)

    def _write(self, session: int, began_ns: int, profile: StackProfile) -> None:
        if profile.samples:
            self._area.write(session, self._pid, began_ns, profile.packed(self._area.HALF_BYTES))
