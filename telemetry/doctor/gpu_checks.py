"""Checks of the GPUs: what NVML reports, and whether CUDA events work."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any, Final

from telemetry.doctor.finding import ABSENT, OK, PROBLEM, CheckContext, Finding
from telemetry.doctor.package_checks import version_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CUDA_SECONDS: Final = 60.0
"""A wedged driver hangs. But importing torch from a slow disk can take half a minute, too."""

_MAX_GPU_LINES: Final = 4


def check_gpu(place: CheckContext) -> Iterable[Finding]:
    """What NVML reports. Identical GPUs share a line."""
    from telemetry.sources.collector import CollectorError
    from telemetry.sources.nvml import NoGpuError, device_summary

    try:
        devices = device_summary()
    except CollectorError as error:
        harmless = isinstance(error.__cause__, NoGpuError)
        text = f"{error}: there are no GPU metrics" if harmless else f"{error}; run nvidia-smi, it should fail too"
        yield Finding(ABSENT if harmless else PROBLEM, "gpu", text)
        return
    place.gpus = bool(devices)
    alike: dict[tuple[str, str], list[int]] = {}
    for device in devices:
        alike.setdefault(_about(device), []).append(device["index"])
    for (status, text), indexes in list(alike.items())[:_MAX_GPU_LINES]:
        yield Finding(status, "gpu", f"{_ranges(indexes)}: {text}")
    if not devices:
        yield Finding(ABSENT, "gpu", "the NVIDIA driver works, but finds no GPU: there are no GPU metrics")
    if len(alike) > _MAX_GPU_LINES:
        yield Finding(ABSENT, "gpu", f"and {len(alike) - _MAX_GPU_LINES} more kinds of GPU")


_SM_SOURCES: Final = {
    "gpm": "SM activity is read from hardware counters",
    "process": "SM activity is estimated by the driver (only Hopper and newer have hardware counters)",
    None: "SM activity is not available, only utilization",
}


def _about(device: dict[str, Any]) -> tuple[str, str]:
    """Status and text for one GPU; the same for identical GPUs."""
    if device["error"] is not None:
        return PROBLEM, f"{device['error']}; run nvidia-smi -q for details"
    partitioned = ", partitioned (MIG)" if device["mig"] else ""
    text = f"{device['name']}, driver {device['driver_version']}{partitioned}; {_SM_SOURCES[device['sm_source']]}"
    return OK if device["sm_source"] else ABSENT, text


def _ranges(indexes: Sequence[int]) -> str:
    """``0-3,6`` for 0, 1, 2, 3, 6."""
    parts: list[list[int]] = []
    for index in indexes:
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def check_cuda_events(place: CheckContext) -> Iterable[Finding]:
    """Whether waits can be measured on the GPU. It runs on its own thread, because a wedged driver hangs."""
    name = "cuda events"
    if place.config.gpu_events == "off":
        yield Finding(ABSENT, name, "turned off by the setting gpu_events: the exposed wait is not measured on GPUs")
        return
    if version_of("torch") is None:
        yield Finding(ABSENT, name, "torch is not installed")
        return
    answers: list[Finding] = []

    def ask() -> None:
        try:
            status, text = _time_with_events(gpus=place.gpus)
        except BaseException as error:  # any error is the result of the check
            status, text = PROBLEM, f"{type(error).__name__}: {error}"
        answers.append(Finding(status, name, text))

    thread = threading.Thread(target=ask, name="telemetry-doctor-cuda", daemon=True)
    thread.start()
    thread.join(_CUDA_SECONDS)
    hung = Finding(PROBLEM, name, f"CUDA has not answered for {_CUDA_SECONDS:g} s; check whether nvidia-smi answers")
    yield answers[0] if answers else hung


def _time_with_events(*, gpus: bool) -> tuple[str, str]:
    """Record two events and read the time between them, as the agent would."""
    with warnings.catch_warnings():  # torch warns if there is no NumPy, which telemetry does not need
        warnings.simplefilter("ignore")
        import torch

    if not (torch.version.cuda or torch.version.hip):
        why = "this build of torch has no CUDA, so waits are measured on the host"
        return (PROBLEM, f"{why}, although there is a GPU; install a CUDA build of torch") if gpus else (ABSENT, why)
    with warnings.catch_warnings(record=True) as caught:  # torch warns about the reason and returns False
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        why = str(caught[-1].message).partition("(Triggered")[0] if caught else "torch finds no GPU"
        return (PROBLEM if gpus else ABSENT), f"{why}, so waits are measured on the host"
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    after.record()
    after.synchronize()
    apart = 1e3 * before.elapsed_time(after)
    return OK, f"work on {torch.cuda.get_device_name()}; two events in a row are {apart:.1f} us apart"
