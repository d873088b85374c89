"""Every hook into torch, attached and detached together."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from telemetry.hooks import accelerator, checkpoints, watch
from telemetry.hooks import dataloader as loader_hooks
from telemetry.hooks.dataloader import patch_workers
from telemetry.hooks.gpu import GpuClock
from telemetry.hooks.patching import ImportWatch, Patches
from telemetry.hooks.profilers import ProfilerWatch
from telemetry.hooks.tracker import GPU_CLOCK, optimizer_hook

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from telemetry.hooks.tracker import StepTracker


class Attachment:
    """The hooks of one tracker. They are placed at once if torch is already imported, else when it is imported.

    Args:
        tracker: gets every event.
        on_error: called with the error if a hook cannot be placed; the other hooks are not affected.
        gpu_events: whether to time waits with events of the GPU, or of another device, once it is used.
        nvtx: whether to mark steps, waits, phases and the workers' fetches as NVTX ranges.

    Attributes:
        profilers: knows which of the user's own profilers record.
        captures: knows which CUDA graphs are being captured.
        clock: the GPU's clock, also after `detach`; else None.
    """

    def __init__(
        self,
        tracker: StepTracker,
        on_error: Callable[[BaseException], None],
        *,
        gpu_events: bool = True,
        nvtx: bool = False,
    ) -> None:
        self._gpu_events = gpu_events
        self._nvtx = nvtx
        self._clock_absent: str | None = None
        self._gpu_watched = False
        self._tracker = tracker
        self._on_error = on_error
        self._patches = Patches()
        self.profilers = ProfilerWatch(on_error)
        self.captures = tracker.captures
        self.clock: GpuClock | None = None
        self._watch = ImportWatch(on_error)

    def attach(self) -> None:
        """Place the hooks. Imports nothing."""
        self._tracker.garbage.attach(self._patches)
        self._watch.when_imported("torch", self._torch)
        self._watch.when_imported("torch._dynamo.trace_rules", _not_traced)
        self._watch.when_imported("torch.distributed.checkpoint", self._distributed_checkpoint)
        creating = self._with_patches(checkpoints.patch_state_creation)
        self._watch.when_imported("torch.distributed.checkpoint.state_dict", creating)
        self._watch.when_imported("safetensors.torch", self._saving)
        self._watch.when_imported("torchdata.stateful_dataloader.stateful_dataloader", self._stateful_loader)
        for name, patch in watch.PATCHES.items():
            self._watch.when_imported(name, self._with_patches(patch))

    def watch_gpu(self, name: str = accelerator.CUDA) -> str | None:
        """Time waits on the device that the training uses, if that is wanted and possible.

        Must be called once a tick while the device is in use. Any thread may call it.

        Args:
            name: the type of device, as `accelerator.in_use` returns it.

        Returns:
            Why there is no such clock; None if there is one.
        """
        tracker = self._tracker
        tracker.accelerator = name
        if not self._gpu_watched:
            self._gpu_watched = True  # once: a clock that failed is not tried again
            torch = sys.modules["torch"]
            if not self._gpu_events:
                self._clock_absent = "gpu_events is off"
            elif not accelerator.timed(torch, name):
                self._clock_absent = f"torch has no events that time the work of this device ({name})"
            else:
                self.clock = tracker.gpu = GpuClock(accelerator.DeviceEvents(torch, name, self.captures))
        if tracker.gpu is not None:
            tracker.fast_path.disable(GPU_CLOCK)
        if self.clock is None:
            return self._clock_absent
        if self.clock.failed:
            return f"the timing events of this device ({name}) failed"
        return (
            "the waits that were to be timed were on another stream than the work"
            if self.clock.on_another_stream
            else None
        )

    def watch_class(self, cls: type) -> bool:
        """Time the iterations of a class of loaders with its own ``__iter__``. Returns whether they are timed."""
        return watch.watch_class(cls, self._tracker, self._patches)

    def detach(self) -> list[str]:
        """Remove every hook. Returns the names of inert patches that stay, because other code has patched over them."""
        self._watch.close()
        self._tracker.detach()
        if self.clock is not None and not self.captures.under_way:
            self.clock.release()
        return self._patches.undo()

    def after_fork_in_child(self) -> None:
        """Make the hooks pass straight through. Takes no lock, and releases no event of the parent."""
        self._watch.close()
        self._tracker.garbage.detach()
        self._tracker.detach()

    def _torch(self, torch: ModuleType) -> None:
        tracker = self._tracker
        dataloader = sys.modules["torch.utils.data.dataloader"]
        places: tuple[Callable[[], None], ...] = (
            lambda: patch_workers(dataloader._MultiProcessingDataLoaderIter, tracker, self._patches),
            lambda: loader_hooks.patch_loader(dataloader, tracker, torch.is_grad_enabled, self._patches),
            lambda: self._optimizer(sys.modules["torch.optim.optimizer"]),
            lambda: self._profilers(torch),
            lambda: tracker.profiler_ranges.use_nvtx(torch.cuda.nvtx) if self._nvtx else None,
            lambda: self.captures.patch(getattr(torch.cuda, "CUDAGraph", None), self._patches),
            lambda: self._saving(torch.serialization),
            lambda: self._saving(torch),
        )
        for place in places:
            try:
                place()
            except Exception as error:
                self._on_error(error)
        tracker.use_torch(torch, lambda: current_device(torch))

    def _optimizer(self, module: Any) -> None:
        handle = module.register_optimizer_step_post_hook(optimizer_hook(self._tracker))
        self._patches.on_undo(handle.remove)
        checkpoints.patch_optimizer(module.Optimizer, self._tracker, self._patches)

    def _profilers(self, torch: ModuleType) -> None:
        profiler = sys.modules["torch.autograd.profiler"]
        self.profilers.patch(profiler, torch.autograd._profiler_enabled, self._patches)

    def _saving(self, module: ModuleType) -> None:
        """The functions that save, and those that load."""
        checkpoints.patch_saving(module, self._tracker, self._patches)
        checkpoints.patch_loading(module, self._tracker, self._patches)

    def _stateful_loader(self, module: Any) -> None:
        stateful, iterators = module.StatefulDataLoader, module._StatefulMultiProcessingDataLoaderIter
        patch_workers(iterators, self._tracker, self._patches)
        loader_hooks.patch_epoch_boundaries(stateful, iterators, self._tracker, self._patches)

    def _with_patches(self, patch: Callable[[Any, StepTracker, Patches], None]) -> Callable[[ModuleType], None]:
        return lambda module: patch(module, self._tracker, self._patches)

    def _distributed_checkpoint(self, package: ModuleType) -> None:
        checkpoints.patch_saving(package, self._tracker, self._patches)
        checkpoints.patch_loading(package, self._tracker, self._patches)
        prefix = "torch.distributed.checkpoint.state_dict_"
        checkpoints.patch_saving(sys.modules[f"{prefix}saver"], self._tracker, self._patches)
        if f"{prefix}loader" in sys.modules:
            checkpoints.patch_loading(sys.modules[f"{prefix}loader"], self._tracker, self._patches)


def _not_traced(trace_rules: Any) -> None:
    """Put this package on the list of those whose functions Dynamo calls and does not trace.

    A compiled loop that traced our hooks had up to 15 graph breaks more, and its first epoch took seconds longer.
    """
    trace_rules.add("telemetry")


def current_device(torch: ModuleType) -> int | None:
    """The calling thread's CUDA device; None while CUDA is not in use. Does not initialise it."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None
