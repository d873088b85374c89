"""SM activity of a GPU, from hardware counters if there are any, else from the driver's figures per process.

The usual "utilisation" is the share of time in which any kernel ran, even if it used one SM of a hundred. How busy the
SMs are is measured by hardware counters (GPM, Hopper and newer) or, less precisely, by the driver for each process.

This module imports no third-party library: it receives the ``Driver`` as an argument, as ``device`` does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry.collect.nvml.device import FATAL, NOT_FOUND, SUCCESS, NvmlError
from telemetry.core.clock import unix_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.collect.nvml.device import Driver, GpuDevice, Handle

_SM_UTIL: Final = 2
_SM_OCCUPANCY: Final = 3
_ANY_TENSOR_UTIL: Final = 5
_DRAM_BW_UTIL: Final = 10
_GPM_METRICS: Final = (_SM_UTIL, _SM_OCCUPANCY, _ANY_TENSOR_UTIL, _DRAM_BW_UTIL)

_GPM_SHORTEST_NS: Final = 100_000_000
"""NVML asks for two samples more than 100 ms apart."""

_PROCESS_WINDOW_US: Final = 1_500_000
"""How far back samples of a process are read. The slowest GPUs are sampled once per second. With a shorter time no
sample would be found, and a busy process would appear idle."""

_HIGHEST_PERCENT: Final = 101.0
"""Counters are read one after the other, so a busy GPU may give slightly more than 100. Higher values are invalid."""


@dataclass(frozen=True, slots=True)
class GpmValues:
    """Ratios (0 to 1) over one window; None if a counter has no value."""

    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    memory_bandwidth: float | None = None


NO_GPM_VALUES: Final = GpmValues()


class GpmReader:
    """GPU performance monitoring: the hardware counters of Hopper and newer.

    A reading is the difference of two samples. Two buffers are allocated once and swapped at each tick: one holds the
    previous sample, one the new one.
    """

    def __init__(self, driver: Driver, device: GpuDevice, *, clock: Callable[[], int], window_ns: int) -> None:
        self._driver = driver
        self._device = device
        self._clock = clock
        self._window_ns = window_ns
        self._buffers: list[Handle] = []
        self._sampled_ns: int | None = None
        self._values = NO_GPM_VALUES
        binding = driver.binding
        self._request = binding.c_nvmlGpmMetricsGet_t()
        self._request.version = binding.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(_GPM_METRICS)
        for slot, metric in enumerate(_GPM_METRICS):
            self._request.metrics[slot].metricId = metric

    def read(self) -> GpmValues:
        """The ratios since the previous tick; all None on the first tick, and after a long gap.

        Raises:
            NvmlError: the counters cannot be sampled.
        """
        while len(self._buffers) < 2:
            self._buffers.append(self._driver.call("nvmlGpmSampleAlloc"))
        now, before = self._clock(), self._sampled_ns
        if before is not None and now - before <= _GPM_SHORTEST_NS:
            return self._values
        self._values = NO_GPM_VALUES
        previous, spare = self._buffers
        self._take(spare)
        self._buffers, self._sampled_ns = [spare, previous], now
        if before is not None and now - before <= self._window_ns:
            self._values = self._between(previous, spare)
        return self._values

    def close(self) -> None:
        """Free the buffers."""
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            self._free(buffer)

    def _free(self, buffer: Handle) -> None:
        try:
            self._driver.call("nvmlGpmSampleFree", buffer)
        except NvmlError:
            return  # the driver is gone and has freed it

    def _take(self, buffer: Handle) -> None:
        device = self._device
        if device.gpu_instance is None:
            self._driver.call("nvmlGpmSampleGet", device.parent, buffer)
        else:
            self._driver.call("nvmlGpmMigSampleGet", device.parent, device.gpu_instance, buffer)

    def _between(self, older: Handle, newer: Handle) -> GpmValues:
        self._request.sample1, self._request.sample2 = older, newer
        self._driver.call("nvmlGpmMetricsGet", self._request)
        # Of the hundreds of entries only the requested ones are filled in, each with its own return code.
        metrics = [self._request.metrics[slot] for slot in range(len(_GPM_METRICS))]
        ratios = [ratio(metric.value) if metric.nvmlReturn == SUCCESS else None for metric in metrics]
        return GpmValues(*ratios)


class ProcessReader:
    """The share of time this process ran a kernel. The driver samples it a few times per second.

    The driver lists only active processes, and answers "not found" if no process is active. If this process is not
    listed, it is idle, but only if it has been listed before. Otherwise the driver may know it by another pid (in a
    container it may report the pids of the host), and there is no reading.
    """

    def __init__(self, driver: Driver, handle: Handle, *, pids: frozenset[int]) -> None:
        self._driver = driver
        self._handle = handle
        self._pids = pids
        self._seen = False

    def read(self) -> float | None:
        """The newest ratio of this process; 0.0 when it is known to be idle.

        Raises:
            NvmlError: the driver does not offer it (MIG, some virtual GPUs).
        """
        ours = [entry for entry in self._entries() if entry.pid in self._pids]
        if not ours:
            return 0.0 if self._seen else None
        self._seen = True
        return ratio(max(ours, key=_time_stamp).smUtil)

    def _entries(self) -> list[Any]:
        since_us = unix_ns() // 1000 - _PROCESS_WINDOW_US  # the driver stamps with the wall clock
        try:
            return list(self._driver.call("nvmlDeviceGetProcessUtilization", self._handle, since_us))
        except NvmlError as error:
            # The binding also raises on an empty answer, with the return code for success.
            if error.code in (NOT_FOUND, SUCCESS):
                return []
            raise


def gpm_supported(driver: Driver, gpu: Handle) -> bool:
    """Whether a physical GPU has the hardware counters, and the driver can read them."""
    try:
        return bool(driver.call("nvmlGpmQueryDeviceSupport", gpu).isSupportedDevice)
    except NvmlError as error:
        if error.code in FATAL:
            raise
        return False


def process_supported(driver: Driver, handle: Handle) -> bool:
    """Whether the driver reports the utilisation of each process on the device."""
    try:
        ProcessReader(driver, handle, pids=frozenset()).read()
    except NvmlError as error:
        if error.code in FATAL:
            raise
        return False
    return True


def own_pids(status: Path = Path("/proc/self/status")) -> frozenset[int]:
    """The pids of this process, from the outermost PID namespace that its ``/proc`` shows down to its own."""
    pids = {os.getpid()}
    try:
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("NSpid:"):
                pids.update(int(pid) for pid in line.split()[1:])
    except (OSError, ValueError):
        pass
    return frozenset(pids)


def _time_stamp(entry: Any) -> int:
    return int(entry.timeStamp)


def ratio(percent: float) -> float | None:
    """Convert 0..100 to 0..1; None for an invalid value (NaN, infinite, negative, far too high)."""
    value = float(percent)
    return min(value / 100, 1.0) if 0 <= value <= _HIGHEST_PERCENT else None  # NaN compares false
