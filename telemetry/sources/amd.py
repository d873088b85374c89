"""Samples this rank's GPUs through AMD SMI, if torch is a ROCm build. `NvmlSource` does it for all others."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

from telemetry.records import GpuSample
from telemetry.sources.collector import CollectorError
from telemetry.sources.gpu import DriverError, GpuSource, NoGpuError
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Handle = Any
"""An opaque ``amdsmi_processor_handle``."""

_NO_DRIVER: Final = frozenset({18, 32, 34})
"""AMD SMI's codes INIT_ERROR, NOT_INIT and DRIVER_NOT_LOADED."""

_VISIBLE: Final = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

_MAX_MEMORY_BYTES: Final = float(1 << 44)
_MAX_WATTS: Final = 20e3
_MAX_MICROWATTS: Final = 4e9  # below the all ones of 32 bits
_MAX_MICROJOULES: Final = 1e19
_MAX_CELSIUS: Final = 200.0
_MAX_MEGAHERTZ: Final = 10_000.0
_MAX_COUNT: Final = float((1 << 32) - 2)
"""No GPU reaches these values. What it does not have is the text "N/A" or all ones."""

_SLOW_NS: Final = 10 * NS
"""Time between two readings of what seldom changes."""


def is_rocm() -> bool:
    """Whether torch is loaded, and built for AMD's GPUs."""
    return bool(getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None))


class AmdError(DriverError):
    """A call of AMD SMI failed. ``code`` is its return code; None if there is none."""

    def __init__(self, function: str, code: int | None, text: str) -> None:
        super().__init__(f"{function}: {text}")
        self.code = code


# -- calls of the binding ----------------------------------------------------------------------------------------------
# Its package ``amdsmi`` is never imported here: ``torch.cuda`` of a ROCm build does it, in a way that does not load a
# second copy of the library, and the package prints lines if its library is missing. The library does not count its
# users, so it is never shut down: the script may use it as well, as `torch.cuda.utilization` does.


class AmdDriver:
    """Calls the binding, converts its errors, and records which call is running.

    Attributes:
        binding: the ``amdsmi`` module; None before `open`.
        running: name of the running function and its start in monotonic ns; None between calls.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.binding: Any = None
        self.running: tuple[str, int] | None = None
        self._clock = clock

    def open(self) -> None:
        """Initialise the library, once.

        Raises:
            NoGpuError: there is no binding, or no driver on this machine.
            AmdError: the library does not initialise.
        """
        if self.binding is not None:
            return
        self.binding = sys.modules.get("amdsmi")
        if self.binding is None:
            raise NoGpuError("the package amdsmi is not installed, or torch could not load it")
        try:
            self.call("amdsmi_init")
        except AmdError as error:
            self.close()
            if error.code in _NO_DRIVER:
                raise NoGpuError(f"no AMD driver: {error}") from error
            raise

    def close(self) -> None:
        """Have the next `open` initialise the library again. It does nothing if that is not needed."""
        self.binding = None

    def call(self, function: str, *args: Any) -> Any:
        """Run one function of the binding.

        Raises:
            AmdError: the function failed, or this version of the binding does not have it.
        """
        run = getattr(self.binding, function, None)
        if run is None:
            raise AmdError(function, None, "not in this version of amdsmi")
        self.running = (function, self._clock())
        try:
            return run(*args)
        except self.binding.AmdSmiException as error:
            raise AmdError(function, getattr(error, "err_code", None), getattr(error, "err_info", str(error))) from None
        finally:
            self.running = None


# -- finds a GPU of this rank by its PCI address -----------------------------------------------------------------------


def pci_address(properties: Any) -> str:
    """The domain, bus and device of what `torch.cuda.get_device_properties` returns, as AMD SMI writes them.

    Raises:
        AttributeError: this version of torch does not have them.
    """
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"


def find_device(driver: AmdDriver, address: str | None, environ: Mapping[str, str]) -> tuple[int, Handle]:
    """Find a GPU of this rank, and its index on the machine.

    Args:
        driver: an initialised AMD SMI.
        address: see `pci_address`; None before it is known.
        environ: has the variables that hide GPUs.

    Raises:
        NoGpuError: this process cannot use a GPU.
        CollectorError: it is not known yet which GPU it uses.
        AmdError: AMD SMI failed.
    """
    gpus = list(enumerate(driver.call("amdsmi_get_processor_handles")))
    if not gpus:
        raise NoGpuError("the AMD driver is there, but no GPU is")
    if address is None:
        if any(environ.get(name, "0").strip() in {"", "-1"} for name in _VISIBLE):
            raise NoGpuError("no GPU is visible: the environment hides them all")
        if len(gpus) > 1:
            raise CollectorError("the GPU of this rank is not known: torch has not told its PCI address yet")
        return gpus[0]
    found = [gpu for gpu in gpus if driver.call("amdsmi_get_gpu_device_bdf", gpu[1]).partition(".")[0] == address]
    if not found:
        raise CollectorError(f"AMD SMI knows no GPU with the PCI address {address} that torch reports")
    if len(found) > 1:  # its partitions share the address
        raise CollectorError("the GPU of this rank is partitioned, and which partition it uses is not known")
    return found[0]


# -- the readings of one GPU -------------------------------------------------------------------------------------------
# If the GPU or the driver does not allow a reading, only that reading is None.


class AmdReader:
    """Reads one GPU once per tick. ``index``: its index on the machine. ``gpu``: its handle."""

    def __init__(self, driver: AmdDriver, index: int, gpu: Handle, clock: Callable[[], int]) -> None:
        self._driver = driver
        self._gpu = gpu
        self._clock = clock
        self._failures: list[AmdError] = []
        self._index, self._uuid = index, str(driver.call("amdsmi_get_gpu_device_uuid", gpu))
        self._name = str((self._ask("amdsmi_get_gpu_asic_info") or {}).get("market_name", "AMD GPU"))
        self._slow: dict[str, Any] = {}
        self._slow_due_ns = 0

    def sample(self) -> GpuSample:
        """Read everything that is available now.

        Raises:
            AmdError: no reading is available.
        """
        self._failures.clear()
        binding = self._driver.binding
        activity = self._ask("amdsmi_get_gpu_activity") or {}
        power = self._ask("amdsmi_get_power_info") or {}
        clock = self._ask("amdsmi_get_clock_info", binding.AmdSmiClkType.GFX) or {}
        energy = self._ask("amdsmi_get_energy_count") or {}
        if self._clock() >= self._slow_due_ns:
            self._slow, self._slow_due_ns = self._seldom(), self._clock() + _SLOW_NS
        utilization = _ratio(activity.get("gfx_activity"))
        # Which of the two a GPU has depends on its generation.
        watts = (_number(power.get(f"{kind}_socket_power"), _MAX_WATTS, least=1) for kind in ("current", "average"))
        limit = _number(power.get("power_limit"), _MAX_MICROWATTS, least=1)
        if limit is not None and limit > _MAX_WATTS:  # some versions give microwatts
            limit *= 1e-6
        # The accumulator is in units of the resolution, that in microjoules. 0 comes from one that does not count.
        unit = _number(energy.get("counter_resolution"), 1e6) or 0.0
        microjoules = (_number(energy.get("energy_accumulator"), _MAX_MICROJOULES) or 0.0) * unit
        sample = GpuSample(
            index=self._index,
            uuid=self._uuid,
            name=self._name,
            utilization_ratio=utilization,
            utilization_source=None if utilization is None else AmdSource.name,
            memory_bandwidth_ratio=_ratio(activity.get("umc_activity")),
            memory_used_bytes=self._memory("amdsmi_get_gpu_memory_usage"),
            memory_total_bytes=self._memory("amdsmi_get_gpu_memory_total"),
            power_watts=next((value for value in watts if value is not None), None),
            power_limit_watts=limit,
            energy_joules=microjoules * 1e-6 if 0 < microjoules <= _MAX_MICROJOULES else None,
            temperature_celsius=self._temperature(binding.AmdSmiTemperatureType.JUNCTION),
            sm_clock_hertz=_number(clock.get("clk"), _MAX_MEGAHERTZ, 1e6),
            sm_clock_max_hertz=_number(clock.get("max_clk"), _MAX_MEGAHERTZ, 1e6, least=1),
            **self._slow,
        )
        measured = (
            sample.utilization_ratio, sample.memory_used_bytes, sample.power_watts, sample.temperature_celsius,
            sample.sm_clock_hertz,
        )  # fmt: skip
        if self._failures and all(reading is None for reading in measured):
            raise self._failures[0]
        return sample

    def close(self) -> None:
        """It holds nothing."""

    def _seldom(self) -> dict[str, Any]:
        """The fields of the sample that are read seldom."""
        binding = self._driver.binding
        clock = self._ask("amdsmi_get_clock_info", binding.AmdSmiClkType.MEM) or {}
        # Without a block that has ECC the library counts 0 errors.
        errors = (self._ask("amdsmi_get_gpu_ecc_enabled") and self._ask("amdsmi_get_gpu_total_ecc_count")) or {}
        return {
            "memory_temperature_celsius": self._temperature(binding.AmdSmiTemperatureType.VRAM),
            "memory_clock_hertz": _number(clock.get("clk"), _MAX_MEGAHERTZ, 1e6),
            "ecc_corrected_errors_total": _count(errors.get("correctable_count")),
            "ecc_uncorrected_errors_total": _count(errors.get("uncorrectable_count")),
            "pcie_replays_total": _count(self._ask("amdsmi_get_gpu_pci_replay_counter")),
        }

    def _ask(self, function: str, *args: Any) -> Any:
        """What a function says of this GPU; None if it fails."""
        try:
            return self._driver.call(function, self._gpu, *args)
        except AmdError as error:
            self._failures.append(error)
            return None

    def _memory(self, function: str) -> int | None:
        return _count(self._ask(function, self._driver.binding.AmdSmiMemoryType.VRAM), _MAX_MEMORY_BYTES)

    def _temperature(self, sensor: Any) -> float | None:
        current = self._driver.binding.AmdSmiTemperatureMetric.CURRENT
        return _number(self._ask("amdsmi_get_temp_metric", sensor, current), _MAX_CELSIUS, least=1)


def _number(value: Any, most: float, unit: float = 1.0, least: float = 0.0) -> float | None:
    """A value times ``unit``; None if it is no number, or not within its limits."""
    return value * unit if isinstance(value, (int, float)) and least <= value <= most else None


def _ratio(percent: Any) -> float | None:
    value = _number(percent, 100)
    return None if value is None else value / 100


def _count(value: Any, most: float = _MAX_COUNT) -> int | None:
    number = _number(value, most)
    return None if number is None else int(number)


# -- the collector -----------------------------------------------------------------------------------------------------


class AmdSource(GpuSource):
    """The newest samples of this rank's GPUs.

    Args:
        addresses: returns each `pci_address`; see `GpuSource`, also for the other arguments.
        environ: has the variables that hide GPUs, for the time before the address is known.
    """

    name = "amdsmi"
    library = "AMD SMI"
    _driver: AmdDriver

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        *,
        interval_seconds: float = 1.0,
        deadline_seconds: float = 5.0,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], int] = now_ns,
    ) -> None:
        self._environ = environ
        super().__init__(
            AmdDriver(clock),
            addresses,
            interval_seconds=interval_seconds,
            deadline_seconds=deadline_seconds,
            clock=clock,
        )

    def _reader(self, device: str | None) -> AmdReader:
        index, gpu = find_device(self._driver, device, self._environ)
        return AmdReader(self._driver, index, gpu, self._clock)
