"""AMD's GPUs through AMD SMI, if torch is a ROCm build: the table of readings, and how to find a device."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

from telemetry.sources.collector import CollectorError
from telemetry.sources.gpu import Driver, DriverError, Gpu, NoGpuError, Reading
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Handle = Any
"""An opaque ``amdsmi_processor_handle``."""

_NO_DRIVER: Final = frozenset({18, 32, 34})
"""AMD SMI's codes INIT_ERROR, NOT_INIT and DRIVER_NOT_LOADED."""

_VISIBLE: Final = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def is_rocm() -> bool:
    """Whether torch is loaded, and built for AMD's GPUs."""
    return bool(getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None))


# -- the table of readings ---------------------------------------------------------------------------------------------

_ENERGY: Final = "amdsmi_get_energy_count"
_ECC: Final = "amdsmi_get_gpu_total_ecc_count"


def _readings(smi: Any) -> tuple[Reading, ...]:
    """The table, with arguments of the binding ``smi``. AMD SMI has percent, bytes, watts, microjoules and megahertz.

    What a GPU does not have is the text "N/A", all ones, or a 0 of a sensor.
    """
    activity, power, clock = "amdsmi_get_gpu_activity", "amdsmi_get_power_info", "amdsmi_get_clock_info"
    temperature, sensors, now = "amdsmi_get_temp_metric", smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric.CURRENT
    clocks, vram = smi.AmdSmiClkType, (smi.AmdSmiMemoryType.VRAM,)
    return (
        Reading("utilization_ratio", activity, "gfx_activity", source=Amd.name),
        Reading("memory_bandwidth_ratio", activity, "umc_activity"),
        Reading("memory_used_bytes", "amdsmi_get_gpu_memory_usage", args=vram),
        Reading("memory_total_bytes", "amdsmi_get_gpu_memory_total", args=vram),
        # which of the two a GPU has depends on its generation
        Reading("power_watts", power, "current_socket_power", 1.0, lowest=1),
        Reading("power_watts", power, "average_socket_power", 1.0, lowest=1),
        # some versions give microwatts
        Reading("power_limit_watts", power, "power_limit", 1.0, lowest=1),
        Reading("power_limit_watts", power, "power_limit", 1e-6, lowest=1),
        Reading("energy_joules", _ENERGY, unit=1e-6, lowest=1e-6),  # 0 comes from a counter that does not count
        Reading("temperature_celsius", temperature, unit=1.0, lowest=1, args=(sensors.JUNCTION, now)),
        Reading("sm_clock_hertz", clock, "clk", 1e6, args=(clocks.GFX,)),
        Reading("sm_clock_max_hertz", clock, "max_clk", 1e6, lowest=1, args=(clocks.GFX,)),
        # what seldom changes
        Reading("memory_temperature_celsius", temperature, unit=1.0, lowest=1, args=(sensors.VRAM, now), seldom=True),
        Reading("memory_clock_hertz", clock, "clk", 1e6, args=(clocks.MEM,), seldom=True),
        Reading("ecc_corrected_errors_total", _ECC, "correctable_count", seldom=True),
        Reading("ecc_uncorrected_errors_total", _ECC, "uncorrectable_count", seldom=True),
        Reading("pcie_replays_total", "amdsmi_get_gpu_pci_replay_counter", seldom=True),
    )


# -- the library, and this rank's device in it -------------------------------------------------------------------------


class Amd(Driver):
    """AMD SMI, through the binding of the package ``amdsmi``.

    The package is never imported here: ``torch.cuda`` of a ROCm build does it, in a way that does not load a second
    copy of the library, and the package prints lines if its library is missing. The library does not count its users,
    so it is never shut down: the script may use it as well, as `torch.cuda.utilization` does.

    Args:
        environ: has the variables that hide GPUs, for the time before torch tells an address.
    """

    name = "amdsmi"
    library = "AMD SMI"

    def __init__(self, environ: Mapping[str, str] = os.environ, clock: Callable[[], int] = now_ns) -> None:
        super().__init__(clock)
        self._environ = environ

    def identify(self, properties: Any) -> str:
        """The PCI domain, bus and device, as AMD SMI writes them."""
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"

    def open(self) -> None:
        """See `Driver.open`."""
        if self.binding is not None:
            return
        self.binding = sys.modules.get("amdsmi")
        if self.binding is None:
            raise NoGpuError("the package amdsmi is not installed, or torch could not load it")
        try:
            self.call("amdsmi_init")
        except DriverError as error:
            self.close()
            if error.code in _NO_DRIVER:
                raise NoGpuError(f"no AMD driver: {error}") from error
            raise

    def close(self) -> None:
        """Have the next `open` initialise the library again, which does nothing if that is not needed."""
        self.binding = None

    def find(self, device: str | None) -> AmdGpu:
        """See `Driver.find`. A partition is not found, because all of a GPU share its address."""
        gpus = list(enumerate(self.call("amdsmi_get_processor_handles")))
        if not gpus:
            raise NoGpuError("the AMD driver is there, but no GPU is")
        if device is None:
            if any(self._environ.get(name, "0").strip() in {"", "-1"} for name in _VISIBLE):
                raise NoGpuError("no GPU is visible: the environment hides them all")
            if len(gpus) > 1:
                raise CollectorError("the GPU of this rank is not known: torch has not told its PCI address yet")
        else:
            gpus = [gpu for gpu in gpus if self.call("amdsmi_get_gpu_device_bdf", gpu[1]).partition(".")[0] == device]
            if not gpus:
                raise CollectorError(f"AMD SMI knows no GPU with the PCI address {device} that torch reports")
            if len(gpus) > 1:
                raise CollectorError("the GPU of this rank is partitioned, and which partition it uses is not known")
        return AmdGpu(self, *gpus[0])


class AmdGpu(Gpu):
    """A GPU. ``handle``: of the library."""

    def __init__(self, driver: Amd, index: int, handle: Handle) -> None:
        uuid = str(driver.call("amdsmi_get_gpu_device_uuid", handle))
        try:
            name = str(driver.call("amdsmi_get_gpu_asic_info", handle)["market_name"])
        except DriverError:
            name = "AMD GPU"
        super().__init__(driver, index, uuid, name, _readings(driver.binding))
        self._handle = handle

    def ask(self, function: str, *args: Any) -> Any:
        """See `Gpu.ask`."""
        if function == _ECC and not self._driver.call("amdsmi_get_gpu_ecc_enabled", self._handle):
            return None  # the library would count 0 errors
        answer = self._driver.call(function, self._handle, *args)
        if function == _ENERGY:  # in units of its resolution
            return answer.get("energy_accumulator", 0) * answer.get("counter_resolution", 0)
        return answer

    def close(self) -> None:
        """See `Gpu.close`. There is nothing."""
