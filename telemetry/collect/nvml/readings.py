"""The readings of one GPU, each of them optional.

If the GPU, the driver or a missing permission does not allow a reading, only that reading is None. NVML's units
(percent, milliwatts, megahertz) are converted to ratios, watts and hertz.

This module imports no third-party library: it receives the ``Driver`` as an argument, as ``device`` does.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from telemetry.collect.nvml.activity import NO_GPM_VALUES, GpmReader, GpmValues, ProcessReader, gpm_supported, ratio
from telemetry.collect.nvml.device import (
    FATAL,
    FUNCTION_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    Driver,
    GpuDevice,
    NvmlError,
)
from telemetry.core.samples import GpuSample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

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
"""Every value of the ``reason`` label, with NVML's bit. The bit of an idle GPU (0x001) is left out, because an idle GPU
is not throttled. Bits that later drivers add are left out until they have a name here."""

_NOT_OFFERED: Final = frozenset({NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND})
"""Return codes of a feature that will not become available later."""


_IMPLAUSIBLE: Final = 999
"""NVML's own code for an unknown error."""

_MAX_MEMORY_BYTES: Final = float(1 << 44)
_MAX_POWER_MILLIWATTS: Final = 20e6
_MAX_MILLIJOULES: Final = 1e16
_MAX_CELSIUS: Final = 200.0
_MAX_MEGAHERTZ: Final = 10_000.0
_MAX_REASONS: Final = float(1 << 32)
"""Values that no GPU reaches. A partly failing driver gives all ones, or a negative number read as unsigned: 1.8e19
bytes used, 4.3e9 degrees."""


class DeviceReader:
    """Reads one device once per tick. Holds the GPM sample buffers, which ``close`` frees.

    Args:
        driver: an initialised NVML.
        device: what to read.
        clock: monotonic nanoseconds.
        window_ns: the longest time over which the hardware counters may be averaged to count as current.
        pids: the pids by which the driver may know this process.
    """

    def __init__(
        self,
        driver: Driver,
        device: GpuDevice,
        *,
        clock: Callable[[], int],
        window_ns: int,
        pids: frozenset[int],
    ) -> None:
        self.device = device
        self._driver = driver
        self._failures: list[NvmlError] = []
        self._gpm = (
            GpmReader(driver, device, clock=clock, window_ns=window_ns)
            if gpm_supported(driver, device.parent)
            else None
        )
        self._process = ProcessReader(driver, device.handle, pids=pids)
        self._clock_max: float | None = None

    def sample(self) -> GpuSample:
        """Everything that can be read now.

        Raises:
            NvmlError: the GPU or the driver is gone, or no reading is available.
        """
        self._failures.clear()
        gpm = self._read_gpm()
        active, source = gpm.sm_active, "gpm"
        if self._gpm is None:
            active, source = self._optional(self._process.read), "process"
        used, total = self._optional(self._memory) or (None, None)
        sample = GpuSample(
            index=self.device.index,
            uuid=self.device.uuid,
            name=self.device.name,
            utilization_ratio=self._optional(self._utilization),
            sm_active_ratio=active,
            sm_active_source=None if active is None else source,
            sm_occupancy_ratio=gpm.sm_occupancy,
            tensor_active_ratio=gpm.tensor_active,
            memory_bandwidth_ratio=gpm.memory_bandwidth,
            memory_used_bytes=used,
            memory_total_bytes=total,
            power_watts=self._optional(self._power),
            energy_joules=None if self.device.gpu_instance is not None else self._optional(self._energy),
            temperature_celsius=self._optional(self._temperature),
            sm_clock_hertz=self._optional(self._sm_clock),
            sm_clock_max_hertz=self._optional(self._sm_clock_max),
            throttled=self._optional(self._throttled),
        )
        if self._failures and not _measured(sample):
            raise self._failures[0]
        return sample

    def close(self) -> None:
        """Free the GPM buffers."""
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None

    def _optional(self, read: Callable[[], T]) -> T | None:
        """One reading, or None if it is not available. Records the failures of the sample."""
        try:
            return read()
        except NvmlError as error:
            if error.code in FATAL:
                raise
            self._failures.append(error)
            return None

    def _read_gpm(self) -> GpmValues:
        """The hardware counters. They are no longer read after a permanent error (virtual GPU, missing permission)."""
        if self._gpm is None:
            return NO_GPM_VALUES
        try:
            return self._gpm.read()
        except NvmlError as error:
            if error.code in FATAL:
                raise
            self._failures.append(error)
            if error.code in _NOT_OFFERED:
                self.close()
            return NO_GPM_VALUES

    def _utilization(self) -> float | None:
        """The share of time any kernel ran. Not available for a MIG device or a partitioned GPU."""
        return ratio(self._driver.call("nvmlDeviceGetUtilizationRates", self.device.handle).gpu)

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
        total = plausible("memory total", memory.total, _MAX_MEMORY_BYTES)
        return int(plausible("memory used", memory.used, total)), int(total)

    def _power(self) -> float:
        milliwatts = self._driver.call("nvmlDeviceGetPowerUsage", self.device.parent)
        return plausible("power", milliwatts, _MAX_POWER_MILLIWATTS) / 1e3

    def _energy(self) -> float | None:
        """Joules since the driver was loaded, from Volta on. A MIG device has no counter of its own."""
        millijoules = self._driver.call("nvmlDeviceGetTotalEnergyConsumption", self.device.parent)
        return plausible("energy", millijoules, _MAX_MILLIJOULES) / 1e3 or None  # 0: a counter that does not count

    def _temperature(self) -> float:
        sensor = self._driver.binding.NVML_TEMPERATURE_GPU
        # The first is in every current driver, but deprecated. Its replacement is only in recent drivers.
        names = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
        return plausible("temperature", self._first_offered(names, self.device.parent, sensor), _MAX_CELSIUS)

    def _sm_clock(self) -> float:
        megahertz = self._driver.call("nvmlDeviceGetClockInfo", self.device.parent, self._driver.binding.NVML_CLOCK_SM)
        return plausible("SM clock", megahertz, _MAX_MEGAHERTZ) * 1e6

    def _sm_clock_max(self) -> float:
        if self._clock_max is None:
            arguments = (self.device.parent, self._driver.binding.NVML_CLOCK_SM)
            megahertz = self._driver.call("nvmlDeviceGetMaxClockInfo", *arguments)
            self._clock_max = plausible("highest SM clock", megahertz, _MAX_MEGAHERTZ) * 1e6
        return self._clock_max

    def _throttled(self) -> tuple[str, ...]:
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        bits = int(plausible("throttle reasons", self._first_offered(names, self.device.parent), _MAX_REASONS))
        return tuple(reason for reason, bit in THROTTLE_BITS.items() if bits & bit)

    def _first_offered(self, functions: tuple[str, str], *args: Any) -> Any:
        """Call the first function, or the second if the driver lacks the first. NVML renames functions over time."""
        try:
            return self._driver.call(functions[0], *args)
        except NvmlError as error:
            if error.code != FUNCTION_NOT_FOUND:
                raise
            return self._driver.call(functions[1], *args)


def plausible(reading: str, value: float, most: float) -> float:
    """The value as a number, after a check that it is physically possible.

    Args:
        reading: name of the reading, for the error.
        value: as the driver reports it, in the driver's unit.
        most: upper limit, in the same unit.

    Raises:
        NvmlError: it is negative, above ``most`` or no number.
    """
    number = float(value)
    if not 0 <= number <= most:  # NaN compares false
        raise NvmlError(reading, _IMPLAUSIBLE, f"the driver gives {value}, which is not possible")
    return number


def _measured(sample: GpuSample) -> bool:
    readings = (
        sample.utilization_ratio,
        sample.sm_active_ratio,
        sample.sm_occupancy_ratio,
        sample.tensor_active_ratio,
        sample.memory_bandwidth_ratio,
        sample.memory_used_bytes,
        sample.power_watts,
        sample.temperature_celsius,
        sample.sm_clock_hertz,
        sample.throttled,
    )
    return any(reading is not None for reading in readings)
