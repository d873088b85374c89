"""Attaches and detaches every hook into torch together."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from telemetry.seams import checkpoints, dataloader, watch
from telemetry.seams.device import CUDA, DeviceEvents, GpuClock, timed
from telemetry.seams.optimizer import OptimizerSteps
from telemetry.seams.patching import Patches, is_imported
from telemetry.seams.profilers import ProfilerWatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from telemetry.seams.tracker import StepTracker


class Attachment:
    """The hooks of one tracker. They are placed in each module once it is imported, which `look` finds.

    Args:
        on_error: called with the error if a hook cannot be placed; the other hooks are not affected.
        gpu_events: whether to time waits with events of the GPU, or of another device, once it is used.
        nvtx: whether to mark steps, waits, phases and the workers' fetches as NVTX ranges.

    Attributes:
        optimizer: counts the steps of optimizers.
        profilers: tracks which of the user's own profilers record.
        clock: the GPU's clock, also after `detach`; None without one.
    """

    def __init__(
        self,
        tracker: StepTracker,
        on_error: Callable[[BaseException], None],
        *,
        gpu_events: bool = True,
        nvtx: bool = False,
    ) -> None:
        self._nvtx = nvtx
        self._clock_absent = None if gpu_events else "gpu_events is off"
        self._tracker = tracker
        self._on_error = on_error
        self._patches = Patches()
        self._awaited: dict[str, Callable[[Any], object]] = {}
        self.optimizer = OptimizerSteps(tracker)
        self.profilers = ProfilerWatch(on_error)
        self.clock: GpuClock | None = None

    def attach(self) -> None:
        """Place the hooks in what is imported. Imports nothing."""
        tracker, patches = self._tracker, self._patches
        tracker.garbage.attach(patches)
        self._awaited = {
            "torch.utils.data.dataloader": self._loader,
            "torch.optim.optimizer": self._optimizers,
            "fastai.optimizer": lambda module: self.optimizer.patch_fastai(module, patches),
            "torch": self._torch,
            "torch._dynamo.trace_rules": _not_traced,
            "torch.distributed.checkpoint": self._distributed_checkpoint,
            "torch.distributed.checkpoint.state_dict": lambda m: checkpoints.patch_state_creation(m, tracker, patches),
            "safetensors.torch": lambda module: checkpoints.patch_module(module, tracker, patches),
            "torchdata.stateful_dataloader.stateful_dataloader": self._stateful_loader,
        }
        for name, patch in watch.PATCHES.items():
            self._awaited[name] = lambda module, patch=patch: patch(module, tracker, patches)  # type: ignore[misc]
        self.look()

    def look(self) -> None:
        """Place the hooks in what was imported since the last call. Any thread may call it.

        An import hook would be seen by the script. Torch imports its loaders and optimizers 0.1 s and more before it is
        complete itself.
        """
        for name in [name for name in self._awaited if is_imported(name)]:
            place = self._awaited.pop(name, None)
            try:
                if place is not None:
                    place(sys.modules[name])
            except Exception as error:
                self._on_error(error)

    @property
    def awaits_torch(self) -> bool:
        """Whether torch has not been found yet."""
        return "torch" in self._awaited

    def watch_gpu(self, name: str = CUDA) -> str | None:
        """Time waits on the device that the training uses, if the config wants it and the device can.

        Call it once a tick while the device (as `device_in_use` names it) is in use, from any thread. Returns why its
        clock measures nothing; None if it does.
        """
        tracker = self._tracker
        tracker.accelerator = name
        if self.clock is None and self._clock_absent is None:
            torch = sys.modules["torch"]
            if timed(torch, name):
                events = DeviceEvents(torch, name, tracker.captures, tracker)
                self.clock = tracker.gpu = GpuClock(events, tracker)
            else:
                self._clock_absent = f"torch has no events that time the work of this device ({name})"
        if tracker.gpu is not None and tracker.gpu.is_overdue():
            tracker.slow_path()
        if self.clock is None:
            return self._clock_absent
        if self.clock.failed:
            return f"the timing events of this device ({name}) failed"
        if self.clock.on_another_stream:
            tracker.gpu = None  # no value could come of it any more
            return "the waits that were to be timed were on another stream than the work"
        return None

    def watch_class(self, cls: type) -> bool:
        """Time the iterations of a class of loaders with its own ``__iter__``. Returns whether they are timed."""
        return watch.watch_class(cls, self._tracker, self._patches)

    def detach(self) -> list[str]:
        """Remove every hook. Returns the names of inert patches that stay, because other code has patched over them."""
        self._awaited.clear()
        self._tracker.detach()
        return self._patches.undo()

    def after_fork_in_child(self) -> None:
        """Make the hooks pass straight through. Takes no lock."""
        self._awaited.clear()
        self._tracker.garbage.detach()
        self._tracker.detach()

    def _place(self, *places: Callable[[], object]) -> None:
        """Place hooks, each for itself."""
        for place in places:
            try:
                place()
            except Exception as error:
                self._on_error(error)

    def _loader(self, module: Any) -> None:
        tracker, patches = self._tracker, self._patches
        self._place(
            lambda: dataloader.patch_workers(
                module._MultiProcessingDataLoaderIter, module._utils.worker, tracker, patches
            ),
            lambda: dataloader.patch_loader(module, tracker, patches),
        )

    def _optimizers(self, module: Any) -> None:
        self._place(
            lambda: self.optimizer.patch(module, self._patches),
            lambda: checkpoints.patch_optimizer(module.Optimizer, self._tracker, self._patches),
        )

    def _torch(self, torch: Any) -> None:
        tracker, patches = self._tracker, self._patches
        self._place(
            lambda: self.profilers.patch(torch.autograd.profiler, torch.autograd._profiler_enabled, patches),
            lambda: tracker.profiler_ranges.use_nvtx(torch.cuda.nvtx) if self._nvtx else None,
            lambda: self.optimizer.patch_graph(getattr(torch.cuda, "CUDAGraph", None), patches),
            lambda: self.optimizer.patch_graph(getattr(getattr(torch, "accelerator", None), "Graph", None), patches),
            lambda: checkpoints.patch_module(torch.serialization, tracker, patches),
            lambda: checkpoints.patch_module(torch, tracker, patches),
        )
        tracker.use_torch(torch)

    def _stateful_loader(self, module: Any) -> None:
        tracker, patches = self._tracker, self._patches
        dataloader.patch_workers(module._StatefulMultiProcessingDataLoaderIter, module, tracker, patches)
        patches.replace(
            module.StatefulDataLoader, "__iter__", lambda original: dataloader.timed_iter(original, tracker)
        )

    def _distributed_checkpoint(self, package: ModuleType) -> None:
        for name in ("", ".state_dict_saver", ".state_dict_loader"):
            module = sys.modules.get(f"{package.__name__}{name}")
            if module is not None:
                checkpoints.patch_module(module, self._tracker, self._patches)


def _not_traced(trace_rules: Any) -> None:
    """Add this package to those whose functions Dynamo calls and does not trace.

    A compiled loop that traced our hooks had up to 15 graph breaks more, and its first epoch took seconds longer.
    """
    if not vars(trace_rules).get("_telemetry_added"):
        trace_rules._telemetry_added = True
        trace_rules.add("telemetry")
