"""NVIDIA's GPUs through NVML: the table of readings, and how to find a device."""

from __future__ import annotations

import codecs
import os
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from telemetry.log.lines import GpuErrorLine
from telemetry.model.records import CLEANED_UP, GPM, XIDS
from telemetry.sources.collector import CollectorError
from telemetry.sources.gpu import MAX_ERRORS, SELDOM_NS, Driver, DriverError, Gpu, NoGpuError, Reading
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

try:
    import pynvml

    _import_error = ""
except ImportError as error:
    pynvml, _import_error = None, str(error)
codecs.lookup("ascii")  # the binding's calls would import this codec later

Handle = Any
"""An opaque ``nvmlDevice_t``."""

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
"""NVML's return codes. They are part of its binary interface, so the numbers never change."""

_NOT_OFFERED: Final = frozenset({None, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND})
"""Codes of what is not there, and will not be later. None: the binding has no such function."""

# -- the table of readings ---------------------------------------------------------------------------------------------

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

_XIDS: Final = "xids"
_COUNTERS: Final = "counters"
_FIELD_VALUES: Final = "nvmlDeviceGetFieldValues"
"""Calls that are more than one of NVML's functions, see `NvmlGpu.ask`."""

_OF_MIG_DEVICES: Final = frozenset({"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo"})
"""Functions that are asked about a MIG device itself. All others know only its physical GPU."""

_MIB: Final = 1 << 20


def _readings(nvml: Any, *, is_mig: bool) -> tuple[Reading, ...]:
    """The table, with numbers of the binding ``nvml``. NVML has percent, milliwatts, megahertz, MiB and nanoseconds."""
    fields = _FIELD_VALUES
    sm_clock, memory_clock, v2 = (nvml.NVML_CLOCK_SM,), (nvml.NVML_CLOCK_MEM,), (nvml.nvmlMemory_v2,)
    gpu = (nvml.NVML_TEMPERATURE_GPU,)
    rows = [
        # first: what it has read is kept if a later call fails
        Reading("xid", _XIDS, "newest"),
        Reading("xid_errors_total", _XIDS, "total"),
        # hardware counters (GPM): Hopper and newer
        Reading("sm_active_ratio", _COUNTERS, nvml.NVML_GPM_METRIC_SM_UTIL, source=GPM),
        Reading("sm_occupancy_ratio", _COUNTERS, nvml.NVML_GPM_METRIC_SM_OCCUPANCY),
        Reading("tensor_active_ratio", _COUNTERS, nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL),
        Reading("memory_bandwidth_ratio", _COUNTERS, nvml.NVML_GPM_METRIC_DRAM_BW_UTIL),
        Reading("nvlink_receive_bytes_per_second", _COUNTERS, nvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, _MIB),
        Reading("nvlink_transmit_bytes_per_second", _COUNTERS, nvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, _MIB),
        Reading("pcie_receive_bytes_per_second", _COUNTERS, nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, _MIB),
        Reading("pcie_transmit_bytes_per_second", _COUNTERS, nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, _MIB),
        # NVML has no rates of a MIG device, but its counters tell the same: the share of time in which any kernel ran
        Reading("utilization_ratio", "nvmlDeviceGetUtilizationRates", "gpu", source="nvml"),
        Reading("utilization_ratio", _COUNTERS, nvml.NVML_GPM_METRIC_GRAPHICS_UTIL, source=GPM),
        # before driver 510 only the first version, which counts the memory that the driver reserves as used
        Reading("memory_used_bytes", "nvmlDeviceGetMemoryInfo", "used", args=v2),
        Reading("memory_total_bytes", "nvmlDeviceGetMemoryInfo", "total", args=v2),
        Reading("memory_used_bytes", "nvmlDeviceGetMemoryInfo", "used"),
        Reading("memory_total_bytes", "nvmlDeviceGetMemoryInfo", "total"),
        Reading("power_watts", "nvmlDeviceGetPowerUsage", unit=1e-3),
        # every current driver has the first, which is deprecated; recent ones have the second
        Reading("temperature_celsius", "nvmlDeviceGetTemperature", args=gpu, unit=1.0),
        Reading("temperature_celsius", "nvmlDeviceGetTemperatureV", args=gpu, unit=1.0),
        Reading("sm_clock_hertz", "nvmlDeviceGetClockInfo", args=sm_clock, unit=1e6),
        # the older name: before driver 535
        Reading("throttled", "nvmlDeviceGetCurrentClocksEventReasons", bits=THROTTLE_BITS),
        Reading("throttled", "nvmlDeviceGetCurrentClocksThrottleReasons", bits=THROTTLE_BITS),
        # what seldom changes
        Reading("sm_clock_max_hertz", "nvmlDeviceGetMaxClockInfo", args=sm_clock, unit=1e6, seldom=True),
        Reading("memory_clock_hertz", "nvmlDeviceGetClockInfo", args=memory_clock, unit=1e6, seldom=True),
        Reading("power_limit_watts", "nvmlDeviceGetEnforcedPowerLimit", unit=1e-3, seldom=True),
        # a GPU without the sensor has 0 degrees
        Reading("memory_temperature_celsius", fields, nvml.NVML_FI_DEV_MEMORY_TEMP, 1.0, lowest=1, seldom=True),
        Reading("power_violation_seconds", fields, nvml.NVML_FI_DEV_PERF_POLICY_POWER, 1e-9, seldom=True),
        Reading("thermal_violation_seconds", fields, nvml.NVML_FI_DEV_PERF_POLICY_THERMAL, 1e-9, seldom=True),
        Reading("ecc_corrected_errors_total", fields, nvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, seldom=True),
        Reading("ecc_uncorrected_errors_total", fields, nvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, seldom=True),
        # Ampere and newer
        Reading("corrected_remapped_rows_total", fields, nvml.NVML_FI_DEV_REMAPPED_COR, seldom=True),
        Reading("uncorrected_remapped_rows_total", fields, nvml.NVML_FI_DEV_REMAPPED_UNC, seldom=True),
        Reading("row_remap_pending", fields, nvml.NVML_FI_DEV_REMAPPED_PENDING, seldom=True),
        Reading("row_remap_failure", fields, nvml.NVML_FI_DEV_REMAPPED_FAILURE, seldom=True),
        Reading("pcie_replays_total", fields, nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, seldom=True),
    ]
    if not is_mig:  # Volta and newer; 0 comes from a counter that does not count
        rows.append(Reading("energy_joules", "nvmlDeviceGetTotalEnergyConsumption", unit=1e-3, lowest=1e-3))
    return tuple(rows)


# -- the library, and this rank's device in it -------------------------------------------------------------------------
# NVML sees every GPU of the machine or container. The rank mostly computes on one of them, or on a MIG device of one.
# Torch tells the UUID after CUDA is initialised. Before that, only a machine with one GPU, or a single UUID in
# ``CUDA_VISIBLE_DEVICES``, leaves no choice. An index there is not NVML's: by default CUDA puts the fastest GPU first.


@dataclass(frozen=True, slots=True)
class _Device:
    """A GPU or a MIG device.

    Attributes:
        parent: the physical GPU; equal to ``handle`` without MIG. ``parent_uuid``: its UUID.
        gpu_instance: the id of the MIG GPU instance, None without MIG.
        index: NVML's index of the physical GPU.
    """

    handle: Handle
    parent: Handle
    gpu_instance: int | None
    index: int
    uuid: str
    parent_uuid: str
    name: str

    def is_named(self, uuid: str | None) -> bool:
        """Whether this is its UUID, or its GPU's. Torch leaves out the prefix, and has either one for a MIG device."""
        return uuid in {self.uuid, self.parent_uuid, self.uuid[4:], self.parent_uuid[4:]}


class Nvml(Driver):
    """NVML, through the binding of the package ``nvidia-ml-py``.

    Args:
        environ: has ``CUDA_VISIBLE_DEVICES``, for the time before CUDA is initialised.

    Attributes:
        version: of the driver. ``unreadable``: the error of each GPU that cannot be read, by its index. ``survey`` sets
            both.
    """

    name = "nvml"
    library = "NVML"
    fatal = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, LIB_RM_VERSION_MISMATCH})

    def __init__(self, environ: Mapping[str, str] = os.environ, clock: Callable[[], int] = now_ns) -> None:
        super().__init__(clock)
        self.binding = pynvml
        self.version = ""
        self.unreadable: dict[int, DriverError] = {}
        self._environ = environ
        self._xids: dict[str, _Xids] = {}  # by UUID
        self._initialised = False

    def identify(self, properties: Any) -> str:
        """The UUID, with or without its prefix."""
        return str(properties.uuid)

    def open(self) -> None:
        """See `Driver.open`. NVML counts these calls, so other users of it in this process are not affected."""
        if self._initialised:
            return
        if self.binding is None:
            raise NoGpuError(f"the package nvidia-ml-py is not installed: {_import_error}")
        try:
            self.call("nvmlInit")
        except DriverError as error:
            if error.code == LIBRARY_NOT_FOUND:
                raise NoGpuError("no NVIDIA driver: libnvidia-ml.so.1 is missing") from error
            if error.code == DRIVER_NOT_LOADED:
                raise NoGpuError("no NVIDIA driver: its kernel module is not loaded") from error
            raise
        self._initialised = True

    def close(self) -> None:
        """See `Driver.close`."""
        if self._initialised:
            self._initialised = False
            self.attempt("nvmlShutdown")

    def attempt(self, function: str, *args: Any) -> None:
        """Run a function that gives back what NVML holds. It fails if the driver is gone, which has done the same."""
        try:
            self.call(function, *args)
        except DriverError:
            return

    def survey(self) -> list[str]:
        """The UUIDs of all devices of the machine."""
        self.version = self.call("nvmlSystemGetDriverVersion")
        return [device.uuid for device in self._devices()]

    def find(self, device: str | None) -> NvmlGpu:
        """See `Driver.find`."""
        visible = self._environ.get("CUDA_VISIBLE_DEVICES")
        if device is None and visible is not None and visible.strip() in {"", "-1", "NoDevFiles"}:
            raise NoGpuError("no GPU is visible: CUDA_VISIBLE_DEVICES hides them all")
        unknown = CollectorError("the GPU of this rank is not known before CUDA is initialised")
        is_named = device is not None or (visible or "").startswith(("GPU-", "MIG-"))
        if not is_named and self.call("nvmlDeviceGetCount") > 1:  # a script that uses no GPU costs one call a tick
            raise unknown
        devices = self._devices()
        found = [each for each in devices if each.is_named(device or visible)]
        if len(found) > 1:  # MIG devices of the GPU that torch tells
            found = [each for each in found if each.uuid == visible]
            if len(found) != 1:
                raise CollectorError("the GPU of this rank is partitioned (MIG), and its MIG device is not known")
        if not found and self.unreadable and (device or not devices):
            raise next(iter(self.unreadable.values()))
        if not found and device:
            raise CollectorError(f"NVML knows no device with the UUID {device} that torch reports")
        if not found and len(devices) + len(self.unreadable) > 1:
            raise unknown
        if not devices:
            raise NoGpuError("the NVIDIA driver is there, but no GPU or MIG device is")
        chosen = (found or devices)[0]
        return NvmlGpu(self, chosen, self._xids.setdefault(chosen.uuid, _Xids(self)))

    def _devices(self) -> list[_Device]:
        """Every GPU of the machine, or its MIG devices if it is partitioned. One that is lost does not hide others."""
        found: list[_Device] = []
        self.unreadable = {}
        for index in range(self.call("nvmlDeviceGetCount")):
            try:
                found += list(self._devices_of(index))
            except DriverError as error:
                self.unreadable[index] = error
        return found

    def _devices_of(self, index: int) -> Iterator[_Device]:
        gpu = self.call("nvmlDeviceGetHandleByIndex", index)
        uuid = self.call("nvmlDeviceGetUUID", gpu)
        mig_mode = self._offered("nvmlDeviceGetMigMode", gpu)
        if mig_mode is None or not mig_mode[0]:  # now, and after the next reset
            yield _Device(gpu, gpu, None, index, uuid, uuid, self.call("nvmlDeviceGetName", gpu))
            return
        for slot in range(self.call("nvmlDeviceGetMaxMigDeviceCount", gpu)):
            part = self._offered("nvmlDeviceGetMigDeviceHandleByIndex", gpu, slot)
            if part is not None:  # some of the slots may be empty
                instance, name = self.call("nvmlDeviceGetGpuInstanceId", part), self.call("nvmlDeviceGetName", part)
                yield _Device(part, gpu, instance, index, self.call("nvmlDeviceGetUUID", part), uuid, name)

    def _offered(self, function: str, *args: Any) -> Any:
        """What a function returns; None if it has nothing to return."""
        try:
            return self.call(function, *args)
        except DriverError as error:
            if error.code not in _NOT_OFFERED:
                raise
            return None


class NvmlGpu(Gpu):
    """A GPU or a MIG device. Holds buffers of counters and a set of events, which ``close`` frees."""

    def __init__(self, driver: Nvml, device: _Device, xids: _Xids) -> None:
        readings = _readings(driver.binding, is_mig=device.gpu_instance is not None)
        super().__init__(driver, device.index, device.uuid, device.name, readings)
        self._device = device
        self._field_ids = [row.part for row in readings if row.call == _FIELD_VALUES]
        self._counters = _Counters(driver, device, [row.part for row in readings if row.call == _COUNTERS])
        self._xids = xids
        xids.open(device)

    def ask(self, function: str, *args: Any) -> Any:
        """See `Gpu.ask`; also the counters, the Xid errors, and all field values of the table at once."""
        if function == _XIDS:
            return self._xids.read()
        if function == _COUNTERS:
            return self._counters.read()
        if function == _FIELD_VALUES:
            entries = self._driver.call(function, self._device.parent, self._field_ids)
            return {
                entry.fieldId: getattr(entry.value, _VALUE_TYPES[entry.valueType])
                for entry in entries
                if entry.nvmlReturn == SUCCESS and entry.valueType < len(_VALUE_TYPES)
            }
        handle = self._device.handle if function in _OF_MIG_DEVICES else self._device.parent
        return self._driver.call(function, handle, *args)

    def close(self) -> None:
        """See `Gpu.close`."""
        self._xids.close()
        self._counters.close()


_VALUE_TYPES: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Where a field value is, by its type."""

# -- how busy the SMs are ----------------------------------------------------------------------------------------------

_GPM_SHORTEST_NS: Final = 100_000_000
"""NVML asks for two samples more than 100 ms apart."""


class _Counters:
    """The hardware counters of Hopper and newer (GPM, GPU performance monitoring).

    The usual "utilisation" is the share of time in which any kernel ran, even on one SM of a hundred; they tell more. A
    reading is the difference of two samples. Two buffers are allocated once and swapped: one holds the previous sample,
    one the new one.

    Args:
        metrics: the numbers of those that are read.
    """

    def __init__(self, driver: Nvml, device: _Device, metrics: list[int]) -> None:
        self._driver = driver
        self._device = device
        self._buffers: list[Handle] = []
        self._has_sample = False
        self._due_ns = -1
        self._values: dict[int, float] = {}
        self._metrics = metrics
        self._request = driver.binding.c_nvmlGpmMetricsGet_t()
        self._request.version = driver.binding.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(metrics)
        for slot, metric in enumerate(metrics):
            self._request.metrics[slot].metricId = metric
        try:
            self._is_supported = bool(driver.call("nvmlGpmQueryDeviceSupport", device.parent).isSupportedDevice)
        except DriverError:
            self._is_supported = False

    def read(self) -> dict[int, float]:
        """The values since the previous tick, by metric; none on the first tick, and without the counters.

        A virtual GPU, or one whose counters need a permission, may refuse them at once or after some samples
        (NVIDIA/DCGM#214). After a refusal they rest for ten seconds.

        Raises:
            DriverError: the counters cannot be sampled.
        """
        now = self._driver.clock()
        if not self._is_supported or now <= self._due_ns:
            return self._values
        self._values = {}
        self._due_ns = now + SELDOM_NS
        had_sample, self._has_sample = self._has_sample, False
        while len(self._buffers) < 2:
            self._buffers.append(self._driver.call("nvmlGpmSampleAlloc"))
        older, newer = self._buffers
        device = self._device
        if device.gpu_instance is None:
            self._driver.call("nvmlGpmSampleGet", device.parent, newer)
        else:
            self._driver.call("nvmlGpmMigSampleGet", device.parent, device.gpu_instance, newer)
        self._buffers = [newer, older]
        if had_sample:
            self._request.sample1, self._request.sample2 = older, newer
            self._driver.call("nvmlGpmMetricsGet", self._request)
            # Only the requested entries, of hundreds, are filled in, each with its own return code.
            metrics = [self._request.metrics[slot] for slot in range(len(self._metrics))]
            self._values = {metric.metricId: metric.value for metric in metrics if metric.nvmlReturn == SUCCESS}
        self._has_sample, self._due_ns = True, now + _GPM_SHORTEST_NS
        return self._values

    def close(self) -> None:
        """Free the buffers."""
        while self._buffers:
            self._driver.attempt("nvmlGpmSampleFree", self._buffers.pop())


# -- errors that the driver reports (Xid) ------------------------------------------------------------------------------

_XID_CRITICAL_ERROR: Final = 8
"""The kind of the events."""

_NO_INSTANCE: Final = 0xFFFFFFFF
"""The GPU instance of an error of the whole GPU."""


class _Xids:
    """The errors of one device since the agent started. NVML keeps new ones in a set of events until they are read.

    Attributes:
        newest: 0 without one. ``total``: their number.
    """

    def __init__(self, driver: Nvml) -> None:
        self.newest = 0
        self.total = 0
        self._driver = driver
        self._device: _Device | None = None
        self._events: Handle | None = None

    def open(self, device: _Device) -> None:
        """Have NVML keep them. Without its support there are none to read."""
        self._device = device
        try:
            self._events = self._driver.call("nvmlEventSetCreate")
            self._driver.call("nvmlDeviceRegisterEvents", device.parent, _XID_CRITICAL_ERROR, self._events)
        except DriverError:
            self._free()

    def read(self) -> _Xids | None:
        """Read what is new. Does not wait for it. None: NVML does not report errors of this device.

        Raises:
            DriverError: the GPU or the driver is gone.
        """
        for _ in range(MAX_ERRORS):
            if self._events is None or self._device is None:
                return None
            try:
                event = self._driver.call("nvmlEventSetWait_v2", self._events, 0)
            except DriverError as error:
                if error.fatal:
                    raise
                if error.code in _NOT_OFFERED:
                    self._free()
                    return None
                break  # a timeout, if there is no other error
            if self._device.gpu_instance is None or event.gpuInstanceId in {self._device.gpu_instance, _NO_INSTANCE}:
                xid = int(event.eventData)
                index, uuid = self._device.index, self._device.uuid
                self._driver.errors.append(GpuErrorLine(gpu=index, uuid=uuid, xid=xid, text=XIDS.get(xid)))
                self.total += 1
                if xid != CLEANED_UP or not self.newest:  # it must not hide the error that it follows
                    self.newest = xid
        return self

    def close(self) -> None:
        """Read the last ones, of which one may have taken the GPU along, and free the set of events."""
        try:
            self.read()
        except DriverError:
            pass  # the driver is gone
        self._free()

    def _free(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            self._driver.attempt("nvmlEventSetFree", events)
