"""A fake NVIDIA driver below the real binding.

``install`` puts an object in the place of ``pynvml.nvmlLib``, the loaded ``libnvidia-ml.so.1``: everything above it,
the real ``pynvml`` included, runs as on a machine with GPUs. Tests change ``State`` at will; the driver looks at it
on every call. For a subprocess the state is a JSON file, read anew at each call: see ``subprocess_environment``.

    state = State(gpus=[Gpu(gpm=True)])
    with installed(state):
        ...
        state.gpus[0].utilization = 50
        state.errors["nvmlDeviceGetPowerUsage"] = NOT_SUPPORTED
        release = state.hang_in("nvmlDeviceGetPowerUsage")
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from telemetry.safety.threads import named

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
UNKNOWN = 999

STATE_VARIABLE = "FAKE_NVML_STATE"

_GPU_HANDLE = 0x1000
_MIG_HANDLE = 0x2000
_MIG_PER_GPU = 0x10
_MEMORY_CLOCK = 2
_UNSIGNED_LONG_LONG = 3
_XID_CRITICAL_ERROR = 8


# -- the machine: its GPUs, its errors, and what the driver has been asked ---------------------------------------------


@dataclass
class Mig:
    uuid: str = "MIG-11111111-2222-3333-4444-555555555555"
    name: str = "NVIDIA Fake MIG 1g.10gb"
    gpu_instance: int = 7
    memory_total: int = 10 << 30
    memory_used: int = 1 << 30


FIELDS = {
    82: 72, 74: 90_500_000_000, 75: 1_500_000_000, 3: 12, 4: 0, 142: 3, 143: 1, 144: 0, 145: 0, 94: 5,
}  # fmt: skip
"""Temperature of the memory, nanoseconds of violations, ECC errors, remapped rows, and PCIe replays."""

NO_INSTANCE = 0xFFFFFFFF
"""The GPU instance of an error of the whole GPU."""


@dataclass
class Gpu:
    """Values as NVML gives them: percent, bytes, milliwatts, millijoules, degrees, megahertz, bits.

    ``fields`` are the field values that it has, by number. ``xids``: its critical errors, the newest last, each with the
    GPU instance where it happened. An event set gets those that come after it was made.
    """

    uuid: str = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
    name: str = "NVIDIA Fake H100"
    utilization: int = 80
    memory_total: int = 80 << 30
    memory_used: int = 20 << 30
    memory_reserved: int = 1 << 30
    power: int = 350_500
    power_limit: int = 700_000
    energy: int = 9_000_000_500
    temperature: int = 61
    sm_clock: int = 1_980
    sm_clock_max: int = 1_980
    memory_clock: int = 2_619
    throttle: int = 0
    fields: dict[int, int] = field(default_factory=lambda: dict(FIELDS))
    xids: list[tuple[int, int]] = field(default_factory=list)
    gpm: bool = False
    gpm_values: dict[int, float] = field(default_factory=lambda: {2: 62.5, 3: 25.0, 5: 12.5, 10: 40.0})
    gpm_returns: dict[int, int] = field(default_factory=dict)
    mig_enabled: bool = False
    mig: list[Mig] = field(default_factory=list)
    lost: bool = False


@dataclass
class State:
    """The machine.

    ``errors`` gives return codes by function; ``hang`` names functions that do not return while they stand there.
    The rest is what the driver has seen: functions that hang right now, calls by function, the arguments of the last
    one, live GPM buffers and event sets, initialisations not yet given back, and the threads that called.
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
    event_sets: dict[int, list[tuple[Gpu, int]]] = field(default_factory=dict)
    event_sets_made: int = 0
    initialised: int = 0
    callers: set[str | None] = field(default_factory=set)

    def hang_in(self, function: str) -> threading.Event:
        """From now on this function hangs, until the returned event is set."""
        self.hang[function] = threading.Event()
        return self.hang[function]


class _File(msgspec.Struct):
    """A machine in a file. ``hang``: functions that do not return while they stand there."""

    gpus: list[Gpu] = msgspec.field(default_factory=lambda: [Gpu()])
    errors: dict[str, int] = {}
    driver_version: str = "570.00"
    hang: list[str] = []


# -- the C functions, as Python functions ------------------------------------------------------------------------------


class _Failed(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


class FakeLibrary:
    """Replaces the loaded library in the binding: its attributes are the C functions."""

    def __init__(self, state: State) -> None:
        self.state = state

    def __getattr__(self, function: str):
        if function.startswith("__"):
            raise AttributeError(function)

        def call(*args):  # a plain function, because the binding sets attributes (restype) on it
            return self._call(function, args)

        return call

    def _call(self, function, args):
        state = self.state
        state.calls[function] += 1
        state.arguments[function] = args
        state.callers.add(named(threading.get_ident()))
        self._hang(function)
        if function in state.errors:
            return state.errors[function]
        run = getattr(type(self), "_" + function, None)
        if run is None and function not in _NUMBERS:
            return FUNCTION_NOT_FOUND
        if not state.initialised and function not in ("nvmlInitWithFlags", "nvmlErrorString"):
            return UNINITIALIZED
        try:
            if run is None:
                handle, *_, number = args
                number._obj.value = _NUMBERS[function](self._gpu(handle))
                return SUCCESS
            return run(self, *args) or SUCCESS
        except _Failed as failed:
            return failed.code

    def _hang(self, function):
        release = self.state.hang.get(function)
        if release is not None:
            self.state.hanging.add(function)
            release.wait()
            self.state.hang.pop(function, None)
            self.state.hanging.discard(function)

    # --- the library and its devices

    def _nvmlInitWithFlags(self, _flags):
        self.state.initialised += 1

    def _nvmlShutdown(self):
        self.state.initialised -= 1

    def _nvmlErrorString(self, code):
        return f"fake error {getattr(code, 'value', code)}".encode()

    def _nvmlSystemGetDriverVersion(self, buffer, _size):
        buffer.value = self.state.driver_version.encode()

    def _nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.state.gpus)

    def _nvmlDeviceGetHandleByIndex_v2(self, index, device):
        if index.value >= len(self.state.gpus):
            return INVALID_ARGUMENT
        _alive(self.state.gpus[index.value])
        return _point(device, _GPU_HANDLE + index.value)

    def _nvmlDeviceGetUUID(self, handle, buffer, _size):
        gpu, mig = self._found(handle)
        buffer.value = (mig or gpu).uuid.encode()

    def _nvmlDeviceGetName(self, handle, buffer, _size):
        gpu, mig = self._found(handle)
        buffer.value = (mig or gpu).name.encode()

    # --- MIG

    def _nvmlDeviceGetMigMode(self, handle, current, pending):
        current._obj.value = pending._obj.value = int(self._gpu(handle).mig_enabled)

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle, slot, device):
        gpu = self._gpu(handle)
        if slot.value >= len(gpu.mig):
            return NOT_FOUND
        return _point(device, _MIG_HANDLE + self.state.gpus.index(gpu) * _MIG_PER_GPU + slot.value)

    def _nvmlDeviceGetGpuInstanceId(self, handle, number):
        number._obj.value = self._mig(handle).gpu_instance

    # --- readings; those of one number are in `_NUMBERS`

    def _nvmlDeviceGetUtilizationRates(self, handle, rates):
        gpu = self._gpu(handle)
        if gpu.mig_enabled:
            return NOT_SUPPORTED
        rates._obj.gpu = gpu.utilization

    def _nvmlDeviceGetMemoryInfo_v2(self, handle, memory):
        gpu, mig = self._found(handle)
        memory._obj.total = (mig or gpu).memory_total
        memory._obj.used = (mig or gpu).memory_used

    def _nvmlDeviceGetMemoryInfo(self, handle, memory):
        """Version 1: reserved memory counts as used."""
        self._nvmlDeviceGetMemoryInfo_v2(handle, memory)
        gpu, mig = self._found(handle)
        memory._obj.used += 0 if mig else gpu.memory_reserved

    def _nvmlDeviceGetTemperatureV(self, handle, temperature):
        temperature._obj.temperature = self._gpu(handle).temperature

    def _nvmlDeviceGetClockInfo(self, handle, kind, clock):
        gpu = self._gpu(handle)
        clock._obj.value = gpu.memory_clock if kind.value == _MEMORY_CLOCK else gpu.sm_clock

    def _nvmlDeviceGetFieldValues(self, handle, count, values):
        gpu = self._gpu(handle)
        for entry in values._obj[: count.value]:
            entry.nvmlReturn = SUCCESS if entry.fieldId in gpu.fields else NOT_SUPPORTED
            entry.valueType, entry.value.ullVal = _UNSIGNED_LONG_LONG, gpu.fields.get(entry.fieldId, 0)

    # --- events: an event set remembers how many errors of each of its GPUs it has had

    def _nvmlEventSetCreate(self, events):
        self.state.event_sets_made += 1
        self.state.event_sets[self.state.event_sets_made] = []
        return _point(events, self.state.event_sets_made)

    def _nvmlDeviceRegisterEvents(self, handle, kinds, events):
        gpu = self._gpu(handle)
        if kinds.value != _XID_CRITICAL_ERROR:
            return NOT_SUPPORTED
        self.state.event_sets[_number(events)].append((gpu, len(gpu.xids)))

    def _nvmlEventSetWait_v2(self, events, data, milliseconds):
        registered = self.state.event_sets[_number(events)]
        for slot, (gpu, had) in enumerate(registered):
            _alive(gpu)
            if had < len(gpu.xids):
                data._obj.eventType = _XID_CRITICAL_ERROR
                data._obj.eventData, data._obj.gpuInstanceId = gpu.xids[had]
                registered[slot] = (gpu, had + 1)
                return SUCCESS
        time.sleep(milliseconds.value / 1000)
        return TIMEOUT

    def _nvmlEventSetFree(self, events):
        return SUCCESS if self.state.event_sets.pop(_number(events), None) is not None else INVALID_ARGUMENT

    # --- GPM: handles are numbers of buffers; taking a sample stamps the buffer

    def _nvmlGpmQueryDeviceSupport(self, handle, support):
        support._obj.isSupportedDevice = int(self._gpu(handle).gpm)

    def _nvmlGpmSampleAlloc(self, sample):
        self.state.gpm_allocated += 1
        self.state.gpm_buffers[self.state.gpm_allocated] = (0.0, None)
        return _point(sample, self.state.gpm_allocated)

    def _nvmlGpmSampleFree(self, sample):
        return SUCCESS if self.state.gpm_buffers.pop(_number(sample), None) else INVALID_ARGUMENT

    def _nvmlGpmSampleGet(self, handle, sample):
        return self._stamp(sample, self._gpu(handle))

    def _nvmlGpmMigSampleGet(self, handle, gpu_instance, sample):
        gpu = self._gpu(handle)
        known = gpu_instance in [mig.gpu_instance for mig in gpu.mig]
        return self._stamp(sample, gpu) if known else INVALID_ARGUMENT

    def _stamp(self, sample, gpu):
        if not gpu.gpm:
            return NOT_SUPPORTED
        if _number(sample) not in self.state.gpm_buffers:
            return INVALID_ARGUMENT
        self.state.gpm_buffers[_number(sample)] = (time.monotonic_ns(), gpu)

    def _nvmlGpmMetricsGet(self, request):
        request = request._obj
        older, gpu = self.state.gpm_buffers.get(_number(request.sample1), (0.0, None))
        newer, same = self.state.gpm_buffers.get(_number(request.sample2), (0.0, None))
        if gpu is None or gpu is not same or not older < newer:
            return INVALID_ARGUMENT
        for slot in range(request.numMetrics):
            metric = request.metrics[slot]
            metric.nvmlReturn = gpu.gpm_returns.get(metric.metricId, SUCCESS)
            metric.value = gpu.gpm_values.get(metric.metricId, float("nan"))

    # --- handles

    def _found(self, handle):
        """The GPU of a handle, and its MIG device if it has one."""
        number = _number(handle)
        if number >= _MIG_HANDLE:
            index, slot = divmod(number - _MIG_HANDLE, _MIG_PER_GPU)
            gpu = self.state.gpus[index]
            return _alive(gpu), gpu.mig[slot]
        return _alive(self.state.gpus[number - _GPU_HANDLE]), None

    def _gpu(self, handle):
        """A physical GPU. Readings of physical GPUs only are not supported for a MIG device."""
        gpu, mig = self._found(handle)
        if mig is not None:
            raise _Failed(NOT_SUPPORTED)
        return gpu

    def _mig(self, handle):
        _gpu, mig = self._found(handle)
        if mig is None:
            raise _Failed(NOT_SUPPORTED)
        return mig


_NUMBERS = {
    "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7,
    "nvmlDeviceGetPowerUsage": lambda gpu: gpu.power,
    "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: gpu.energy,
    "nvmlDeviceGetTemperature": lambda gpu: gpu.temperature,
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: gpu.power_limit,
    "nvmlDeviceGetMaxClockInfo": lambda gpu: gpu.sm_clock_max,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: gpu.throttle,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: gpu.throttle,
}
FUNCTIONS = (*(name[1:] for name in vars(FakeLibrary) if name.startswith("_nvml")), *_NUMBERS)
"""All that the driver has."""


def _alive(gpu: Gpu) -> Gpu:
    if gpu.lost:
        raise _Failed(GPU_IS_LOST)
    return gpu


def _point(reference, number: int) -> int:
    """Set the pointer behind ``byref`` to a number."""
    ctypes.c_void_p.from_buffer(reference._obj).value = number
    return SUCCESS


def _number(pointer) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


class _FileLibrary(FakeLibrary):
    """Takes GPUs, errors and hangs from a file; what the driver saw stays in this process."""

    def __init__(self, path: Path) -> None:
        super().__init__(State())
        self._path = path
        self._hangs: list[str] = []
        self._text = b""

    def _call(self, function, args):
        self._reload()
        return super()._call(function, args)

    def _reload(self):
        text, state = self._path.read_bytes(), self.state
        if text == self._text:
            return
        content, self._text = msgspec.json.decode(text, type=_File), text
        if [gpu.uuid for gpu in content.gpus] == [gpu.uuid for gpu in state.gpus]:
            for old, new in zip(state.gpus, content.gpus):  # keep the Gpu objects: GPM buffers remember theirs
                old.__dict__.update(new.__dict__)
        else:
            state.gpus = content.gpus
        state.errors, state.driver_version, self._hangs = content.errors, content.driver_version, content.hang

    def _hang(self, function):
        while function in self._hangs:
            time.sleep(0.02)
            self._reload()


# -- installing it -----------------------------------------------------------------------------------------------------


def install(state: State | str | os.PathLike) -> State:
    """Make the binding use the fake from now on. A path is a JSON state file, read again at each call."""
    library = FakeLibrary(state) if isinstance(state, State) else _FileLibrary(Path(state))
    _replace(library)
    return library.state


def _replace(library, loader=None) -> None:
    import pynvml

    pynvml.nvmlLib, pynvml.CDLL = library, loader or pynvml.CDLL
    pynvml._nvmlGetFunctionPointer_cache.clear()


@contextlib.contextmanager
def installed(state: State):
    """The fake for the time of a test."""
    import pynvml

    before = pynvml.nvmlLib
    try:
        yield install(state)
    finally:
        _replace(before)


@contextlib.contextmanager
def no_driver():
    """A machine without ``libnvidia-ml.so.1``, whatever this one has."""
    import pynvml

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    before, loader = pynvml.nvmlLib, pynvml.CDLL
    _replace(None, missing)
    try:
        yield
    finally:
        _replace(before, loader)


def write_state(path: Path, state: State | None = None, *, hang: tuple[str, ...] = ()) -> None:
    """Write the JSON file that ``install`` reads. In one go, so that a reader never sees half of it."""
    state = state or State()
    whole = path.with_name(path.name + ".new")
    whole.write_bytes(msgspec.json.encode(_File(state.gpus, state.errors, state.driver_version, list(hang))))
    whole.replace(path)


def subprocess_environment(folder: Path, state: State | None = None, *, hang: tuple[str, ...] = ()) -> dict[str, str]:
    """Variables under which any Python started has the fake driver, its children too.

    ``folder`` gets the state file (rewrite it with ``write_state(folder / "nvml.json", …)``) and a ``sitecustomize``
    that installs the fake before the program begins.
    """
    path = folder / "nvml.json"
    write_state(path, state, hang=hang)
    (folder / "sitecustomize.py").write_text(
        f"import os\nimport fakes.nvml\nfakes.nvml.install(os.environ[{STATE_VARIABLE!r}])\n", encoding="utf-8"
    )
    search = [str(folder), str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, search)), STATE_VARIABLE: str(path)}
