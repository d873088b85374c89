"""This rank's GPU through NVML, on a thread of its own.

A wedged driver can hold a call for ever, so no other thread may make one. The thread samples and leaves the
newest sample behind; ``read`` only picks it up. What the two share is a handful of attributes, each replaced
as a whole: no lock, so that none is held during a call, or inherited locked by a forked child.

The only module that imports ``pynvml`` (the binding of the package ``nvidia-ml-py``): on the thread that makes the
source, not on the sampling thread. A child that is forked during an import inherits the lock of that module without
the thread that would release it, and hangs when it imports the module itself.
"""

from __future__ import annotations

import codecs
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from telemetry import forks
from telemetry.clock import NS, now_ns
from telemetry.collect.nvml_activity import gpm_supported, own_pids, process_supported
from telemetry.collect.nvml_device import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    LIBRARY_NOT_FOUND,
    Device,
    NoGpuError,
    NvmlError,
    find_device,
    mig_enabled,
)
from telemetry.collect.nvml_readings import THROTTLE_BITS, DeviceReader
from telemetry.collect.source import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from telemetry.records import GpuSample

__all__ = ["THROTTLE_BITS", "NvmlSource", "device_summary"]

_FRESH_INTERVALS: Final = 3
_FRESH_AT_LEAST_SECONDS: Final = 1.0
"""A sample is fresh for a few intervals; a busy machine may well delay a thread by a second."""

_LAST_RETRY_SECONDS: Final = 30.0
"""NVML is initialised anew after an interval, two, four, … and at most this long."""

_NOT_YET: Final = "NVML has given no reading yet"
_FORKED: Final = "a forked child does not sample the GPU"
_CLOSED: Final = "the NVML source is closed"


class NvmlDriver:
    """Calls the binding, turns its errors into ours, and says which call is under way.

    Attributes:
        binding: the ``pynvml`` module, or why it cannot be imported.
        under_way: the name of the running function and its start in monotonic ns. None between calls.
    """

    def __init__(self, clock: Callable[[], int] = now_ns) -> None:
        self.binding: Any = _binding()
        self.under_way: tuple[str, int] | None = None
        self._clock = clock
        self._initialised = False

    def open(self) -> None:
        """Load the library and initialise it, unless that is done.

        Raises:
            NoGpuError: there is no driver on this machine.
            NvmlError: there is, but it does not come up.
        """
        if self._initialised:
            return
        if isinstance(self.binding, ImportError):
            raise NoGpuError(f"the package nvidia-ml-py is not there: {self.binding}")
        try:
            self.call("nvmlInit")  # counted by NVML: other users of it in this process are not disturbed
        except NvmlError as error:
            if error.code == LIBRARY_NOT_FOUND:
                raise NoGpuError("no NVIDIA driver: libnvidia-ml.so.1 is not there") from error
            if error.code == DRIVER_NOT_LOADED:
                raise NoGpuError("no NVIDIA driver: its kernel module is not loaded") from error
            raise
        self._initialised = True

    def close(self) -> None:
        """Give back what ``open`` took."""
        if self._initialised:
            self._initialised = False
            try:
                self.call("nvmlShutdown")
            except NvmlError:
                return  # a driver that is gone has nothing to give back

    def call(self, function: str, *args: Any) -> Any:
        """Run one function of the binding.

        Raises:
            NvmlError: it failed, or this version of the binding does not have it.
        """
        run = getattr(self.binding, function, None)
        if run is None:
            raise NvmlError(function, FUNCTION_NOT_FOUND, "not in this version of nvidia-ml-py")
        self.under_way = (function, self._clock())
        try:
            return run(*args)
        except self.binding.NVMLError as error:
            raise NvmlError(function, error.value, str(error)) from None
        finally:
            self.under_way = None


def _binding() -> ModuleType | ImportError:
    codecs.lookup("ascii")  # what the binding's calls need is a module too
    try:
        import pynvml
    except ImportError as error:
        return error.with_traceback(None)
    return pynvml  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a tick led to: a sample, or the reason why there is none. ``at_ns`` is when it began."""

    sample: GpuSample | None
    reason: str | None
    at_ns: int


class NvmlSource:
    """The newest sample of this rank's GPU.

    Args:
        device_uuid: the UUID that torch reports for the training thread's device, None before CUDA is
            initialised. Called on the NVML thread, once a tick: it must be quick, and must not initialise
            CUDA.
        interval_seconds: from the end of one tick to the next.
        deadline_seconds: a call that takes longer counts as hung.
        environ: where ``CUDA_VISIBLE_DEVICES`` is looked up while torch knows nothing.
        clock: monotonic nanoseconds.

    The thread ends by itself where there is nothing to sample (no driver, no GPU), and is started again when
    a later ``read`` asks. While a call hangs, the thread hangs with it, alone: no second one is started.
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
        self._fresh_seconds = max(_FRESH_INTERVALS * interval_seconds, _FRESH_AT_LEAST_SECONDS)
        self._inert: str | None = None
        self._stop = threading.Event()
        self._driver = NvmlDriver(clock)
        self._outcome = _Outcome(None, _NOT_YET, 0)
        self._cpu_seconds = 0.0
        self._thread: threading.Thread | None = None
        try:
            self._ensure_thread()
        except SourceError:
            pass  # the first read says so

    def read(self) -> GpuSample:
        """The newest sample. Never blocks.

        Raises:
            SourceError: no driver, no GPU, none known to be ours yet, a call that hangs, a GPU that is lost.
        """
        if self._inert is not None:
            raise SourceError(self._inert)
        now = self._clock()
        call = self._driver.under_way
        # The text does not grow with the wait: the same reason is the same news.
        if call is not None and now - call[1] > self._deadline_seconds * NS:
            raise SourceError(f"an NVML call has not returned for over {self._deadline_seconds:g} s ({call[0]})")
        self._ensure_thread()
        outcome = self._outcome
        if outcome.sample is None:
            raise SourceError(outcome.reason or _NOT_YET)
        if now - outcome.at_ns > self._fresh_seconds * NS:
            raise SourceError(f"the newest NVML reading is over {self._fresh_seconds:g} s old")
        return outcome.sample

    def close(self) -> None:
        """Tell the thread to end; it gives NVML back itself. Does not wait for it: a call may hang."""
        self._inert = self._inert or _CLOSED
        self._stop.set()

    def cpu_seconds(self) -> float:
        """Processor seconds that the NVML thread has used up to its last tick, over all of its lives."""
        return self._cpu_seconds

    def after_fork_in_child(self) -> None:
        """Forget the parent's thread, which does not exist in the child. No NVML call, and no lock taken.

        The event is replaced, not set: the parent's thread may have held its lock at the moment of the fork.
        """
        self._inert = _FORKED
        self._stop = threading.Event()
        self._outcome = _Outcome(None, _FORKED, 0)
        self._cpu_seconds = 0.0
        self._thread = None

    def _ensure_thread(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        thread = threading.Thread(target=self._run, name="telemetry-nvml", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is shutting down
            raise SourceError(f"the NVML thread cannot be started: {error}") from error
        self._thread = thread

    def _run(self) -> None:
        """The thread. Nothing leaves it."""
        forks.ours()
        try:
            self._sample_until_told()
        except BaseException as error:
            self._failed(f"the NVML thread ended: {type(error).__name__}: {error}")

    def _sample_until_told(self) -> None:
        cpu_before = self._cpu_seconds
        sampler = _Sampler(self._driver, self._device_uuid, self._environ, self._clock, self._fresh_seconds)
        wait: float | None = 0.0
        try:
            while wait is not None and not self._stop.wait(wait):
                wait = self._tick(sampler, wait)
                self._cpu_seconds = cpu_before + time.thread_time()
        finally:
            sampler.close()

    def _tick(self, sampler: _Sampler, waited: float) -> float | None:
        """Sample once. Returns the seconds until the next time, None when there is nothing to sample here."""
        started = self._clock()
        try:
            sample = sampler.sample()
        except NoGpuError as error:
            self._failed(str(error))
            return None
        except SourceError as error:  # not known yet: NVML itself is well
            self._failed(str(error))
            return self._interval
        except Exception as error:
            self._failed(str(error) if isinstance(error, NvmlError) else f"{type(error).__name__}: {error}")
            sampler.close()
            return max(self._interval, min(2 * max(waited, self._interval), _LAST_RETRY_SECONDS))
        # Stamped with the start: after a call that hung for a minute the first readings are a minute old.
        self._outcome = _Outcome(sample, None, started)
        return self._interval

    def _failed(self, reason: str) -> None:
        self._outcome = _Outcome(None, reason, self._clock())


class _Sampler:
    """NVML from opened to closed, and the device of this rank in it. Lives on the NVML thread."""

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
        """One sample of this rank's device, which is looked for first when it is not known or has changed."""
        self._driver.open()
        uuid = self._device_uuid() or self._uuid
        if uuid != self._uuid:
            self._forget_device()
        if self._reader is None:
            self._reader = self._open_reader(find_device(self._driver, uuid, self._environ))
            self._uuid = uuid
        return self._reader.sample()

    def close(self) -> None:
        """Give everything back to NVML."""
        self._forget_device()
        self._driver.close()

    def _open_reader(self, device: Device) -> DeviceReader:
        return DeviceReader(self._driver, device, clock=self._clock, window_ns=self._window_ns, pids=self._pids)

    def _forget_device(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def device_summary(timeout_seconds: float = 5.0) -> list[dict[str, Any]]:
    """What NVML says of each GPU of this machine, for ``telemetry doctor``.

    Each has ``index``, ``uuid``, ``name``, ``driver_version``, ``sm_source`` (``gpm``, ``process`` or None:
    where SM activity would be read from), ``mig`` (whether it is partitioned), and ``error``: None, or why
    the rest is not known of this GPU.

    Raises:
        SourceError: no driver, or no answer within ``timeout_seconds``.
    """
    driver = NvmlDriver()
    answers: list[list[dict[str, Any]] | Exception] = []

    def ask() -> None:
        try:
            driver.open()
            answers.append(_summaries(driver))
        except Exception as error:
            answers.append(error)
        driver.close()

    thread = threading.Thread(target=ask, name="telemetry-nvml-summary", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if not answers:
        function = driver.under_way[0] if driver.under_way else "loading the library"
        raise SourceError(f"NVML has not answered for {timeout_seconds:g} s ({function})")
    answer = answers[0]
    if isinstance(answer, Exception):
        raise SourceError(str(answer)) from answer
    return answer


def _summaries(driver: NvmlDriver) -> list[dict[str, Any]]:
    version = driver.call("nvmlSystemGetDriverVersion")
    return [_summary(driver, index, version) for index in range(driver.call("nvmlDeviceGetCount"))]


def _summary(driver: NvmlDriver, index: int, version: str) -> dict[str, Any]:
    """One GPU. A lost one must not hide the others."""
    summary: dict[str, Any] = dict.fromkeys(("uuid", "name", "sm_source", "mig", "error"))
    summary = {"index": index, **summary, "driver_version": version}
    try:
        gpu = driver.call("nvmlDeviceGetHandleByIndex", index)
        summary["uuid"] = driver.call("nvmlDeviceGetUUID", gpu)
        summary["name"] = driver.call("nvmlDeviceGetName", gpu)
        summary["mig"] = mig_enabled(driver, gpu)
        if gpm_supported(driver, gpu):
            summary["sm_source"] = "gpm"
        elif process_supported(driver, gpu):
            summary["sm_source"] = "process"
    except NvmlError as error:
        summary["error"] = str(error)
    return summary
