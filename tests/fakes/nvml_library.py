"""The C functions of the fake NVML library, as Python functions."""

from __future__ import annotations

import ctypes
import os
import threading
import time

from fakes.nvml_state import (
    _GPU_HANDLE,
    _MIG_HANDLE,
    _MIG_PER_GPU,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    SUCCESS,
    UNINITIALIZED,
    Gpu,
    State,
)
from telemetry.util.threads import named


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
        run = getattr(self, "_" + function, None)
        if run is None:
            return FUNCTION_NOT_FOUND
        if not state.initialised and function not in ("nvmlInitWithFlags", "nvmlErrorString"):
            return UNINITIALIZED
        try:
            return run(*args) or SUCCESS
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

    def _nvmlDeviceGetHandleByUUID(self, uuid, device):
        wanted = uuid.value.decode()
        for index, gpu in enumerate(self.state.gpus):
            if gpu.uuid == wanted:
                _alive(gpu)
                return _point(device, _GPU_HANDLE + index)
            for slot, mig in enumerate(gpu.mig):
                if mig.uuid == wanted:
                    return _point(device, _MIG_HANDLE + index * _MIG_PER_GPU + slot)
        return NOT_FOUND

    def _nvmlDeviceGetUUID(self, handle, buffer, _size):
        gpu, mig = self._found(handle)
        buffer.value = (mig or gpu).uuid.encode()

    def _nvmlDeviceGetName(self, handle, buffer, _size):
        gpu, mig = self._found(handle)
        buffer.value = (mig or gpu).name.encode()

    def _nvmlDeviceGetIndex(self, handle, index):
        index._obj.value = self.state.gpus.index(self._gpu(handle))

    # --- MIG

    def _nvmlDeviceGetMigMode(self, handle, current, pending):
        gpu = self._gpu(handle)
        current._obj.value = pending._obj.value = int(gpu.mig_enabled)

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle, count):
        self._gpu(handle)
        count._obj.value = 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle, slot, device):
        gpu = self._gpu(handle)
        if slot.value >= len(gpu.mig):
            return NOT_FOUND
        index = self.state.gpus.index(gpu)
        return _point(device, _MIG_HANDLE + index * _MIG_PER_GPU + slot.value)

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle, device):
        gpu, _mig = self._found(handle)
        return _point(device, _GPU_HANDLE + self.state.gpus.index(gpu))

    def _nvmlDeviceGetGpuInstanceId(self, handle, number):
        number._obj.value = self._mig(handle).gpu_instance

    def _nvmlDeviceGetComputeInstanceId(self, handle, number):
        number._obj.value = self._mig(handle).compute_instance

    # --- readings

    def _nvmlDeviceGetUtilizationRates(self, handle, rates):
        gpu = self._gpu(handle)
        if gpu.mig_enabled:
            return NOT_SUPPORTED
        rates._obj.gpu = gpu.utilization

    def _nvmlDeviceGetMemoryInfo(self, handle, memory):
        """Version 1: reserved memory counts as used."""
        gpu, mig = self._found(handle)
        memory._obj.total = (mig or gpu).memory_total
        memory._obj.used = (mig or gpu).memory_used + (0 if mig else gpu.memory_reserved)

    def _nvmlDeviceGetMemoryInfo_v2(self, handle, memory):
        gpu, mig = self._found(handle)
        memory._obj.total = (mig or gpu).memory_total
        memory._obj.used = (mig or gpu).memory_used

    def _nvmlDeviceGetPowerUsage(self, handle, power):
        power._obj.value = self._gpu(handle).power

    def _nvmlDeviceGetTotalEnergyConsumption(self, handle, energy):
        energy._obj.value = self._gpu(handle).energy

    def _nvmlDeviceGetTemperature(self, handle, _sensor, degrees):
        degrees._obj.value = self._gpu(handle).temperature

    def _nvmlDeviceGetTemperatureV(self, handle, temperature):
        temperature._obj.temperature = self._gpu(handle).temperature

    def _nvmlDeviceGetClockInfo(self, handle, _kind, megahertz):
        megahertz._obj.value = self._gpu(handle).sm_clock

    def _nvmlDeviceGetMaxClockInfo(self, handle, _kind, megahertz):
        megahertz._obj.value = self._gpu(handle).sm_clock_max

    def _nvmlDeviceGetCurrentClocksEventReasons(self, handle, bits):
        bits._obj.value = self._gpu(handle).throttle

    _nvmlDeviceGetCurrentClocksThrottleReasons = _nvmlDeviceGetCurrentClocksEventReasons

    def _nvmlDeviceGetProcessUtilization(self, handle, samples, count, since):
        gpu = self._gpu(handle)
        if gpu.mig_enabled:
            return NOT_SUPPORTED
        now_us = time.time_ns() // 1000
        stamped = [(now_us - int(process.age_seconds * 1e6), process) for process in gpu.processes]
        recent = [(stamp, process) for stamp, process in stamped if stamp > since.value]
        if not recent:
            return NOT_FOUND
        if samples is None:
            count._obj.value = len(recent)
            return INSUFFICIENT_SIZE
        for entry, (stamp, process) in zip(samples, recent):
            entry.pid = os.getpid() if process.pid is None else process.pid
            entry.timeStamp = stamp
            entry.smUtil = process.sm
        return SUCCESS

    # --- GPM: handles are numbers of buffers; taking a sample stamps the buffer

    def _nvmlGpmQueryDeviceSupport(self, handle, support):
        support._obj.isSupportedDevice = int(self._gpu(handle).gpm)

    def _nvmlGpmSampleAlloc(self, sample):
        self.state.gpm_allocated += 1
        self.state.gpm_buffers[self.state.gpm_allocated] = (0.0, None)
        return _point(sample, self.state.gpm_allocated)

    def _nvmlGpmSampleFree(self, sample):
        if self.state.gpm_buffers.pop(_number(sample), None) is None:
            return INVALID_ARGUMENT

    def _nvmlGpmSampleGet(self, handle, sample):
        self._stamp(sample, self._gpu(handle))

    def _nvmlGpmMigSampleGet(self, handle, gpu_instance, sample):
        gpu = self._gpu(handle)
        if gpu_instance not in [mig.gpu_instance for mig in gpu.mig]:
            return INVALID_ARGUMENT
        self._stamp(sample, gpu)

    def _stamp(self, sample, gpu):
        if not gpu.gpm:
            raise _Failed(NOT_SUPPORTED)
        if _number(sample) not in self.state.gpm_buffers:
            raise _Failed(INVALID_ARGUMENT)
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


class _Failed(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


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


# --- installing it
