"""The thread that samples this rank's GPUs. What it asks them is in `telemetry.sources.nvml` and `.amd`.

A wedged driver can block a call forever, so no other thread may make one. The thread stores its newest sample, and
``read`` returns it. The two threads share a few attributes, each replaced as a whole. There is no lock that could be
held during a call or inherited by a forked child.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

from telemetry.sources.collector import CollectorError
from telemetry.util.clock import NS, thread_time
from telemetry.util.threads import OwnThread, Wake

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.records import GpuError, GpuSample

MAX_ERRORS: Final = 100
"""A GPU may report errors without end. The rest is read at the next tick."""

_FRESH_INTERVALS: Final = 3
_MIN_FRESH_SECONDS: Final = 1.0
"""A sample is fresh for a few intervals, and for at least one second: a busy machine can delay a thread that long."""

_MAX_RETRY_SECONDS: Final = 30.0
"""After a failure the driver is initialised again after 1, 2, 4, ... intervals, but after this time at the latest."""


class NoGpuError(CollectorError):
    """There is nothing to sample: no driver, no GPU, or none that this process may use."""


class DriverError(Exception):
    """A call of the driver's library failed. The text names the function and the error."""


class Driver(Protocol):
    """Calls a driver's library.

    Attributes:
        running: name of the running function and its start in monotonic ns; None between calls.
    """

    running: tuple[str, int] | None

    def open(self) -> None:
        """Initialise the library, once."""

    def close(self) -> None:
        """Undo ``open``."""


class Reader(Protocol):
    """Reads one device once per tick."""

    def sample(self) -> GpuSample:
        """Read everything that is available now. Raises `DriverError` if nothing is."""

    def close(self) -> None:
        """Free what the reader holds."""


class _Outcome(NamedTuple):
    """The result of a tick: samples, or the reason why there are none. ``at_ns``: the start of the tick."""

    samples: tuple[GpuSample, ...]
    reason: str
    at_ns: int


class GpuSource(ABC):
    """The newest samples of this rank's GPUs.

    Args:
        driver: the library that is asked.
        devices: returns what torch reports to identify each device of the training, first the one on which the exposed
            wait is measured; nothing before they are known. The thread calls it once per tick. It must be quick and
            must not initialise CUDA.
        interval_seconds: time from the end of one tick to the next.
        deadline_seconds: a call that takes longer counts as hung.
        clock: monotonic nanoseconds.

    Attributes:
        library: the library's name in messages.

    Without a driver or a GPU the thread ends by itself, and a later ``read`` starts it again. While a call hangs, no
    second thread is started.
    """

    name: str
    library: ClassVar[str]

    def __init__(
        self,
        driver: Driver,
        devices: Callable[[], Sequence[str]],
        *,
        interval_seconds: float,
        deadline_seconds: float,
        clock: Callable[[], int],
    ) -> None:
        self._driver = driver
        self._devices = devices
        self._readers: list[Reader] = []  # only the source's thread uses this and the next one
        self._read_devices: tuple[str, ...] = ()
        self._interval = interval_seconds
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._fresh_seconds = max(_FRESH_INTERVALS * interval_seconds, _MIN_FRESH_SECONDS)
        self._closed = False
        self._wake = Wake()  # ends the wait for the next tick
        self._ticked = Wake()
        self._outcome = _Outcome((), f"{self.library} has given no reading yet", 0)
        self._errors: deque[GpuError] = deque(maxlen=MAX_ERRORS)
        self._cpu_seconds = 0.0
        self._thread: OwnThread | None = None
        try:
            self._ensure_thread()
        except CollectorError:
            pass  # the first read reports it

    def read(self) -> tuple[GpuSample, ...]:
        """The newest sample of each GPU. Never blocks.

        Raises:
            CollectorError: no driver, no GPU, this rank's GPU is not known yet, a call hangs, or a GPU is lost.
        """
        if self._closed:
            raise CollectorError(f"the {self.library} source is closed")
        now = self._clock()
        call = self._driver.running
        # The text stays the same while a call hangs, so that the log reports it once.
        if call is not None and now - call[1] > self._deadline_seconds * NS:
            late = f"has not returned for over {self._deadline_seconds:g} s ({call[0]})"
            raise CollectorError(f"an {self.library} call {late}")
        self._ensure_thread()
        samples, reason, at_ns = self._outcome
        if not samples:
            raise CollectorError(reason)
        if now - at_ns > self._fresh_seconds * NS:
            raise CollectorError(f"the newest {self.library} reading is over {self._fresh_seconds:g} s old")
        return samples

    def take_errors(self) -> list[GpuError]:
        """The errors of the GPUs since the last call."""
        return [self._errors.popleft() for _ in range(len(self._errors))]

    def look(self, seconds: float) -> None:
        """Have the next tick at once, and wait for its end, at most this long."""
        if self._thread is not None and self._thread.is_alive():
            self._ticked.clear()
            self._wake.set()
            self._ticked.wait(seconds)

    def close(self) -> None:
        """Stop the thread, which closes the library itself. Does not wait for it, because a call may hang."""
        self._closed = True
        self._wake.set()

    def cpu_seconds(self) -> float:
        """CPU seconds of the thread up to its last tick, including earlier threads of this source."""
        return self._cpu_seconds

    def _ensure_thread(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        thread = OwnThread(self._run, name=f"telemetry-{self.name}")
        try:
            thread.start()
        except RuntimeError as error:  # the thread limit is reached, or the interpreter is shutting down
            raise CollectorError(f"the {self.library} thread cannot be started: {error}") from error
        self._thread = thread

    # -- on the thread

    @abstractmethod
    def _reader(self, device: str | None) -> Reader:
        """Find a device. None: torch has not told it yet, so there must be only one that it can be."""

    def _sample(self) -> tuple[GpuSample, ...]:
        """Sample this rank's devices. Find them first if they are unknown or have changed."""
        devices = tuple(self._devices()) or self._read_devices
        if devices != self._read_devices or len(self._readers) < len(devices):  # one was not found the last time
            self._forget_devices()
        if not self._readers:
            for device in devices or (None,):
                self._readers.append(self._reader(device))
            self._read_devices = devices
        return tuple(reader.sample() for reader in self._readers)

    def _forget_devices(self) -> None:
        while self._readers:
            self._readers.pop().close()

    def _run(self) -> None:
        cpu_before = self._cpu_seconds
        wait: float | None = 0.0
        try:
            try:
                while wait is not None:
                    self._wake.wait(wait)
                    self._wake.clear()
                    if self._closed:
                        break
                    wait = self._tick(wait)
                    self._cpu_seconds = cpu_before + thread_time()
                    self._ticked.set()
            finally:
                self._shut_down()
        except BaseException as error:
            self._failed(f"the {self.library} thread ended: {type(error).__name__}: {error}")

    def _tick(self, waited: float) -> float | None:
        """Sample once. Returns the seconds until the next time; None if there is nothing to sample."""
        started = self._clock()
        try:
            self._driver.open()
            samples = self._sample()
        except NoGpuError as error:
            self._failed(str(error))
            return None
        except CollectorError as error:  # the device is not known yet, but the library works
            self._failed(str(error))
            return self._interval
        except Exception as error:
            self._failed(str(error) if isinstance(error, DriverError) else f"{type(error).__name__}: {error}")
            self._shut_down()
            return max(self._interval, min(2 * max(waited, self._interval), _MAX_RETRY_SECONDS))
        # Stamp the start: after a call that hung for a minute, the first readings are a minute old.
        self._outcome = _Outcome(samples, "", started)
        return self._interval

    def _shut_down(self) -> None:
        self._forget_devices()
        self._driver.close()

    def _failed(self, reason: str) -> None:
        self._outcome = _Outcome((), reason, self._clock())
