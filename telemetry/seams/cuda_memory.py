"""The memory of torch's CUDA caching allocator: its figures, and the allocations that fail.

It never imports torch and never initialises CUDA.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from telemetry.log.lines import GpuOutOfMemoryLine
from telemetry.model.records import TorchMemorySample
from telemetry.safety.errors import let_pass, text_of
from telemetry.seams.device import cuda, cuda_device
from telemetry.sources.collector import CollectorError
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.safety.errors import ErrorLog
    from telemetry.seams.state import StepState

_READ_SECONDS: Final = 2.0


class AllocatorFigures:
    """The bytes allocated for tensors, and the bytes that the allocator reserves, on the training thread's device.

    For a reading torch waits for the allocator's lock and keeps the GIL. A thread that waits for memory of the GPU
    holds this lock: a reading on any other thread would stop the whole process. Between two steps the training thread
    waits for nothing. So it takes the readings there, when the agent thread wants one: 10 us every 2 s.

    Attributes:
        wanted: the device of which the training thread is to take a reading; None for none.
        newest: the newest reading: device, allocated bytes, reserved bytes.
    """

    name = "torch_memory"

    def __init__(self, tracker: StepState) -> None:
        self._tracker = tracker
        self._due_ns = 0
        self._failure: str | None = None
        self.wanted: int | None = None
        self.newest: tuple[int, int, int] | None = None

    def read(self) -> TorchMemorySample | None:
        """The newest reading, and ask for the next one. None before the first, and while the device is not known.

        The agent thread calls it.

        Raises:
            CollectorError: the allocator cannot be read.
        """
        if self._failure is not None:
            raise CollectorError(self._failure)
        device = cuda_device(cuda(), self._tracker)
        if device is None:
            return None
        now = now_ns()
        if self.wanted is None and now >= self._due_ns:
            self._due_ns = now + int(_READ_SECONDS * NS)
            self.wanted = device
        if self.wanted is not None:
            self._tracker.slow_path()
        newest = self.newest
        return None if newest is None else TorchMemorySample(newest[1], newest[2])

    def take(self) -> None:
        """Take the reading that is wanted, if one is, on the training thread between two steps."""
        start = now_ns()
        device, self.wanted = self.wanted, None
        if device is None:
            return
        try:
            self.newest = device, *_in_use(device)
        except Exception as error:  # CUDA has failed, or the allocator is one of the script's own
            let_pass(error)
            self._failure = text_of(error)
        self._tracker.overhead_ns += now_ns() - start


def _in_use(device: int) -> tuple[int, int]:
    """Allocated and reserved bytes. A C function: no frame of torch's runs, which Dynamo might compile."""
    found = sys.modules["torch"]._C._cuda_memoryStats(device)
    return found["allocated_bytes"]["all"]["current"], found["reserved_bytes"]["all"]["current"]


_MAX_NOTED: Final = 16
_NOTED_EVERY_NS: Final = NS
"""Of allocations that fail at once after another, as in a search for the batch size, the first of a second is noted."""


class FailedAllocations:
    """Notes allocations on the GPU that fail, also those whose exception the script catches.

    Torch calls it on the allocating thread, before it raises, and has released the allocator's lock. Torch has no way
    to take the function back: after `stop` it does nothing.

    Args:
        figures: the newest reading is what was in use before.
        errors: gets told if torch cannot report such allocations.
        file: where PyTorch's memory snapshot is written when an allocation fails, the newest over the others; None: not
            at all.
    """

    def __init__(self, figures: AllocatorFigures, errors: ErrorLog, file: Path | None = None) -> None:
        self._figures, self._errors, self._file = figures, errors, file
        self._attached = self._stopped = False
        self._noted: deque[GpuOutOfMemoryLine] = deque(maxlen=_MAX_NOTED)
        self._failed_total = 0
        self._due_ns = 0

    def attach(self) -> None:
        """Begin to watch once CUDA is in use, if this has not been done. Before that torch would initialise it."""
        if self._attached or cuda() is None:
            return
        self._attached = True
        try:
            sys.modules["torch"]._C._cuda_attach_out_of_memory_observer(self._failed)
        except (AttributeError, RuntimeError) as error:  # torch's other allocator (backend:cudaMallocAsync) refuses it
            self._errors.tell("torch_memory", f"allocations that fail on the GPU are not seen: {text_of(error)}")

    def take(self) -> list[GpuOutOfMemoryLine]:
        """What was noted since the last call."""
        return [self._noted.popleft() for _ in range(len(self._noted))]

    def stop(self) -> None:
        """Note nothing more."""
        self._stopped = True

    def _failed(self, device: int, tried: int, total: int, free: int) -> None:
        if self._stopped:
            return
        try:
            self._failed_total += 1
            if now_ns() >= self._due_ns:
                # In a compiled frame Dynamo would compile the functions of torch that are called here.
                note = self._note
                if "torch._dynamo" in sys.modules:
                    note = sys.modules["torch"].compiler.disable(note)
                note(device, tried, total, free)
                self._due_ns = now_ns() + _NOTED_EVERY_NS
        except Exception as error:
            let_pass(error)

    def _note(self, device: int, tried: int, total: int, free: int) -> None:
        cuda: Any = sys.modules["torch"].cuda
        (allocated, reserved), before = _in_use(device), self._figures.newest
        noted = GpuOutOfMemoryLine(
            gpu=device,
            tried_bytes=tried,
            total_bytes=total,
            free_bytes=free,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            largest_free_bytes=_largest_free(cuda, device),
            allocated_before_bytes=before[1] if before is not None and before[0] == device else None,
            failed_total=self._failed_total,
        )
        self._noted.append(noted)
        if self._file is not None:
            cuda.memory._dump_snapshot(str(self._file))
            self._noted[-1] = structs.replace(noted, file=self._file.name)


def _largest_free(cuda: Any, device: int) -> int:
    """Bytes of the largest block that the allocator keeps and no tensor uses."""
    snapshot = cuda.memory_snapshot
    # A script that records the history of its memory has millions of entries, which older versions copy, too.
    without = {"include_traces": False} if "include_traces" in snapshot.__code__.co_varnames else {}
    segments = [segment for segment in snapshot(**without) if segment["device"] == device]
    blocks = [block["size"] for each in segments for block in each["blocks"] if block["state"] == "inactive"]
    return max(blocks, default=0)
