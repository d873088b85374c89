"""Polls the sources of one agent, and gathers their samples for the log and the endpoint."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from telemetry.model.records import LOG_KIND, Samples
from telemetry.seams.cuda_memory import FailedAllocations
from telemetry.seams.device import cuda, cuda_device
from telemetry.sources.amd import Amd, is_rocm
from telemetry.sources.cgroup import PressureSource
from telemetry.sources.collector import Collector, Poller
from telemetry.sources.gpu import Driver, GpuSource
from telemetry.sources.memory import MemorySource
from telemetry.sources.nvml import Nvml
from telemetry.sources.proc import HostSource, ProcessSource
from telemetry.sources.workers import WorkersSource
from telemetry.util.clock import sleep
from telemetry.util.words import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from telemetry.log.lines import GpuErrorLine, GpuOutOfMemoryLine
    from telemetry.model.records import (
        CollectorHealth,
        Histogram,
    )
    from telemetry.safety.errors import ErrorLog
    from telemetry.seams.tracker import StepTracker


_GPUS: Final = "gpus"
_GPU_EVENT: Final = "gpu"

_LOGGED_AS: Final = {
    _GPUS: _GPU_EVENT,
    "torch_memory": _GPU_EVENT,
    "host": "host",
    "pressure": "host",
    "process": "host",
    "memory": "host",
    "workers": "workers",
}
"""The log event for each field of `Samples`."""


class CollectorPoller:
    """Polls every collector once a tick. A failure of one does not affect the others.

    Args:
        tracker: gives the device and the workers of the training thread.
        interval_seconds: time between two samples.
        errors: reports a collector that goes down.
        memory_file: where to write PyTorch's memory snapshot when an allocation on the GPU fails; None: nowhere.

    Attributes:
        samples: the newest samples.
    """

    def __init__(
        self, tracker: StepTracker, interval_seconds: float, errors: ErrorLog, memory_file: Path | None = None
    ) -> None:
        self._tracker = tracker
        self._failed_allocations = FailedAllocations(tracker.allocator, errors, memory_file)
        self._errors = errors
        self._interval_seconds = interval_seconds
        self._gpu = self._gpu_source()
        self._earlier_cpu_seconds = 0.0
        self._workers = WorkersSource(tracker.loaders)
        sources: list[Collector[Any]] = [
            HostSource(),
            ProcessSource(lambda: tracker.native_thread),
            self._workers,
            PressureSource(),
            tracker.allocator,
            MemorySource(
                lambda: [pid for loader in tracker.loaders.live() for pid in loader.pids], stat=self._workers.stat
            ),
        ]
        self._pollers: dict[str, Poller[Any]] = {_GPUS: Poller(self._gpu)}
        self._pollers |= {source.name: Poller(source) for source in sources}
        self.samples = Samples()
        self._been_up: set[str] = set()
        self._other_devices_told = False
        self._gathered: dict[str, list[Any]] = {name: [] for name in self._pollers}

    def poll(self) -> Iterator[str]:
        """Read every collector that is due. Gives the name of each one after it, because any of them may take long."""
        if self._gpu.name != Amd.name and is_rocm():  # torch may be imported after the agent has started
            self._gpu.close()
            self._earlier_cpu_seconds = self._gpu.cpu_seconds()
            self._gpu = self._gpu_source()
            self._pollers[_GPUS] = Poller(self._gpu)
        self._tell_other_devices()
        self._failed_allocations.attach()
        for field, poller in self._pollers.items():
            name, sample = poller.source.name, poller.poll()
            if sample is not None:
                self._gathered[field].append(sample)
            if poller.news and poller.health.up is False:
                reason = poller.health.reason or "no reading"
                # Something that was never there (no driver on a CPU machine) gets a log line, but is no failure.
                missing = poller.expected and name not in self._been_up
                tell = self._errors.tell if missing else self._errors.note
                tell(name, reason)
            elif sample is not None:
                self._been_up.add(name)
            self.samples = replace(self.samples, **{field: poller.newest})
            sleep(0)  # let the training thread in
            yield name

    def health(self) -> tuple[CollectorHealth, ...]:
        """The state of each collector that has something to read. Without CUDA in use, for example, one has nothing."""
        return tuple(
            poller.health for poller in self._pollers.values() if not (poller.health.up and poller.newest is None)
        )

    def take_log_fields(self) -> list[tuple[str, dict[str, Any]]]:
        """The mean of the samples since the last call, as log events and their fields.

        An event without samples is left out. There is one event for each GPU.
        """
        events: dict[str, dict[str, Any]] = {}
        others: list[tuple[str, dict[str, Any]]] = []
        for name, gathered in self._gathered.items():
            self._gathered[name], samples = [], gathered
            if name == _GPUS:
                samples, *more = [list(filter(None, of_one)) for of_one in zip_longest(*gathered)] or [[]]
                if more:
                    events[_GPU_EVENT] = {"wait_measured": True}
                others = [(_GPU_EVENT, mean_of(of_one) | {"wait_measured": False}) for of_one in more]
            if not samples or (name == "workers" and not any(sample.workers for sample in samples)):
                continue
            prefix = "process_" if name == "process" else ""
            merged = {f"{prefix}{key}": value for key, value in mean_of(samples).items()}
            events.setdefault(_LOGGED_AS[name], {}).update(merged)
        return [*events.items(), *others]

    def worker_fetches(self) -> Histogram | None:
        """The fetches of all workers so far, including ended ones; None before the first."""
        return self._workers.fetches

    def take_gpu_errors(self, *, wait_seconds: float = 0.0) -> list[GpuErrorLine]:
        """The errors of its GPUs since the last call. ``wait_seconds``: look for new ones, at most this long."""
        if wait_seconds:
            self._gpu.look(wait_seconds)
        return self._gpu.take_errors()

    def take_failed_allocations(self) -> list[GpuOutOfMemoryLine]:
        """The allocations on GPUs that have failed since the last call."""
        return self._failed_allocations.take()

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the collectors' own threads."""
        return self._earlier_cpu_seconds + self._gpu.cpu_seconds()

    def close(self) -> None:
        """End the collectors. From now on there is no newest sample."""
        self._failed_allocations.stop()
        self._gpu.close()
        for poller in self._pollers.values():
            poller.newest = None
        self.samples = Samples()

    def _tell_other_devices(self) -> None:
        """Tell once for which device the figures are, if the parameters are on several."""
        first, *others = [str(device) for device in self._tracker.devices] or [""]
        if others and not self._other_devices_told:
            self._other_devices_told = True
            where = f"the parameters are on {first} and on {listed(others)}"
            self._errors.tell(_GPU_EVENT, f"{where}; the exposed wait is measured on {first} alone")

    def _gpu_source(self) -> GpuSource:
        driver: Driver = Amd() if is_rocm() else Nvml()
        return GpuSource(driver, partial(self._told_by_torch, driver), interval_seconds=self._interval_seconds)

    def _told_by_torch(self, driver: Driver) -> list[str]:
        """What identifies each device of the training; nothing before they are known."""
        module = cuda()
        device = cuda_device(module, self._tracker)
        if module is None or device is None:
            return []
        # Parameters on the host (offloaded ones) have no index: torch would take that for the current device.
        known = (device.index for device in self._tracker.devices if device.index is not None)
        try:
            return [driver.identify(module.get_device_properties(each)) for each in dict.fromkeys((device, *known))]
        except AttributeError:
            return []


def mean_of(samples: Sequence[Any]) -> dict[str, Any]:
    """Merge the samples of a window into one set of fields, each by its kind, see `LOG_KIND`.

    A number is the mean of the samples that have it, or null without any.
    """
    newest = samples[-1]
    merged: dict[str, Any] = {}
    for spec in fields(newest):
        kind = spec.metadata.get(LOG_KIND)
        values = [v for s in samples if (v := getattr(s, spec.name)) is not None]
        last = values[-1] if values and kind == "newest" else getattr(newest, spec.name)
        if kind == "skip":
            continue
        if hasattr(last, "log_fields"):
            merged |= last.log_fields()
        elif kind != "newest" and values and all(map(_is_number, values)):
            mean = sum(values) / len(values)
            merged[spec.name] = round(mean) if isinstance(values[-1], int) else mean
        else:
            merged[spec.name] = list(last) if isinstance(last, tuple) else last
    return merged


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
