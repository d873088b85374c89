"""Reads this rank's GPUs: one reader, which goes through a vendor's table of readings on a thread of its own.

The tables are in `telemetry.sources.nvml` and `telemetry.sources.amd`. A wedged driver can block a call forever, so no
other thread may make one. The thread stores its newest samples, and ``read`` returns them. The two threads share a few
attributes, each replaced as a whole. There is no lock that could be held during a call or inherited by a forked child.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from telemetry.model.records import GpuSample
from telemetry.safety.threads import OwnThread, Wake
from telemetry.sources.collector import CollectorError
from telemetry.util.clock import NS, now_ns, thread_time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from telemetry.log.lines import GpuErrorLine

MAX_ERRORS: Final = 100
"""A GPU may report errors without end. The rest is read at the next tick."""

SELDOM_NS: Final = 10 * NS
"""Time between two readings of what seldom changes: its calls would double the cost of a tick."""

_FRESH_INTERVALS: Final = 3
_MIN_FRESH_SECONDS: Final = 1.0
"""A sample is fresh for a few intervals, and for at least one second: a busy machine can delay a thread that long."""

_MAX_RETRY_SECONDS: Final = 30.0
"""After a failure the driver is initialised again after 1, 2, 4, ... intervals, but after this time at the latest."""


class NoGpuError(CollectorError):
    """There is nothing to sample: no driver, no GPU, or none that this process may use."""


class DriverError(Exception):
    """A call of the driver's library failed. The text names the function and the error.

    Attributes:
        code: the library's return code; None if its binding has no such function, or failed itself.
        fatal: whether the GPU or the library is gone, so that no other call works either.
    """

    def __init__(self, function: str, code: int | None, text: str, *, fatal: bool = False) -> None:
        super().__init__(f"{function}: {text}")
        self.code = code
        self.fatal = fatal


# -- a row of a vendor's table -----------------------------------------------------------------------------------------

_HIGHEST: Final[Mapping[str, float]] = MappingProxyType(
    {
        "ratio": 1.01,  # counters are read one after the other, so a busy GPU may give slightly more than 1
        "bytes": float(1 << 44),
        "second": 1e14,
        "watts": 20e3,
        "joules": 1e13,
        "celsius": 200.0,
        "hertz": 1e10,
        "seconds": 1e9,
    }
)
"""What no GPU reaches, by the last word of the field's name. A partly failing driver gives a negative number read as
unsigned: 1.8e19 bytes used."""

_ALL_ONES: Final = frozenset({(1 << 32) - 1, (1 << 64) - 1})
"""How drivers say that there is no value."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Where a field of `GpuSample` comes from, and how it is converted.

    A field may have several rows. The first one that gives a value stays: a figure must not change its meaning in
    mid-run.

    Attributes:
        call: the function, for `Gpu.ask`. ``args``: its arguments. Rows with the same call share the answer.
        part: the attribute or key of the answer; None: all of it.
        unit: turns the driver's unit into that of the field. With a whole number the value is one, too. Ratios come in
            percent.
        lowest: what is below is no value, but comes from a sensor or counter that is not there.
        bits: the names of bits; the value is those that are set.
        source: what is told as the source of the value, in the fields that tell it.
        seldom: whether it is read every ten seconds only.
    """

    field: str
    call: str
    part: Any = None
    unit: float = 1
    lowest: float = 0
    args: tuple[Any, ...] = ()
    bits: Mapping[str, int] | None = None
    source: str | None = None
    seldom: bool = False

    def value(self, answer: Any) -> Any:
        """The field's value; None if the answer has none that a GPU can have."""
        if self.part is not None and answer is not None:
            answer = answer.get(self.part) if isinstance(answer, dict) else getattr(answer, self.part, None)
        if not isinstance(answer, (int, float)) or answer in _ALL_ONES:
            return None
        if self.bits is not None:
            return tuple(name for name, bit in self.bits.items() if int(answer) & bit)
        quantity = self.field.rpartition("_")[2]
        value = answer / 100 if quantity == "ratio" else answer * self.unit
        if not self.lowest <= value <= _HIGHEST.get(quantity, float("inf")):  # NaN compares false
            return None
        if quantity == "ratio":
            return min(value, 1.0)
        return round(value) if isinstance(self.unit, int) else value


# -- what each vendor has of its own -----------------------------------------------------------------------------------


class Driver(ABC):
    """A driver's library. It outlives losses of the driver: ``open`` and ``close`` take turns.

    Attributes:
        name: of the collector. ``library``: the library's name in messages.
        fatal: return codes after which the GPU or the library is gone.
        binding: the module whose functions are called.
        clock: monotonic nanoseconds.
        running: name of the running function and its start; None between calls.
        errors: the errors of the GPUs that nobody has taken yet.
    """

    name: ClassVar[str]
    library: ClassVar[str]
    fatal: ClassVar[frozenset[int]] = frozenset()

    def __init__(self, clock: Callable[[], int] = now_ns) -> None:
        self.binding: Any = None
        self.clock = clock
        self.running: tuple[str, int] | None = None
        self.errors: deque[GpuErrorLine] = deque(maxlen=MAX_ERRORS)

    @abstractmethod
    def identify(self, properties: Any) -> str:
        """What `torch.cuda.get_device_properties` tells of a device, by which ``find`` finds it.

        Raises:
            AttributeError: this version of torch does not tell it.
        """

    @abstractmethod
    def open(self) -> None:
        """Initialise the library, once.

        Raises:
            NoGpuError: there is no library or no driver on this machine.
            DriverError: the library does not initialise.
        """

    @abstractmethod
    def find(self, device: str | None) -> Gpu:
        """Find a device of this rank by what torch tells of it; None: before torch tells.

        Raises:
            NoGpuError: this process cannot use a GPU.
            CollectorError: it is not known yet which GPU it uses.
            DriverError: a call failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Undo ``open``."""

    def call(self, function: str, *args: Any) -> Any:
        """Run one function of the binding.

        Raises:
            DriverError: it failed, or this version of the binding does not have it.
        """
        run = getattr(self.binding, function, None)
        if run is None:
            raise DriverError(function, None, f"not in this version of the binding of {self.library}")
        self.running = (function, self.clock())
        try:
            return run(*args)
        except Exception as error:  # those of NVML have a `value`, those of AMD SMI have the other two
            code = getattr(error, "value", getattr(error, "err_code", None))
            text = getattr(error, "err_info", str(error))
            raise DriverError(function, code, text, fatal=code in self.fatal) from None
        finally:
            self.running = None


class Gpu(ABC):
    """One device of this rank, read once per tick. A reading that is not available is None by itself.

    Args:
        index: of the physical GPU on the machine.
        readings: the table, in the order of the calls.
    """

    def __init__(self, driver: Driver, index: int, uuid: str, name: str, readings: Sequence[Reading]) -> None:
        self._driver = driver
        self._index, self._uuid, self._name = index, uuid, name
        self._readings = readings
        self._chosen: dict[str, Reading] = {}  # the row of each field that has given a value
        self._values: dict[str, Any] = {}
        self._seldom_due_ns = 0

    @abstractmethod
    def ask(self, function: str, *args: Any) -> Any:
        """The answer of a function about this device.

        Raises:
            DriverError: the function failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the driver holds for this device."""

    def sample(self) -> GpuSample:
        """Read everything that is available now.

        Raises:
            DriverError: the GPU or the driver is gone, or no reading is available.
        """
        now, failures = self._driver.clock(), []
        with_seldom = now >= self._seldom_due_ns
        if with_seldom:
            self._seldom_due_ns = now + SELDOM_NS
        answers: dict[tuple[Any, ...], Any] = {}
        read: set[str] = set()
        for row in self._readings:
            if self._chosen.get(row.field, row) is not row or (row.seldom and not with_seldom):
                continue
            call = (row.call, *row.args)
            if call not in answers:
                try:
                    answers[call] = self.ask(*call)
                except DriverError as error:
                    if error.fatal:
                        raise
                    failures.append(error)
                    answers[call] = None
            value = self._values[row.field] = row.value(answers[call])
            read.add(row.field)
            if value is not None:
                self._chosen[row.field] = row
        if failures and all(self._values[field] is None for field in read):
            raise failures[0]
        return GpuSample(
            index=self._index,
            uuid=self._uuid,
            name=self._name,
            utilization_source=self._source("utilization_ratio"),
            sm_active_source=self._source("sm_active_ratio"),
            **self._values,
        )

    def _source(self, field: str) -> str | None:
        return None if self._values.get(field) is None else self._chosen[field].source


# -- the collector and its thread --------------------------------------------------------------------------------------


class _Outcome(NamedTuple):
    """The result of a tick: samples, or why there are none. ``at_ns``: the start of the tick."""

    samples: tuple[GpuSample, ...]
    failure: CollectorError | None
    at_ns: int


class GpuSource:
    """The newest samples of this rank's GPUs.

    Args:
        driver: reads them.
        devices: returns the `Driver.identify` of each device of the training, first the one on which the exposed wait
            is measured; nothing before they are known. The thread calls it once per tick. It must be quick and must not
            initialise CUDA.
        interval_seconds: time from the end of one tick to the next.
        deadline_seconds: a call that takes longer counts as hung.

    Without a driver or a GPU the thread ends by itself, and a later ``read`` starts it again. While a call hangs, no
    second thread is started.
    """

    def __init__(
        self,
        driver: Driver,
        devices: Callable[[], Sequence[str]],
        *,
        interval_seconds: float = 1.0,
        deadline_seconds: float = 5.0,
    ) -> None:
        self.name = driver.name
        self._driver = driver
        self._devices = devices
        self._gpus: list[Gpu] = []  # only the thread uses this and the next one
        self._read_devices: tuple[str, ...] = ()
        self._interval = interval_seconds
        self._deadline_seconds = deadline_seconds
        self._fresh_seconds = max(_FRESH_INTERVALS * interval_seconds, _MIN_FRESH_SECONDS)
        self._closed = False
        self._wake = Wake()  # ends the wait for the next tick
        self._ticked = Wake()
        self._outcome = _Outcome((), CollectorError(f"{driver.library} has given no reading yet"), 0)
        self._cpu_seconds = 0.0
        self._thread: OwnThread | None = None
        try:
            self._ensure_thread()
        except CollectorError:
            pass  # the first read reports it

    def read(self) -> tuple[GpuSample, ...]:
        """The newest sample of each GPU. Never blocks.

        Raises:
            NoGpuError: no driver, or no GPU.
            CollectorError: this rank's GPU is not known yet, a call hangs, or a GPU is lost.
        """
        library, call, now = self._driver.library, self._driver.running, self._driver.clock()
        if self._closed:
            raise CollectorError(f"the {library} source is closed")
        # The text stays the same while a call hangs, so that the log reports it once.
        if call is not None and now - call[1] > self._deadline_seconds * NS:
            late = f"has not returned for over {self._deadline_seconds:g} s ({call[0]})"
            raise CollectorError(f"an {library} call {late}")
        self._ensure_thread()
        samples, failure, at_ns = self._outcome
        if failure is not None:
            raise type(failure)(str(failure))
        if now - at_ns > self._fresh_seconds * NS:
            raise CollectorError(f"the newest {library} reading is over {self._fresh_seconds:g} s old")
        return samples

    def take_errors(self) -> list[GpuErrorLine]:
        """The errors of the GPUs since the last call."""
        errors = self._driver.errors
        return [errors.popleft() for _ in range(len(errors))]

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
            raise CollectorError(f"the {self._driver.library} thread cannot be started: {error}") from error
        self._thread = thread

    # -- on the thread

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
            self._failed(CollectorError(f"the {self._driver.library} thread ended: {type(error).__name__}: {error}"))

    def _tick(self, waited: float) -> float | None:
        """Sample once. Returns the seconds until the next time; None if there is nothing to sample."""
        started = self._driver.clock()
        try:
            self._driver.open()
            samples = self._sample()
        except CollectorError as error:
            self._failed(error)
            return None if isinstance(error, NoGpuError) else self._interval  # else only the device is not known yet
        except Exception as error:
            self._failed(
                CollectorError(str(error) if isinstance(error, DriverError) else f"{type(error).__name__}: {error}")
            )
            self._shut_down()
            return max(self._interval, min(2 * max(waited, self._interval), _MAX_RETRY_SECONDS))
        # Stamp the start: after a call that hung for a minute, the first readings are a minute old.
        self._outcome = _Outcome(samples, None, started)
        if self._driver.clock() - started > self._fresh_seconds * NS:
            self._forget_devices()  # what counts from sample to sample would be a mean over the time of the hang
        return self._interval

    def _sample(self) -> tuple[GpuSample, ...]:
        """Sample this rank's devices. Find them first if they are unknown or have changed."""
        devices = tuple(self._devices()) or self._read_devices
        if devices != self._read_devices or len(self._gpus) < len(devices):  # one was not found the last time
            self._forget_devices()
        if not self._gpus:
            for device in devices or (None,):
                self._gpus.append(self._driver.find(device))
            self._read_devices = devices
        return tuple(gpu.sample() for gpu in self._gpus)

    def _forget_devices(self) -> None:
        while self._gpus:
            self._gpus.pop().close()

    def _shut_down(self) -> None:
        self._forget_devices()
        self._driver.close()

    def _failed(self, failure: CollectorError) -> None:
        self._outcome = _Outcome((), failure, self._driver.clock())
