"""Samples this rank's GPUs through NVML, on their own thread."""

from __future__ import annotations

import codecs
import os
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from telemetry.records import CLEANED_UP, GPM, GpuError, GpuSample
from telemetry.sources.collector import CollectorError
from telemetry.sources.gpu import MAX_ERRORS, DriverError, GpuSource, NoGpuError
from telemetry.util.clock import NS, now_ns, sleep, unix_ns
from telemetry.util.threads import OwnThread

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

Handle = Any
"""An opaque ``nvmlDevice_t``."""

T = TypeVar("T")

SUCCESS: Final = 0
UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
DRIVER_NOT_LOADED: Final = 9
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
UNKNOWN_ERROR: Final = 999
"""NVML's return codes. They are part of its binary interface, so the numbers never change."""

_FATAL: Final = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, LIB_RM_VERSION_MISMATCH})
"""After one of these the GPU or the library is gone, so no other reading works either."""

_NOT_OFFERED: Final = frozenset({NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND})
"""Codes of a feature that will not become available later."""

_NO_SUCH_DEVICE: Final = frozenset({NOT_FOUND, INVALID_ARGUMENT})


class NvmlError(DriverError):
    """An NVML call failed. ``code`` is NVML's return code; the text names the function and the error."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function}: {text}")
        self.code = code


# -- calls of the NVML binding -----------------------------------------------------------------------------------------
# Only this place imports ``pynvml``, the binding of the package ``nvidia-ml-py``. The import happens on the thread that
# makes the driver, not on the sampling thread: a child forked during an import inherits the lock of that module without
# the thread that would release it, and hangs when it imports the module itself.


class NvmlDriver:
    """Calls the binding, converts its errors, and records which call is running.

    Attributes:
        binding: the ``pynvml`` module, or the error of its import.
        running: name of the running function and its start in monotonic ns; None between calls.
    """

    def __init__(self, clock: Callable[[], int] = now_ns) -> None:
        self.binding: Any = _binding()
        self.running: tuple[str, int] | None = None
        self._clock = clock
        self._initialised = False

    def open(self) -> None:
        """Load the library and initialise it, once.

        Raises:
            NoGpuError: there is no driver on this machine.
            NvmlError: the driver does not initialise.
        """
        if self._initialised:
            return
        if isinstance(self.binding, ImportError):
            raise NoGpuError(f"the package nvidia-ml-py is not installed: {self.binding}")
        try:
            self.call("nvmlInit")  # NVML counts these calls, so other users of NVML in this process are not affected
        except NvmlError as error:
            if error.code == LIBRARY_NOT_FOUND:
                raise NoGpuError("no NVIDIA driver: libnvidia-ml.so.1 is missing") from error
            if error.code == DRIVER_NOT_LOADED:
                raise NoGpuError("no NVIDIA driver: its kernel module is not loaded") from error
            raise
        self._initialised = True

    def close(self) -> None:
        """Undo ``open``."""
        if self._initialised:
            self._initialised = False
            try:
                self.call("nvmlShutdown")
            except NvmlError:
                return  # the driver is gone, so there is nothing to shut down

    def call(self, function: str, *args: Any) -> Any:
        """Run one function of the binding.

        Raises:
            NvmlError: the function failed, or this version of the binding does not have it.
        """
        run = getattr(self.binding, function, None)
        if run is None:
            raise NvmlError(function, FUNCTION_NOT_FOUND, "not in this version of nvidia-ml-py")
        self.running = (function, self._clock())
        try:
            return run(*args)
        except self.binding.NVMLError as error:
            raise NvmlError(function, error.value, str(error)) from None
        finally:
            self.running = None

    def offered(self, read: Callable[[], T], failures: list[NvmlError] | None = None) -> T | None:
        """Take a reading; None if the GPU or the driver does not offer it now. ``failures`` gets the reason.

        Raises:
            NvmlError: the GPU or the driver is gone.
        """
        try:
            return read()
        except NvmlError as error:
            if error.code in _FATAL:
                raise
            if failures is not None:
                failures.append(error)
            return None


def _binding() -> ModuleType | ImportError:
    codecs.lookup("ascii")  # the binding's calls would import this codec later
    try:
        import pynvml
    except ImportError as error:
        return error.with_traceback(None)
    return pynvml  # type: ignore[no-any-return]


# -- finds a GPU of this rank by UUID, never by a guessed index --------------------------------------------------------
# NVML sees every GPU of the machine or container. The rank mostly computes on one of them, or on a MIG device of one.
# Torch tells the UUID after CUDA is initialised. Before that, only a machine with one GPU, or a single UUID in
# ``CUDA_VISIBLE_DEVICES``, leaves no choice. An index there is not NVML's: by default CUDA puts the fastest GPU first.


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """A device that this rank computes on.

    Attributes:
        handle: the GPU, or the MIG device; memory is read from it.
        parent: the physical GPU; power, temperature and clocks are read from it. Equal to ``handle`` without MIG.
        gpu_instance: the id of the MIG GPU instance, None without MIG.
        index: NVML's index of the physical GPU.
    """

    handle: Handle
    parent: Handle
    gpu_instance: int | None
    index: int
    uuid: str
    name: str


def find_device(driver: NvmlDriver, uuid: str | None, environ: Mapping[str, str]) -> GpuDevice:
    """Find a device of this rank.

    Args:
        driver: an initialised NVML.
        uuid: what torch reports (with or without ``GPU-``, or ``MIG-…``); None before CUDA is initialised.
        environ: has ``CUDA_VISIBLE_DEVICES``.

    Raises:
        NoGpuError: this process cannot use a GPU.
        CollectorError: it is not known yet which GPU it uses.
        NvmlError: NVML failed.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    handle = _by_torch(driver, uuid) if uuid else _only_device(driver, visible)
    found = driver.call("nvmlDeviceGetUUID", handle)
    if not found.startswith("MIG-") and _is_partitioned(driver, handle):
        handle = _mig_device(driver, handle, visible)
        found = driver.call("nvmlDeviceGetUUID", handle)
    parent, gpu_instance = handle, None
    if found.startswith("MIG-"):
        parent = driver.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        gpu_instance = driver.call("nvmlDeviceGetGpuInstanceId", handle)
    index, name = driver.call("nvmlDeviceGetIndex", parent), driver.call("nvmlDeviceGetName", handle)
    return GpuDevice(handle, parent, gpu_instance, index, found, name)


def _by_torch(driver: NvmlDriver, uuid: str) -> Handle:
    """Find a device by torch's UUID. Torch leaves out the prefix for GPU or MIG devices, so both are tried."""
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names:
        handle = _by_uuid(driver, name)
        if handle is not None:
            return handle
    raise CollectorError(f"NVML knows no device with the UUID {uuid} that torch reports")


def _only_device(driver: NvmlDriver, visible: str | None) -> Handle:
    """Find the only device that CUDA can choose."""
    count = driver.call("nvmlDeviceGetCount")
    if not count:
        raise NoGpuError("the NVIDIA driver is there, but no GPU is")
    if visible is not None and visible.strip() in {"", "-1", "NoDevFiles"}:
        raise NoGpuError("no GPU is visible: CUDA_VISIBLE_DEVICES hides them all")
    named = _by_uuid(driver, visible) if visible and visible.startswith(("GPU-", "MIG-")) else None
    if named is not None:
        return named
    if count > 1:
        raise CollectorError("the GPU of this rank is not known before CUDA is initialised")
    return driver.call("nvmlDeviceGetHandleByIndex", 0)


def _mig_device(driver: NvmlDriver, gpu: Handle, visible: str | None) -> Handle:
    """Find the MIG device of a partitioned GPU. Some versions of CUDA report the GPU's UUID for its MIG device.

    Raises:
        NoGpuError: the GPU is partitioned, but has no MIG device.
        CollectorError: it has several, and it is not known which one this rank uses.
    """
    devices = list(_mig_devices(driver, gpu))
    if not devices:
        raise NoGpuError("no GPU is visible: MIG is enabled, but there is no MIG device")
    if len(devices) > 1:
        devices = [device for device in devices if driver.call("nvmlDeviceGetUUID", device) == visible]
    if not devices:
        raise CollectorError("the GPU of this rank is partitioned (MIG), and which MIG device it uses is not known")
    return devices[0]


def _by_uuid(driver: NvmlDriver, uuid: str) -> Handle | None:
    """Find the device with exactly this UUID, GPU or MIG; None without one."""
    try:
        return driver.call("nvmlDeviceGetHandleByUUID", uuid)
    except NvmlError as error:
        if error.code in _NO_SUCH_DEVICE:
            return None
        raise


def _is_partitioned(driver: NvmlDriver, gpu: Handle) -> bool:
    """Whether MIG is enabled. A GPU or driver without MIG answers with an error."""
    try:
        current, _pending = driver.call("nvmlDeviceGetMigMode", gpu)
    except NvmlError as error:
        if error.code in _NOT_OFFERED | {INVALID_ARGUMENT}:
            return False
        raise
    return bool(current)


def _mig_devices(driver: NvmlDriver, gpu: Handle) -> Iterator[Handle]:
    for index in range(driver.call("nvmlDeviceGetMaxMigDeviceCount", gpu)):
        try:
            handle = driver.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu, index)
        except NvmlError as error:
            if error.code in _NO_SUCH_DEVICE:  # some of the numbered slots may be empty
                continue
            raise
        yield handle


# -- how busy the SMs are ----------------------------------------------------------------------------------------------
# The usual "utilisation" is the share of time in which any kernel ran, even on one SM of a hundred. Hardware counters
# measure how busy the SMs are (GPM, Hopper and newer) or, less precisely, the driver does for each process.

_GPM_METRICS: Final = (2, 3, 5, 10, 1, 60, 61, 21, 20)
"""SM_UTIL, SM_OCCUPANCY, ANY_TENSOR_UTIL, DRAM_BW_UTIL, GRAPHICS_UTIL, NVLINK_TOTAL_RX and _TX, PCIE_RX and _TX per
second, in the order of `GpmValues`."""

_GPM_TRAFFIC: Final = frozenset({60, 61, 21, 20})
"""Metrics in MiB per second. The others are in percent."""

_GPM_SHORTEST_NS: Final = 100_000_000
"""NVML asks for two samples more than 100 ms apart."""

_PROCESS_WINDOW_US: Final = 1_500_000
"""How far back a process's samples are read. The slowest GPUs are sampled once per second. A shorter time would find no
sample, and a busy process would appear idle."""

_MAX_MEBIBYTES: Final = 1e8
"""No link of a GPU carries so much in a second."""

_HIGHEST_PERCENT: Final = 101.0
"""Counters are read one after the other, so a busy GPU may give slightly more than 100. Higher values are invalid."""


class GpmValues(NamedTuple):
    """Ratios (0 to 1) and bytes per second over one window; None if a counter has no value."""

    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    memory_bandwidth: float | None = None
    utilization: float | None = None
    nvlink_receive: int | None = None
    nvlink_transmit: int | None = None
    pcie_receive: int | None = None
    pcie_transmit: int | None = None


class GpmReader:
    """Reads the hardware counters of Hopper and newer (GPM, GPU performance monitoring).

    A reading is the difference of two samples. Two buffers are allocated once and swapped at each tick: one holds the
    previous sample, one the new one.
    """

    def __init__(
        self,
        driver: NvmlDriver,
        parent: Handle,
        gpu_instance: int | None = None,
        *,
        clock: Callable[[], int],
        window_ns: int,
    ) -> None:
        self._driver = driver
        self._parent = parent
        self._gpu_instance = gpu_instance
        self._clock = clock
        self._window_ns = window_ns
        self._buffers: list[Handle] = []
        self._sampled_ns: int | None = None
        self._values = GpmValues()
        self._request = driver.binding.c_nvmlGpmMetricsGet_t()
        self._request.version = driver.binding.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(_GPM_METRICS)
        for slot, metric in enumerate(_GPM_METRICS):
            self._request.metrics[slot].metricId = metric

    def read(self) -> GpmValues:
        """The values since the previous tick; all None on the first tick, and after a gap longer than the window.

        Raises:
            NvmlError: the counters cannot be sampled.
        """
        while len(self._buffers) < 2:
            self._buffers.append(self._driver.call("nvmlGpmSampleAlloc"))
        now, before = self._clock(), self._sampled_ns
        if before is not None and now - before <= _GPM_SHORTEST_NS:
            return self._values
        self._values = GpmValues()
        older, newer = self._buffers
        if self._gpu_instance is None:
            self._driver.call("nvmlGpmSampleGet", self._parent, newer)
        else:
            self._driver.call("nvmlGpmMigSampleGet", self._parent, self._gpu_instance, newer)
        self._buffers, self._sampled_ns = [newer, older], now
        if before is not None and now - before <= self._window_ns:
            self._request.sample1, self._request.sample2 = older, newer
            self._driver.call("nvmlGpmMetricsGet", self._request)
            # Only the requested entries, of hundreds, are filled in, each with its own return code.
            metrics = [self._request.metrics[slot] for slot in range(len(_GPM_METRICS))]
            self._values = GpmValues(*map(_gpm_value, metrics))
        return self._values

    def close(self) -> None:
        """Free the buffers."""
        while self._buffers:
            try:
                self._driver.call("nvmlGpmSampleFree", self._buffers.pop())
            except NvmlError:
                continue  # the driver is gone and has freed it


def _gpm_supported(driver: NvmlDriver, gpu: Handle) -> bool:
    """Whether a physical GPU has the hardware counters, and the driver can read them."""
    support = driver.offered(lambda: driver.call("nvmlGpmQueryDeviceSupport", gpu))
    return support is not None and bool(support.isSupportedDevice)


def _process_entries(driver: NvmlDriver, handle: Handle) -> list[Any]:
    """The newest utilisation of each active process. The driver samples it a few times per second.

    Raises:
        NvmlError: the driver does not offer it (MIG, some virtual GPUs).
    """
    since_us = unix_ns() // 1000 - _PROCESS_WINDOW_US  # the driver stamps with the wall clock
    try:
        return list(driver.call("nvmlDeviceGetProcessUtilization", handle, since_us))
    except NvmlError as error:
        # "Not found" if no process is active. The binding also raises on an empty answer, with the code for success.
        if error.code in {NOT_FOUND, SUCCESS}:
            return []
        raise


def _gpm_value(metric: Any) -> Any:
    if metric.nvmlReturn != SUCCESS:
        return None
    if metric.metricId in _GPM_TRAFFIC:
        return round(metric.value * (1 << 20)) if 0 <= metric.value <= _MAX_MEBIBYTES else None  # NaN compares false
    return _ratio(metric.value)


def _ratio(percent: float) -> float | None:
    """Convert 0..100 to 0..1; None for an invalid value (NaN, infinite, negative, far too high)."""
    value = float(percent)
    return min(value / 100, 1.0) if 0 <= value <= _HIGHEST_PERCENT else None  # NaN compares false


# -- errors that the driver reports (Xid) ------------------------------------------------------------------------------

_XID_CRITICAL_ERROR: Final = 8
"""The kind of the events."""

_NO_INSTANCE: Final = 0xFFFFFFFF
"""The GPU instance of an error of the whole GPU."""


@dataclass(slots=True)
class XidErrors:
    """The errors of one device since the agent started. ``unread``: gets each one. ``newest``: 0 without one."""

    unread: deque[GpuError]
    newest: int = 0
    total: int = 0

    def add(self, error: GpuError) -> None:
        """Count an error."""
        self.unread.append(error)
        self.total += 1
        if error.xid != CLEANED_UP or not self.newest:  # it must not hide the error that it follows
            self.newest = error.xid


class XidReader:
    """Reads the Xid errors of one device. The driver keeps them for this reader until they are read.

    Attributes:
        is_offered: whether the driver reports them.
    """

    def __init__(self, driver: NvmlDriver, device: GpuDevice) -> None:
        self._driver = driver
        self._device = device
        failures: list[NvmlError] = []
        self._events = events = driver.offered(lambda: driver.call("nvmlEventSetCreate"), failures)
        if events is not None:
            register = partial(driver.call, "nvmlDeviceRegisterEvents", device.parent, _XID_CRITICAL_ERROR, events)
            driver.offered(register, failures)
        self.is_offered = True
        if failures:
            self.close()

    def read(self) -> Iterator[GpuError]:
        """The errors since the last call. Does not wait for one.

        Raises:
            NvmlError: the GPU or the driver is gone.
        """
        device = self._device
        failures: list[NvmlError] = []
        for _ in range(MAX_ERRORS if self.is_offered else 0):
            event = self._driver.offered(partial(self._driver.call, "nvmlEventSetWait_v2", self._events, 0), failures)
            if event is None:  # a timeout, if there is no other error
                if failures[0].code in _NOT_OFFERED:
                    self.close()
                return
            if device.gpu_instance is None or event.gpuInstanceId in {device.gpu_instance, _NO_INSTANCE}:
                yield GpuError(device.index, device.uuid, int(event.eventData))

    def close(self) -> None:
        """Free the event set."""
        self.is_offered, events, self._events = False, self._events, None
        if events is not None:
            try:
                self._driver.call("nvmlEventSetFree", events)
            except NvmlError:
                return  # the driver is gone and has freed it


# -- the readings of one GPU -------------------------------------------------------------------------------------------
# If the GPU, the driver or a missing permission does not allow a reading, only that reading is None. NVML's units
# (percent, milliwatts, megahertz) are converted to ratios, watts and hertz.

THROTTLE_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "applications_clocks": 0x002,
        "sw_power_cap": 0x004,
        "hw_slowdown": 0x008,
        "sync_boost": 0x010,
        "sw_thermal": 0x020,
        "hw_thermal": 0x040,
        "hw_power_brake": 0x080,
        "display_clocks": 0x100,
    }
)
"""Every value of the ``reason`` label, with NVML's bit. An idle GPU's bit (0x001) is left out, because an idle GPU is
not throttled. Bits that later drivers add are left out until they have a name here."""

_PROCESS: Final = "process"
"""The source of SM activity without hardware counters: the share of time in which this process ran a kernel."""

_MAX_GPM_PAUSE: Final = 64
"""Counters that fail are tried again after 1, 2, 4, ... ticks, but after this many at the latest."""

_MAX_MEMORY_BYTES: Final = float(1 << 44)
_MAX_MILLIWATTS: Final = 20e6
_MAX_MILLIJOULES: Final = 1e16
_MAX_CELSIUS: Final = 200.0
_MAX_MEGAHERTZ: Final = 10_000.0
_MAX_REASONS: Final = float(1 << 32)
_MAX_COUNT: Final = float((1 << 32) - 2)
_MAX_NANOSECONDS: Final = 1e18
"""No GPU reaches these values. A partly failing driver gives all ones, or a negative number read as unsigned: 1.8e19
bytes used, 4.3e9 degrees."""

_SLOW_NS: Final = 10 * NS
"""Time between two readings of what seldom changes: its calls would double the cost of a tick."""


class _Field(NamedTuple):
    """A field of `GpuSample` that NVML has as a field value.

    Attributes:
        id: NVML's number of the field, a part of its binary interface.
        unit: the value is multiplied by it.
        most, least: a value outside of them is a failed reading.
    """

    name: str
    id: int
    unit: float = 1
    most: float = _MAX_COUNT
    least: float = 0


_FIELDS: Final = (
    _Field("memory_temperature_celsius", 82, most=_MAX_CELSIUS, least=1),  # 0 comes from a GPU without the sensor
    _Field("power_violation_seconds", 74, unit=1e-9, most=_MAX_NANOSECONDS),
    _Field("thermal_violation_seconds", 75, unit=1e-9, most=_MAX_NANOSECONDS),
    _Field("ecc_corrected_errors_total", 3),
    _Field("ecc_uncorrected_errors_total", 4),
    _Field("corrected_remapped_rows_total", 142),
    _Field("uncorrected_remapped_rows_total", 143),
    _Field("row_remap_pending", 144, most=1),
    _Field("row_remap_failure", 145, most=1),
    _Field("pcie_replays_total", 94),
)
"""All are read in one call."""

_VALUE_TYPES: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Where a field value is, by its type."""


@dataclass(slots=True)
class ChosenSources:
    """The sources of a device's figures that have given a value. They stay: a figure must not change its meaning."""

    sm_active: str | None = None
    utilization: str | None = None


class DeviceReader:
    """Reads one device once per tick. Holds GPM sample buffers and an event set, which ``close`` frees.

    Args:
        driver: an initialised NVML.
        device: the device to read.
        errors: gets the errors that the driver reports of it.
        chosen: the sources that earlier readers of the device have found.
        clock: monotonic nanoseconds.
        window_ns: hardware counters that are averaged over a longer time do not count as current.
    """

    def __init__(
        self,
        driver: NvmlDriver,
        device: GpuDevice,
        errors: XidErrors,
        chosen: ChosenSources,
        *,
        clock: Callable[[], int],
        window_ns: int,
    ) -> None:
        self.device = device
        self._driver = driver
        self._errors = errors
        self._failures: list[NvmlError] = []
        self._gpm: GpmReader | None = None
        self._chosen = chosen
        if chosen.sm_active != _PROCESS and _gpm_supported(driver, device.parent):
            self._gpm = GpmReader(driver, device.parent, device.gpu_instance, clock=clock, window_ns=window_ns)
        self._gpm_rests = 0  # so many ticks without the counters are left
        self._gpm_pause = 1
        self._process_seen = False
        self._clock = clock
        self._xids = XidReader(driver, device)
        self._clock_max: float | None = None
        self._slow: dict[str, Any] = {}
        self._slow_due_ns = 0

    def sample(self) -> GpuSample:
        """Read everything that is available now.

        Raises:
            NvmlError: the GPU or the driver is gone, or no reading is available.
        """
        self._failures.clear()
        device, binding = self.device, self._driver.binding
        self._read_errors()  # first: what it has read is kept if a later call fails
        gpm = self._counters()
        active, source = gpm.sm_active, GPM
        if self._gpm is None and self._chosen.sm_active != GPM:
            active, source = self._optional(self._process), _PROCESS
        if active is not None:
            self._chosen.sm_active = source
        used, total = self._optional(self._memory) or (None, None)
        if self._clock_max is None:
            self._clock_max = self._number("nvmlDeviceGetMaxClockInfo", 1e6, _MAX_MEGAHERTZ, binding.NVML_CLOCK_SM)
        utilization = self._utilization(gpm.utilization)
        if self._clock() >= self._slow_due_ns:
            self._slow, self._slow_due_ns = self._seldom(), self._clock() + _SLOW_NS
        energy = None  # a MIG device has no counter of its own
        if device.gpu_instance is None:
            energy = self._number("nvmlDeviceGetTotalEnergyConsumption", 1e-3, _MAX_MILLIJOULES)
        # The first is in every current driver, but deprecated. Its replacement is only in recent drivers.
        temperature = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
        sample = GpuSample(
            index=device.index,
            uuid=device.uuid,
            name=device.name,
            utilization_ratio=utilization,
            utilization_source=None if utilization is None else self._chosen.utilization,
            sm_active_ratio=active,
            sm_active_source=None if active is None else source,
            sm_occupancy_ratio=gpm.sm_occupancy,
            tensor_active_ratio=gpm.tensor_active,
            memory_bandwidth_ratio=gpm.memory_bandwidth,
            nvlink_receive_bytes_per_second=gpm.nvlink_receive,
            nvlink_transmit_bytes_per_second=gpm.nvlink_transmit,
            pcie_receive_bytes_per_second=gpm.pcie_receive,
            pcie_transmit_bytes_per_second=gpm.pcie_transmit,
            memory_used_bytes=used,
            memory_total_bytes=total,
            power_watts=self._number("nvmlDeviceGetPowerUsage", 1e-3, _MAX_MILLIWATTS),
            energy_joules=energy or None,  # 0 comes from a counter that does not count
            temperature_celsius=self._number(temperature, 1, _MAX_CELSIUS, binding.NVML_TEMPERATURE_GPU),
            sm_clock_hertz=self._number("nvmlDeviceGetClockInfo", 1e6, _MAX_MEGAHERTZ, binding.NVML_CLOCK_SM),
            sm_clock_max_hertz=self._clock_max,
            throttled=self._throttled(),
            xid=self._errors.newest if self._xids.is_offered else None,
            xid_errors_total=self._errors.total if self._xids.is_offered else None,
            **self._slow,
        )
        measured = (
            sample.utilization_ratio, sample.sm_active_ratio, sample.sm_occupancy_ratio, sample.tensor_active_ratio,
            sample.memory_bandwidth_ratio, sample.memory_used_bytes, sample.power_watts, sample.temperature_celsius,
            sample.sm_clock_hertz, sample.throttled,
        )  # fmt: skip
        if self._failures and all(reading is None for reading in measured):
            raise self._failures[0]
        return sample

    def close(self) -> None:
        """Free the GPM buffers and the event set. The error that has taken the GPU along may be in it."""
        try:
            self._read_errors()
        except NvmlError:
            pass  # the driver is gone
        self._end_counters()
        self._xids.close()

    def _read_errors(self) -> None:
        for error in self._xids.read():
            self._errors.add(error)

    def _end_counters(self) -> None:
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None

    def _counters(self) -> GpmValues:
        """The hardware counters.

        A virtual GPU, or one whose counters need a permission, may refuse them at once or after some samples
        (NVIDIA/DCGM#214). If there was no value yet, the source of SM activity changes. Else it stays, and is tried
        again later: a figure must not change its meaning in mid-run.
        """
        if self._gpm is None:
            return GpmValues()
        if self._gpm_rests:
            self._gpm_rests -= 1
            return GpmValues()
        values = self._optional(self._gpm.read)
        if values is not None:
            self._gpm_pause = 1
            return values
        if self._failures[-1].code in _NOT_OFFERED and self._chosen.sm_active != GPM:
            self._end_counters()
        else:
            self._gpm_rests, self._gpm_pause = self._gpm_pause, min(2 * self._gpm_pause, _MAX_GPM_PAUSE)
        return GpmValues()

    def _optional(self, read: Callable[[], T]) -> T | None:
        return self._driver.offered(read, self._failures)

    def _number(self, functions: str | tuple[str, str], unit: float, most: float, *args: Any) -> float | None:
        """A number of the physical GPU, times ``unit``; None if it is not available or above ``most``.

        NVML renames functions over time: the second one is for drivers that lack the first.
        """
        first, *second = (functions,) if isinstance(functions, str) else functions

        def read() -> float:
            try:
                value = self._driver.call(first, self.device.parent, *args)
            except NvmlError as error:
                if error.code != FUNCTION_NOT_FOUND or not second:
                    raise
                value = self._driver.call(second[0], self.device.parent, *args)
            return _plausible(first, value, most) * unit

        return self._optional(read)

    def _throttled(self) -> tuple[str, ...] | None:
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        bits = self._number(names, 1, _MAX_REASONS)
        return None if bits is None else tuple(reason for reason, bit in THROTTLE_BITS.items() if int(bits) & bit)

    def _utilization(self, by_counters: float | None) -> float | None:
        """The share of time any kernel ran.

        NVML does not offer it for a MIG device, but the hardware counters do. The source that has given the first value
        stays: a figure must not change its meaning in mid-run.
        """
        if self._chosen.utilization != GPM:
            before = len(self._failures)
            rates = self._optional(lambda: self._driver.call("nvmlDeviceGetUtilizationRates", self.device.handle))
            if rates is not None:
                self._chosen.utilization = "nvml"
                return _ratio(rates.gpu)
            if self._chosen.utilization or self._failures[before].code not in _NOT_OFFERED or by_counters is None:
                return None
            self._chosen.utilization = GPM
        return by_counters

    def _seldom(self) -> dict[str, Any]:
        """The fields of the sample that are read seldom. What this GPU does not offer is None."""
        binding, parent = self._driver.binding, self.device.parent
        ids = [field.id for field in _FIELDS]
        values = self._optional(lambda: self._driver.call("nvmlDeviceGetFieldValues", parent, ids)) or ()
        return {
            "power_limit_watts": self._number("nvmlDeviceGetEnforcedPowerLimit", 1e-3, _MAX_MILLIWATTS),
            "memory_clock_hertz": self._number("nvmlDeviceGetClockInfo", 1e6, _MAX_MEGAHERTZ, binding.NVML_CLOCK_MEM),
            **{field.name: self._field(field, value) for field, value in zip(_FIELDS, values, strict=False)},
        }

    def _field(self, field: _Field, entry: Any) -> float | None:
        if entry.nvmlReturn != SUCCESS or not 0 <= entry.valueType < len(_VALUE_TYPES):
            return None
        value: float = getattr(entry.value, _VALUE_TYPES[entry.valueType])
        return value * field.unit if field.least <= value <= field.most else None

    def _process(self) -> float | None:
        """The share of time this process ran a kernel; 0.0 when it is known to be idle.

        The driver lists only active processes. If this process is not listed, it is idle, but only if it has been
        listed before. Otherwise the driver may know it by another pid (in a container it may report the pids of the
        host), and there is no reading.
        """
        ours = [entry for entry in _process_entries(self._driver, self.device.handle) if entry.pid == os.getpid()]
        if not ours:
            return 0.0 if self._process_seen else None
        self._process_seen = True
        return _ratio(max(ours, key=lambda entry: int(entry.timeStamp)).smUtil)

    def _memory(self) -> tuple[int, int]:
        """Bytes used and total.

        Version 1 counts the memory that the driver reserves (hundreds of MiB) as used. Version 2 reports it
        separately, so version 1 is read only if the driver is too old for version 2.
        """
        handle = self.device.handle
        try:
            memory = self._driver.call("nvmlDeviceGetMemoryInfo", handle, self._driver.binding.nvmlMemory_v2)
        except NvmlError as error:
            if error.code not in _NOT_OFFERED:
                raise
            memory = self._driver.call("nvmlDeviceGetMemoryInfo", handle)
        total = _plausible("memory total", memory.total, _MAX_MEMORY_BYTES)
        return int(_plausible("memory used", memory.used, total)), int(total)


def _plausible(reading: str, value: float, most: float) -> float:
    """Convert a value of the driver to a number.

    Raises:
        NvmlError: it is negative, above ``most`` or no number.
    """
    number = float(value)
    if not 0 <= number <= most:  # NaN compares false
        raise NvmlError(reading, UNKNOWN_ERROR, f"the driver gives {value}, which is not possible")
    return number


# -- the collector -----------------------------------------------------------------------------------------------------


class NvmlSource(GpuSource):
    """The newest samples of this rank's GPUs.

    Args:
        uuids: returns the UUIDs that torch reports; see `GpuSource`, also for the other arguments.
        environ: has ``CUDA_VISIBLE_DEVICES``, for the time before CUDA is initialised.
    """

    name = "nvml"
    library = "NVML"
    _driver: NvmlDriver

    def __init__(
        self,
        uuids: Callable[[], Sequence[str]],
        *,
        interval_seconds: float = 1.0,
        deadline_seconds: float = 5.0,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], int] = now_ns,
    ) -> None:
        self._environ = environ
        self._known: dict[str, tuple[XidErrors, ChosenSources]] = {}  # by UUID; only the source's thread uses it
        super().__init__(
            NvmlDriver(clock), uuids, interval_seconds=interval_seconds, deadline_seconds=deadline_seconds, clock=clock
        )

    def _reader(self, device: str | None) -> DeviceReader:
        found, window_ns = find_device(self._driver, device, self._environ), int(self._fresh_seconds * NS)
        known = self._known.setdefault(found.uuid, (XidErrors(self._errors), ChosenSources()))
        return DeviceReader(self._driver, found, *known, clock=self._clock, window_ns=window_ns)


# -- what NVML reports about each GPU of the machine, for ``telemetry doctor`` -----------------------------------------


@dataclass(slots=True)
class GpuSummary:
    """One GPU of this machine.

    Attributes:
        driver: version of the driver.
        sm_source: source of SM activity: ``gpm``, ``process`` or None.
        partitioned: whether MIG is enabled.
        error: why the rest is missing; None if it is not.
    """

    index: int
    driver: str
    uuid: str = ""
    name: str = ""
    sm_source: str | None = None
    partitioned: bool = False
    error: str | None = None


def device_summary(timeout_seconds: float = 5.0) -> list[GpuSummary]:
    """Every GPU of this machine.

    Raises:
        CollectorError: there is no driver, or it has not answered within ``timeout_seconds``.
    """
    driver = NvmlDriver()
    answers: list[list[GpuSummary] | Exception] = []

    def ask() -> None:
        try:
            driver.open()
            version = driver.call("nvmlSystemGetDriverVersion")
            answers.append([_summary(driver, i, version) for i in range(driver.call("nvmlDeviceGetCount"))])
        except Exception as error:
            answers.append(error)
        driver.close()

    thread = OwnThread(ask, name="telemetry-nvml-summary")
    thread.start()
    thread.join(timeout_seconds)
    if not answers:
        function = driver.running[0] if driver.running else "loading the library"
        raise CollectorError(f"NVML has not answered for {timeout_seconds:g} s ({function})")
    answer = answers[0]
    if isinstance(answer, Exception):
        raise CollectorError(str(answer)) from answer
    return answer


def _summary(driver: NvmlDriver, index: int, version: str) -> GpuSummary:
    """One GPU. A lost GPU must not hide the others."""
    found = GpuSummary(index, version)
    try:
        gpu = driver.call("nvmlDeviceGetHandleByIndex", index)
        found.uuid, found.name = driver.call("nvmlDeviceGetUUID", gpu), driver.call("nvmlDeviceGetName", gpu)
        found.partitioned = _is_partitioned(driver, gpu)
        instance = None
        if found.partitioned:  # one of its MIG devices stands for all
            part = next(_mig_devices(driver, gpu), None)
            instance = None if part is None else driver.call("nvmlDeviceGetGpuInstanceId", part)
        if _gpm_supported(driver, gpu) and _gpm_readable(driver, gpu, instance):
            found.sm_source = GPM
        elif driver.offered(lambda: _process_entries(driver, gpu)) is not None:
            found.sm_source = _PROCESS
    except NvmlError as error:
        found.error = str(error)
    return found


def _gpm_readable(driver: NvmlDriver, gpu: Handle, instance: int | None) -> bool:
    """Whether this process may read the counters. Only a real reading, of two samples, shows it."""
    reader = GpmReader(driver, gpu, instance, clock=now_ns, window_ns=10 * NS)
    try:
        driver.offered(reader.read)
        sleep(1.1 * _GPM_SHORTEST_NS / NS)
        values = driver.offered(reader.read)
        return values is not None and values.sm_active is not None
    finally:
        reader.close()
