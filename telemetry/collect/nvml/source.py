"""This rank's GPU through NVML, sampled on a thread of its own.

A wedged driver can block a call forever, so no other thread may make one. The thread stores its newest sample, and
``read`` returns it. The two threads share a few attributes, each replaced as a whole. There is no lock that could be
held during a call or inherited by a forked child.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.collect.collector import CollectorError
from telemetry.collect.nvml.activity import own_pids
from telemetry.collect.nvml.device import (
    GpuDevice,
    NoGpuError,
    NvmlError,
    find_device,
)
from telemetry.collect.nvml.driver import NvmlDriver
from telemetry.collect.nvml.readings import DeviceReader
from telemetry.core.clock import NS, now_ns, thread_time
from telemetry.core.own_threads import OwnThread, Wake

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from telemetry.core.samples import GpuSample

_FRESH_INTERVALS: Final = 3
_MIN_FRESH_SECONDS: Final = 1.0
"""A sample is fresh for a few intervals, and for at least one second: a busy machine can delay a thread that long."""

_MAX_RETRY_SECONDS: Final = 30.0
"""After a failure NVML is initialised again after 1, 2, 4, ... intervals, but after this time at the latest."""

_NOT_YET: Final = "NVML has given no reading yet"
_FORKED: Final = "a forked child does not sample the GPU"
_CLOSED: Final = "the NVML source is closed"


@dataclass(frozen=True, slots=True)
class _ReadingOutcome:
    """The result of a tick: a sample, or the reason why it is missing. ``at_ns`` is the start of the tick."""

    sample: GpuSample | None
    reason: str | None
    at_ns: int


class NvmlSource:
    """The newest sample of this rank's GPU.

    Args:
        device_uuid: returns the UUID that torch reports for the training thread's device; None before CUDA is
            initialised. It is called on the NVML thread once per tick. It must be quick and must not initialise
            CUDA.
        interval_seconds: time from the end of one tick to the next.
        deadline_seconds: a call that takes longer counts as hung.
        environ: source of ``CUDA_VISIBLE_DEVICES`` before CUDA is initialised.
        clock: monotonic nanoseconds.

    Without a driver or a GPU the thread ends by itself, and a later ``read`` starts it again. While a call hangs, no
    second thread is started.
    """

    name = "nvml"

    def __init__(
        self,
        device_uuid: Callable[[], str | None],
        *,
        interval_seconds: float = 1.0,
        deadline_seconds: float = 5.0,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], int] = now_ns,
    ) -> None:
        self._device_uuid = device_uuid
        self._interval = interval_seconds
        self._deadline_seconds = deadline_seconds
        self._environ = environ
        self._clock = clock
        self._fresh_seconds = max(_FRESH_INTERVALS * interval_seconds, _MIN_FRESH_SECONDS)
        self._inert: str | None = None
        self._stop = Wake()
        self._driver = NvmlDriver(clock)
        self._outcome = _ReadingOutcome(None, _NOT_YET, 0)
        self._cpu_seconds = 0.0
        self._thread: OwnThread | None = None
        try:
            self._ensure_thread()
        except CollectorError:
            pass  # the first read reports it

    def read(self) -> GpuSample:
        """The newest sample. Never blocks.

        Raises:
            CollectorError: no driver, no GPU, this rank's GPU is not known yet, a call hangs, or the GPU is lost.
        """
        if self._inert is not None:
            raise CollectorError(self._inert)
        now = self._clock()
        call = self._driver.running
        # The text stays the same while a call hangs, so that the log reports it once.
        if call is not None and now - call[1] > self._deadline_seconds * NS:
            raise CollectorError(f"an NVML call has not returned for over {self._deadline_seconds:g} s ({call[0]})")
        self._ensure_thread()
        outcome = self._outcome
        if outcome.sample is None:
            raise CollectorError(outcome.reason or _NOT_YET)
        if now - outcome.at_ns > self._fresh_seconds * NS:
            raise CollectorError(f"the newest NVML reading is over {self._fresh_seconds:g} s old")
        return outcome.sample

    def close(self) -> None:
        """Stop the thread, which shuts NVML down itself. Does not wait for it, because a call may hang."""
        self._inert = self._inert or _CLOSED
        self._stop.set()

    def cpu_seconds(self) -> float:
        """CPU seconds of the NVML thread up to its last tick, including earlier threads of this source."""
        return self._cpu_seconds

    def after_fork_in_child(self) -> None:
        """Forget the parent's thread, which does not exist in the child. Calls no NVML function and takes no lock.

        The event is replaced, not set, because the parent's thread may have held its lock during the fork.
        """
        self._inert = _FORKED
        self._stop = Wake()
        self._outcome = _ReadingOutcome(None, _FORKED, 0)
        self._cpu_seconds = 0.0
        self._thread = None

    def _ensure_thread(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        thread = OwnThread(self._run, name="telemetry-nvml")
        try:
            thread.start()
        except RuntimeError as error:  # the thread limit is reached, or the interpreter is shutting down
            raise CollectorError(f"the NVML thread cannot be started: {error}") from error
        self._thread = thread

    def _run(self) -> None:
        """The thread. It contains every error."""
        try:
            self._sample_until_told()
        except BaseException as error:
            self._failed(f"the NVML thread ended: {type(error).__name__}: {error}")

    def _sample_until_told(self) -> None:
        cpu_before = self._cpu_seconds
        sampler = _SamplingThread(self._driver, self._device_uuid, self._environ, self._clock, self._fresh_seconds)
        wait: float | None = 0.0
        try:
            while wait is not None and not self._stop.wait(wait):
                wait = self._tick(sampler, wait)
                self._cpu_seconds = cpu_before + thread_time()
        finally:
            sampler.close()

    def _tick(self, sampler: _SamplingThread, waited: float) -> float | None:
        """Sample once. Returns the seconds until the next time, None if there is nothing to sample."""
        started = self._clock()
        try:
            sample = sampler.sample()
        except NoGpuError as error:
            self._failed(str(error))
            return None
        except CollectorError as error:  # the device is not known yet, but NVML works
            self._failed(str(error))
            return self._interval
        except Exception as error:
            self._failed(str(error) if isinstance(error, NvmlError) else f"{type(error).__name__}: {error}")
            sampler.close()
            return max(self._interval, min(2 * max(waited, self._interval), _MAX_RETRY_SECONDS))
        # The time is that of the start: after a call that hung for a minute, the first readings are a minute old.
        self._outcome = _ReadingOutcome(sample, None, started)
        return self._interval

    def _failed(self, reason: str) -> None:
        self._outcome = _ReadingOutcome(None, reason, self._clock())


class _SamplingThread:
    """An open NVML with the device of this rank. It is used only on the NVML thread."""

    def __init__(
        self,
        driver: NvmlDriver,
        device_uuid: Callable[[], str | None],
        environ: Mapping[str, str],
        clock: Callable[[], int],
        window_seconds: float,
    ) -> None:
        self._driver = driver
        self._device_uuid = device_uuid
        self._environ = environ
        self._clock = clock
        self._window_ns = int(window_seconds * NS)
        self._pids = own_pids()
        self._reader: DeviceReader | None = None
        self._uuid: str | None = None

    def sample(self) -> GpuSample:
        """One sample of this rank's device. The device is searched first if it is unknown or has changed."""
        self._driver.open()
        uuid = self._device_uuid() or self._uuid
        if uuid != self._uuid:
            self._forget_device()
        if self._reader is None:
            self._reader = self._open_reader(find_device(self._driver, uuid, self._environ))
            self._uuid = uuid
        return self._reader.sample()

    def close(self) -> None:
        """Release everything that NVML has allocated."""
        self._forget_device()
        self._driver.close()

    def _open_reader(self, device: GpuDevice) -> DeviceReader:
        return DeviceReader(self._driver, device, clock=self._clock, window_ns=self._window_ns, pids=self._pids)

    def _forget_device(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
