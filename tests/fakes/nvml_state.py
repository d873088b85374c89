"""The machine that the fake NVML library shows: its GPUs, its errors, and what the driver has been asked."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
UNKNOWN = 999

STATE_VARIABLE = "FAKE_NVML_STATE"

_GPU_HANDLE = 0x1000
_MIG_HANDLE = 0x2000
_MIG_PER_GPU = 0x10
_SM_UTIL, _SM_OCCUPANCY, _ANY_TENSOR, _DRAM_BW = 2, 3, 5, 10


@dataclass
class Mig:
    uuid: str = "MIG-11111111-2222-3333-4444-555555555555"
    name: str = "NVIDIA Fake MIG 1g.10gb"
    gpu_instance: int = 7
    compute_instance: int = 0
    memory_total: int = 10 << 30
    memory_used: int = 1 << 30


@dataclass
class Process:
    """A process that used the GPU since the last call. ``pid`` None: the process that has loaded the driver."""

    pid: int | None = None
    sm: int = 50
    age_seconds: float = 0.2


@dataclass
class Gpu:
    """Values as NVML gives them: percent, bytes, milliwatts, millijoules, degrees, megahertz, bits."""

    uuid: str = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
    name: str = "NVIDIA Fake H100"
    utilization: int = 80
    memory_total: int = 80 << 30
    memory_used: int = 20 << 30
    memory_reserved: int = 1 << 30
    power: int = 350_500
    energy: int = 9_000_000_500
    temperature: int = 61
    sm_clock: int = 1_980
    sm_clock_max: int = 1_980
    throttle: int = 0
    gpm: bool = False
    gpm_values: dict[int, float] = field(
        default_factory=lambda: {_SM_UTIL: 62.5, _SM_OCCUPANCY: 25.0, _ANY_TENSOR: 12.5, _DRAM_BW: 40.0}
    )
    gpm_returns: dict[int, int] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    mig_enabled: bool = False
    mig: list[Mig] = field(default_factory=list)
    lost: bool = False


@dataclass
class State:
    """The machine.

    ``errors`` gives return codes by function; ``hang`` names functions that do not return while they stand there.
    The rest is what the driver has seen: functions that hang right now, calls by function, the arguments of the last one, live GPM buffers,
    initialisations not yet given back, and the threads that called.
    """

    gpus: list[Gpu] = field(default_factory=lambda: [Gpu()])
    driver_version: str = "570.00"
    errors: dict[str, int] = field(default_factory=dict)
    hang: dict[str, threading.Event] = field(default_factory=dict)
    hanging: set[str] = field(default_factory=set)
    calls: Counter = field(default_factory=Counter)
    arguments: dict[str, tuple] = field(default_factory=dict)
    gpm_buffers: dict[int, tuple[float, object]] = field(default_factory=dict)
    gpm_allocated: int = 0
    initialised: int = 0
    callers: set[str | None] = field(default_factory=set)

    def hang_in(self, function: str) -> threading.Event:
        """From now on this function hangs, until the returned event is set."""
        self.hang[function] = threading.Event()
        return self.hang[function]
