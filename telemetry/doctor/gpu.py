"""The GPU: what NVML says of it, and whether CUDA events can be used."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any, Final

from telemetry.doctor.finding import ABSENT, OK, PROBLEM, Finding, Place
from telemetry.doctor.installed import version_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CUDA_SECONDS: Final = 60.0
"""A wedged driver hangs; a slow disk may well take half a minute to import torch from."""

_MOST_GPU_LINES: Final = 4


def check_gpu(place: Place) -> Iterable[Finding]:
    """What NVML says, alike GPUs in one line."""
    from telemetry.collect.nvml import device_summary
    from telemetry.collect.nvml_device import NoGpuError
    from telemetry.collect.source import SourceError

    try:
        devices = device_summary()
    except SourceError as error:
        harmless = isinstance(error.__cause__, NoGpuError)
        text = f"{error}: no GPU metrics" if harmless else f"{error}; try nvidia-smi, it should fail alike"
        yield Finding(ABSENT if harmless else PROBLEM, "gpu", text)
        return
    place.gpus = bool(devices)
    alike: dict[tuple[str, str], list[int]] = {}
    for device in devices:
        alike.setdefault(_about(device), []).append(device["index"])
    for (status, text), indexes in list(alike.items())[:_MOST_GPU_LINES]:
        yield Finding(status, "gpu", f"{_ranges(indexes)}: {text}")
    if not devices:
        yield Finding(ABSENT, "gpu", "the NVIDIA driver is there, but no GPU is: no GPU metrics")
    if len(alike) > _MOST_GPU_LINES:
        yield Finding(ABSENT, "gpu", f"and {len(alike) - _MOST_GPU_LINES} more kinds of GPU")


_SM_SOURCES: Final = {
    "gpm": "SM activity from its hardware counters",
    "process": "SM activity from the driver's process statistics (a Hopper or newer has counters)",
    None: "no SM activity, only utilization",
}


def _about(device: dict[str, Any]) -> tuple[str, str]:
    """Status and text for one GPU, without what only tells it from others of its kind."""
    if device["error"] is not None:
        return PROBLEM, f"{device['error']}; nvidia-smi -q says more"
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


def check_cuda_events(place: Place) -> Iterable[Finding]:
    """Whether waits can be timed on the GPU. On a thread of its own: a wedged driver hangs."""
    name = "cuda events"
    if place.config.gpu_events == "off":
        yield Finding(ABSENT, name, "the setting gpu_events is off: exposed wait is not measured on a GPU")
        return
    if version_of("torch") is None:
        yield Finding(ABSENT, name, "there is no torch to make them")
        return
    answers: list[Finding] = []

    def ask() -> None:
        try:
            status, text = _time_with_events(gpus=place.gpus)
        except BaseException as error:  # whatever it is, it is the answer
            status, text = PROBLEM, f"{type(error).__name__}: {error}"
        answers.append(Finding(status, name, text))

    thread = threading.Thread(target=ask, name="telemetry-doctor-cuda", daemon=True)
    thread.start()
    thread.join(_CUDA_SECONDS)
    hung = Finding(PROBLEM, name, f"CUDA has not answered for {_CUDA_SECONDS:g} s; does nvidia-smi answer?")
    yield answers[0] if answers else hung


def _time_with_events(*, gpus: bool) -> tuple[str, str]:
    """Record two events and read the time between them, as the agent would."""
    import torch

    if not (torch.version.cuda or torch.version.hip):
        why = "this torch is built without CUDA: waits are timed on the host"
        return (PROBLEM, f"{why}; there is a GPU: install a CUDA build of torch") if gpus else (ABSENT, why)
    with warnings.catch_warnings(record=True) as caught:  # torch warns of what is wrong, and says False
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        why = str(caught[-1].message).partition("(Triggered")[0] if caught else "torch finds no GPU"
        return (PROBLEM if gpus else ABSENT), f"{why}: waits are timed on the host"
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    after.record()
    after.synchronize()
    apart = 1e3 * before.elapsed_time(after)
    return OK, f"usable on {torch.cuda.get_device_name()}: two in a row are {apart:.1f} us apart"
