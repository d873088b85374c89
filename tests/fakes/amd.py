"""A fake AMD driver below the real binding, the package `amdsmi`.

`Library` takes the place of the loaded ``libamd_smi.so``: everything above it runs as on a machine with GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field

NOT_SUPPORTED, NO_DATA, DRIVER_NOT_LOADED = 2, 40, 34
NONE_16, NONE_32, NONE_64 = 0xFFFF, 0xFFFFFFFF, (1 << 64) - 1
SOCKET = 0x1000


@dataclass
class Gpu:
    """Numbers as the C functions give them: percent, bytes, watts, degrees, megahertz, units of the accumulator."""

    domain: int = 0
    busy: int = 80
    umc: int = 40
    used: int = 20 << 30
    current: int = 717
    average: int = NONE_16
    limit: int = 750
    energy: int = 4_000_000
    junction: int = 61
    memory_celsius: int = 48
    clock: int = 2100
    blocks: int = 1
    corrected: int = 12


@dataclass
class Library:
    """Replaces the loaded library in the binding: its attributes are the C functions. ``errors``: codes by function."""

    gpus: list[Gpu] = field(default_factory=lambda: [Gpu()])
    errors: dict[str, int] = field(default_factory=dict)
    hang: dict[str, threading.Event] = field(default_factory=dict)
    calls: Counter = field(default_factory=Counter)

    def __getattr__(self, function):
        if not function.startswith("amdsmi_"):
            raise AttributeError(function)
        return lambda *args: self._call(function, args)  # a plain function: the binding sets attributes on it

    def _call(self, function, args):
        self.calls[function] += 1
        if function in self.hang:
            self.hang[function].wait(20)
        if function in self.errors:
            return self.errors[function]
        if function in ("amdsmi_get_socket_handles", "amdsmi_get_processor_handles"):
            count, handles = args[-2:]
            count._obj.value = 1 if "socket" in function else len(self.gpus)
            for index in range(count._obj.value if handles else 0):
                handles[index] = SOCKET + index
        elif function in READINGS:
            READINGS[function](self.gpus[args[0].value - SOCKET], *args[1:])
        elif function != "amdsmi_init":
            return NOT_SUPPORTED
        return 0


def put(reference, **values):
    for name, value in values.items():
        setattr(reference._obj, name, value)


def put_temperature(gpu, sensor, _metric, out):
    put(out, value={1: gpu.junction, 2: gpu.memory_celsius}[int(sensor)])


READINGS = {
    "amdsmi_get_gpu_device_bdf": lambda gpu, out: put(out, as_uint=gpu.domain << 16 | 0xC1 << 8),
    "amdsmi_get_gpu_device_uuid": lambda gpu, size, text: setattr(text, "value", b"a-uuid"),
    "amdsmi_get_gpu_asic_info": lambda gpu, out: put(out, market_name=b"AMD Fake MI300X", asic_serial=b"1f"),
    "amdsmi_get_gpu_activity": lambda gpu, out: put(out, gfx_activity=gpu.busy, umc_activity=gpu.umc),
    "amdsmi_get_gpu_memory_usage": lambda gpu, kind, out: put(out, value=gpu.used),
    "amdsmi_get_gpu_memory_total": lambda gpu, kind, out: put(out, value=192 << 30),
    "amdsmi_get_power_info": lambda gpu, out: put(
        out, current_socket_power=gpu.current, average_socket_power=gpu.average, power_limit=gpu.limit
    ),
    "amdsmi_get_energy_count": lambda gpu, count, unit, at: (put(count, value=gpu.energy), put(unit, value=15.25)),
    "amdsmi_get_temp_metric": put_temperature,
    "amdsmi_get_clock_info": lambda gpu, kind, out: put(out, clk=1300 if kind == 4 else gpu.clock, max_clk=2100),
    "amdsmi_get_gpu_ecc_enabled": lambda gpu, out: put(out, value=gpu.blocks),
    "amdsmi_get_gpu_total_ecc_count": lambda gpu, out: put(out, correctable_count=gpu.corrected),
    "amdsmi_get_gpu_pci_replay_counter": lambda gpu, out: put(out, value=5),
}


@contextlib.contextmanager
def imported():
    """The binding is imported above the library that this yields."""
    library, loader = Library(), ctypes.CDLL
    ctypes.CDLL = lambda *args, **options: library
    try:
        import amdsmi  # noqa: F401
    finally:
        ctypes.CDLL = loader
    try:
        yield library
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "amdsmi"]:
            del sys.modules[name]
