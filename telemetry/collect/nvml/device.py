"""Finds the GPU of this rank by UUID, never by a guessed index.

NVML sees every GPU of the machine or container. The rank computes on one of them, or on a MIG device of one. torch
knows which one after CUDA is initialised. Before that, ``CUDA_VISIBLE_DEVICES`` decides only if it leaves one choice.

This module imports no third-party library: it calls NVML through the ``Driver`` that it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from telemetry.collect.collector import CollectorError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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

FATAL: Final = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, LIB_RM_VERSION_MISMATCH})
"""After one of these the GPU or the library is gone, so no other reading works either."""

_UNKNOWN: Final = "the GPU of this rank is not known before CUDA is initialised"

Handle = Any
"""An opaque ``nvmlDevice_t``."""


class NvmlError(Exception):
    """An NVML call failed. ``code`` is NVML's return code; the text names the function and the error."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function}: {text}")
        self.code = code


class NoGpuError(CollectorError):
    """Nothing to sample on this machine: no driver, no GPU, or none that this process may use."""


class Driver(Protocol):
    """Access to NVML: ``binding`` holds its constants and structures, ``call`` runs one of its functions."""

    binding: Any

    def call(self, function: str, *args: Any) -> Any:
        """Run one NVML function by name.

        Raises:
            NvmlError: it failed, or the binding does not have it.
        """


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """The device that this rank computes on.

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


def find_device(driver: Driver, uuid: str | None, environ: Mapping[str, str]) -> GpuDevice:
    """This rank's device.

    Args:
        driver: an initialised NVML.
        uuid: what torch reports (with or without ``GPU-``, or ``MIG-…``); None before CUDA is initialised.
        environ: where ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` are read.

    Raises:
        NoGpuError: this process cannot use a GPU.
        CollectorError: it is not known yet which GPU it uses.
        NvmlError: NVML failed.
    """
    handle = _by_uuid(driver, uuid) if uuid else _by_environment(driver, environ)
    found = driver.call("nvmlDeviceGetUUID", handle)
    if not _is_mig(found) and mig_enabled(driver, handle):
        handle = _only_mig_device(driver, handle, environ)
    return _describe(driver, handle)


def visible_entries(environ: Mapping[str, str]) -> list[int] | list[str] | None:
    """``CUDA_VISIBLE_DEVICES`` as CUDA reads it: indexes, or UUIDs, or None when all devices are visible.

    The first invalid entry ends the list, and a repeated one empties it.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    entries = [entry.strip() for entry in text.split(",")]
    prefix = entries[0][:4]
    if prefix in ("GPU-", "MIG-"):
        uuids = _leading([entry if entry.startswith(prefix) else None for entry in entries])
        return uuids if len(set(uuids)) == len(uuids) else []
    indexes = _leading([_leading_number(entry) for entry in entries])
    return indexes if len(set(indexes)) == len(indexes) else []


def mig_enabled(driver: Driver, gpu: Handle) -> bool:
    """Whether the GPU is partitioned. A GPU or driver without MIG answers with an error."""
    try:
        current, _pending = driver.call("nvmlDeviceGetMigMode", gpu)
    except NvmlError as error:
        if error.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND, INVALID_ARGUMENT, NO_PERMISSION):
            return False
        raise
    return bool(current)


def _by_uuid(driver: Driver, uuid: str) -> Handle:
    """Find a device by torch's UUID. torch gives it without the prefix for GPU or MIG devices, so both are tried."""
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names:
        handle = _handle_of(driver, name)
        if handle is not None:
            return handle
    raise CollectorError(f"NVML knows no device with the UUID {uuid} that torch reports")


def _by_environment(driver: Driver, environ: Mapping[str, str]) -> Handle:
    """The only device that CUDA can choose.

    An index refers to CUDA's order. By default the fastest GPU is first, and the order of the others is undefined, even
    if all are equal. Only CUDA_DEVICE_ORDER=PCI_BUS_ID gives NVML's order. So with several GPUs and the default order
    an index does not identify a GPU, and the agent waits for torch.
    """
    count = driver.call("nvmlDeviceGetCount")
    if not count:
        raise NoGpuError("the NVIDIA driver is there, but no GPU is")
    entries: list[int] | list[str] | None = visible_entries(environ)
    if entries is None:
        entries = list(range(count))
    if entries and isinstance(entries[0], int):
        entries = _leading([entry if int(entry) < count else None for entry in entries])
    if not entries:
        raise NoGpuError("no GPU is visible: CUDA_VISIBLE_DEVICES hides them all")
    if len(entries) > 1:
        raise CollectorError(_UNKNOWN)
    only = entries[0]
    return _by_index(driver, only, count, environ) if isinstance(only, int) else _by_entry(driver, only)


def _by_index(driver: Driver, index: int, count: int, environ: Mapping[str, str]) -> Handle:
    if count > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise CollectorError(_UNKNOWN)
    # A partitioned GPU among others changes CUDA's numbering in undocumented ways.
    if count > 1 and any(mig_enabled(driver, gpu) for _uuid, gpu in _gpus(driver)):
        raise CollectorError(_UNKNOWN)
    return driver.call("nvmlDeviceGetHandleByIndex", index)


def _by_entry(driver: Driver, entry: str) -> Handle:
    """The device of ``GPU-<uuid or its beginning>``, ``MIG-<uuid>`` or ``MIG-GPU-<uuid>/<gi>/<ci>``."""
    handle = _handle_of(driver, entry)
    if handle is not None:
        return handle
    matches = list(_old_style_mig(driver, entry)) if _is_mig(entry) else _beginning_with(driver, entry)
    if len(matches) != 1:
        what = "several GPUs" if matches else "no GPU of this machine"
        raise NoGpuError(f"no GPU is visible: CUDA_VISIBLE_DEVICES={entry} names {what}")
    return matches[0]


def _beginning_with(driver: Driver, prefix: str) -> list[Handle]:
    return [gpu for uuid, gpu in _gpus(driver) if uuid.lower().startswith(prefix.lower())]


def _old_style_mig(driver: Driver, entry: str) -> Iterator[Handle]:
    """MIG devices named by their GPU and the ids of their instances, as older drivers do without MIG UUIDs."""
    uuid, _, ids = entry.removeprefix("MIG-").partition("/")
    parent = _handle_of(driver, uuid)
    if parent is None:
        return
    for device in _mig_devices(driver, parent):
        gpu_instance = driver.call("nvmlDeviceGetGpuInstanceId", device)
        compute_instance = driver.call("nvmlDeviceGetComputeInstanceId", device)
        if ids == f"{gpu_instance}/{compute_instance}":
            yield device


def _only_mig_device(driver: Driver, gpu: Handle, environ: Mapping[str, str]) -> Handle:
    """The MIG device of a partitioned GPU. Some versions of CUDA give the UUID of the GPU for its MIG device.

    Raises:
        NoGpuError: the GPU is partitioned, but has no MIG device.
        CollectorError: it has several, and it is not known which one this rank uses.
    """
    devices = list(_mig_devices(driver, gpu))
    if not devices:
        raise NoGpuError("no GPU is visible: MIG is enabled, but there is no MIG device")
    if len(devices) == 1:
        return devices[0]
    entries = visible_entries(environ) or []
    if len(entries) == 1 and isinstance(entries[0], str) and _is_mig(entries[0]):
        named = _by_entry(driver, entries[0])
        uuid = driver.call("nvmlDeviceGetUUID", named)
        if uuid in [driver.call("nvmlDeviceGetUUID", device) for device in devices]:
            return named
    raise CollectorError("the GPU of this rank is partitioned (MIG), and which MIG device it uses is not known")


def _describe(driver: Driver, handle: Handle) -> GpuDevice:
    uuid = driver.call("nvmlDeviceGetUUID", handle)
    parent, gpu_instance = handle, None
    if _is_mig(uuid):
        parent = driver.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        gpu_instance = driver.call("nvmlDeviceGetGpuInstanceId", handle)
    return GpuDevice(
        handle=handle,
        parent=parent,
        gpu_instance=gpu_instance,
        index=driver.call("nvmlDeviceGetIndex", parent),
        uuid=uuid,
        name=driver.call("nvmlDeviceGetName", handle),
    )


def _handle_of(driver: Driver, uuid: str) -> Handle | None:
    """The device with exactly this UUID, GPU or MIG; else None."""
    try:
        return driver.call("nvmlDeviceGetHandleByUUID", uuid)
    except NvmlError as error:
        if error.code in (NOT_FOUND, INVALID_ARGUMENT):
            return None
        raise


def _gpus(driver: Driver) -> Iterator[tuple[str, Handle]]:
    """The physical GPUs that answer. A lost GPU must not hide the others."""
    for index in range(driver.call("nvmlDeviceGetCount")):
        try:
            handle = driver.call("nvmlDeviceGetHandleByIndex", index)
            uuid = driver.call("nvmlDeviceGetUUID", handle)
        except NvmlError:
            continue
        yield uuid, handle


def _mig_devices(driver: Driver, gpu: Handle) -> Iterator[Handle]:
    for index in range(driver.call("nvmlDeviceGetMaxMigDeviceCount", gpu)):
        try:
            handle = driver.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu, index)
        except NvmlError as error:
            if error.code in (NOT_FOUND, INVALID_ARGUMENT):  # some of the numbered slots may be empty
                continue
            raise
        yield handle


def _is_mig(uuid: str) -> bool:
    return uuid.startswith("MIG-")


def _leading_number(entry: str) -> int | None:
    """An index as CUDA parses it (with strtoul): ``1gpu2`` is 1. None if there is no number or a negative one."""
    digits = len(entry) - len(entry.lstrip("0123456789"))
    return int(entry[:digits]) if digits else None


def _leading(entries: list[Any]) -> list[Any]:
    """The entries before the first None."""
    return entries[: entries.index(None)] if None in entries else entries
