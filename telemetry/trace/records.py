"""The figures of one trace. Encoded as they are, they are what ``telemetry trace --json`` prints.

Shares are 0 to 1. Figures that the trace does not contain are None.
"""

from __future__ import annotations

from msgspec import Struct

from telemetry.util.text import listed, percent


class TraceStep(Struct, frozen=True):
    """One step: its number, its seconds, and its seconds by category, which add up to it."""

    step: int
    seconds: float
    categories: dict[str, float]


class Average(Struct, frozen=True):
    """The mean step: its seconds, and the share of each category."""

    seconds: float
    categories: dict[str, float]


class GpuUsage(Struct, frozen=True):
    """Averages over the devices that ran kernels.

    Attributes:
        utilization_ratio: share of the time from the first step to the last in which any kernel ran.
        sm_efficiency_ratio: share of the multiprocessors that had a block, over the same time. It is taken from the
            blocks per SM, at most 1 at any time.
        occupancy_ratio: estimated achieved occupancy of the kernels, weighted by their time.
        tensor_core_ratio: share of the kernel time in kernels that use tensor cores, by their names.
    """

    utilization_ratio: float | None = None
    sm_efficiency_ratio: float | None = None
    occupancy_ratio: float | None = None
    tensor_core_ratio: float | None = None


class FlopsUsage(Struct, frozen=True):
    """Floating-point operations of the average step. Unknown figures are None, and ``absent`` has the reason.

    Attributes:
        per_step: operations of the operators that could be counted, forward and backward.
        by_format: the operations by number format, such as ``bfloat16``.
        not_counted: operators that compute too but could not be counted. With any, the figures are lower bounds.
        peak_per_second: dense peak of the device for these formats. For float32 it is that of TF32, where there is one.
        mfu_ratio: time of the counted operations at the peak, as a share of the step.
        absent: why there is no ``per_step`` or no ``mfu_ratio``.
    """

    per_step: float | None
    by_format: dict[str, float]
    not_counted: tuple[str, ...]
    peak_per_second: dict[str, float] | None
    mfu_ratio: float | None
    absent: str | None

    def __str__(self) -> str:
        if self.per_step is None:
            return f"not known: {self.absent}"
        units = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP"))
        size, unit = next((each for each in units if self.per_step >= each[0]), units[-1])
        least = f" (at least: {listed(self.not_counted)} not counted)" if self.not_counted else ""
        text = f"{self.per_step / size:.3g} {unit} a step{least}"
        if self.mfu_ratio is None or self.peak_per_second is None:
            return f"{text}; no MFU: {self.absent}"
        peaks = ", ".join(f"{name} {peak / 1e12:g} TFLOP/s" for name, peak in self.peak_per_second.items())
        return f"{text}; MFU {'at least ' if least else ''}{percent(self.mfu_ratio)} of the dense peak ({peaks})"


class TemporalBreakdown(Struct, frozen=True):
    """Shares of the time from the first device event to the end of the last; None without device events."""

    idle_ratio: float | None = None
    compute_ratio: float | None = None
    non_compute_ratio: float | None = None


class StreamIdle(Struct, frozen=True):
    """Why a stream was idle between its kernels: shares of its idle time; None if it never was."""

    stream: int
    host_wait_ratio: float | None = None
    kernel_wait_ratio: float | None = None
    other_ratio: float | None = None


class Operator(Struct, frozen=True):
    """The cost of one operator over the trace.

    Attributes:
        device_seconds: time of the kernels and copies that it launched itself, without those of operators inside it.
        device_ratio: share of this time in all device time.
        host_seconds: time on the host without the operators inside it, summed over threads.
        tensor_core_eligible: whether tensor cores can do its work.
        tensor_core_ratio: the share of its kernel time that uses tensor cores.
    """

    name: str
    calls: int
    device_seconds: float
    device_ratio: float | None
    host_seconds: float
    tensor_core_eligible: bool
    tensor_core_ratio: float | None


class Kernel(Struct, frozen=True):
    """All runs of one kernel. Occupancy and blocks per SM are weighted by time."""

    name: str
    calls: int
    device_seconds: float
    device_ratio: float
    mean_seconds: float
    tensor_core: bool
    layout_conversion: bool
    occupancy_ratio: float | None
    blocks_per_sm: float | None


class Copy(Struct, frozen=True):
    """Copies of one kind: HtoD, DtoH, DtoD or PtoP."""

    kind: str
    pageable: bool | None
    calls: int
    seconds: float
    bytes: int | None
    bandwidth_bytes_per_second: float | None


class Synchronization(Struct, frozen=True):
    """Calls within the steps that wait for the device, grouped by their origin.

    Attributes:
        name: name of the call, such as ``cudaStreamSynchronize``.
        operator: the innermost operator around it; ``within``: the outermost; ``call_site``: the user's line.
        calls, seconds: number of calls, and time that the host waited in them.
        to_device: whether they wait for copies to the device.
    """

    name: str
    operator: str | None
    within: str | None
    call_site: str | None
    calls: int
    seconds: float
    to_device: bool


class LaunchBoundStretch(Struct, frozen=True):
    """A stretch in which the device repeatedly waits for the host to launch the next kernel.

    Attributes:
        step: number of the step in which it begins.
        offset_seconds: time from the start of that step.
        seconds: its length; ``idle_ratio``: the share of it in which nothing ran on any stream.
        launches: number of times that the device became idle and then got work.
    """

    step: int
    offset_seconds: float
    seconds: float
    idle_ratio: float
    launches: int


class Suggestion(Struct, frozen=True):
    """One suggested change. ``share_ratio``: the most that it alone could save, as a share of the average step."""

    action: str
    because: str
    share_ratio: float


class LoadingSuggestion(Suggestion, frozen=True):
    """A suggestion about the DataLoader. A trace shows its waits, but not their cause; the advice of a stall does."""


class Trace(Struct, frozen=True):
    """All figures of a trace file.

    Attributes:
        rank, world_size: rank and world size of the process that recorded it; None if they are neither in the trace nor
            in the file's name.
        device: name of the GPU with most work; ``device_memory_bytes``: its memory; ``peak_memory_bytes``: the
            most that torch had reserved there.
        steps, average: the breakdown into TensorBoard's categories.
        temporal, overlap_ratio, idle: figures that Holistic Trace Analysis defines.
        operators, kernels, memcpy, synchronizations, launch_bound: the largest of each.
        layout_conversions: the ``kernels`` that only change a tensor's layout.
        advice: what to change; the change that saves most is first.
        notes: a sentence for each thing that is missing in the trace.
    """

    file: str
    rank: int | None
    world_size: int | None
    device: str | None
    device_memory_bytes: int | None
    peak_memory_bytes: int | None
    steps: tuple[TraceStep, ...]
    average: Average
    gpu: GpuUsage
    flops: FlopsUsage
    temporal: TemporalBreakdown
    overlap_ratio: float | None
    idle: tuple[StreamIdle, ...]
    operators: tuple[Operator, ...]
    kernels: tuple[Kernel, ...]
    memcpy: tuple[Copy, ...]
    synchronizations: tuple[Synchronization, ...]
    launch_bound: tuple[LaunchBoundStretch, ...]
    layout_conversions: tuple[Kernel, ...]
    advice: tuple[Suggestion, ...]
    notes: tuple[str, ...]
