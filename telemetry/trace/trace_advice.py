"""What to change, and the share of the step that it could save. Each change needs a reason that this trace shows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.trace.intervals import SECONDS_PER_US
from telemetry.util.text import megabytes, milliseconds, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from telemetry.trace.avoidable_time import AvoidableTime

_MIN_SHARE: Final = 0.005
"""A change that saves less than this share of the step is not worth a person's time."""

_MIN_LOADING_SHARE: Final = 0.02
_HALF_PRECISION_SAVES: Final = 0.5
"""The share of a kernel's time that half precision saves on tensor cores. A low estimate: their peak is 8 times as
fast."""

_UINT8_SAVES: Final = 0.75
"""The share of a float32 tensor's bytes that uint8 saves."""

_FIRST_WITH_TENSOR_CORES: Final = 7
_MAX_MEMORY_USED: Final = 0.5
_USABLE_MEMORY: Final = 0.9
_MAX_BATCH_FACTOR: Final = 4.0
_MAX_WORKER_LOAD: Final = 0.8


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change.

    Attributes:
        action: what to do.
        because: what this trace shows.
        share_ratio: the share of the average step that this change alone could save, at most.
    """

    action: str
    because: str
    share_ratio: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the trace tells about the device; None where it does not tell."""

    compute_major: int | None
    memory_bytes: int | None
    reserved_bytes: int | None


def advise(lost: AvoidableTime, average: Mapping[str, float], hardware: Hardware) -> tuple[Suggestion, ...]:
    """All changes that this trace gives a reason for. The change that saves most is first.

    Args:
        lost: the avoidable time of the trace.
        average: shares of the average step by category.
        hardware: the device that it ran on.
    """
    if lost.steps <= 0:
        return ()
    found = [
        *_loading(lost, average),
        *_copying(lost),
        *_batch(average, hardware),
        *_precision(lost, hardware),
        *_layout(lost),
        *_launching(lost),
        *_gradients(lost),
        *_waiting(lost),
    ]
    worth = [each for each in found if each.share_ratio >= _MIN_SHARE]
    return tuple(sorted(worth, key=lambda each: -each.share_ratio))


def _loading(lost: AvoidableTime, average: Mapping[str, float]) -> Iterator[Suggestion]:
    share = average["DataLoader"]
    if share < _MIN_LOADING_SHARE or lost.single_process is None:
        return
    waits = f"{_ms(share * lost.steps / lost.count)} of every {_ms(lost.steps / lost.count)} are spent in next()"
    if lost.single_process:
        workers = max(2, math.ceil(share / max(1e-3, 1 - share) / _MAX_WORKER_LOAD))
        yield Suggestion(
            f"load batches in worker processes: DataLoader(num_workers={workers})",
            f"the training thread loads each batch itself: {waits}",
            share,
        )
    else:
        action = "give the DataLoader more workers or cheaper transforms; persistent_workers=True if epochs are short"
        yield Suggestion(action, f"the workers do not keep up: {waits}", share)


def _copying(lost: AvoidableTime) -> Iterator[Suggestion]:
    if lost.pageable_bytes:
        share = lost.pageable / lost.steps
        because = (
            f"{megabytes(lost.pageable_bytes / lost.count)} a step are copied to the GPU from pageable memory, and "
            f"no kernel runs for {_ms(lost.pageable / lost.count)} of that"
        )
        yield Suggestion(
            "pin batches and copy them with non_blocking=True: DataLoader(pin_memory=True)", because, share
        )
    if lost.copy_wait_calls and not lost.pageable_bytes:
        share = lost.copy_waits / lost.steps
        because = (
            f"the host waits for the end of pinned copies {lost.copy_wait_calls / lost.count:.1f} times a step, "
            f"{_ms(lost.copy_waits / lost.count)} of it with no kernel running"
        )
        yield Suggestion("copy with .to(device, non_blocking=True): the batch is pinned already", because, share)
    if lost.copied_bytes and lost.float_bytes > lost.copied_bytes / 2:
        share = _UINT8_SAVES * lost.copying / lost.steps
        because = (
            f"{megabytes(lost.float_bytes / lost.count)} of floats a step are copied to the GPU, and no kernel runs "
            f"for {_ms(lost.copying / lost.count)} of that; as uint8 they are a quarter"
        )
        yield Suggestion("send uint8 and convert on the GPU, if these are images", because, share)


def _batch(average: Mapping[str, float], hardware: Hardware) -> Iterator[Suggestion]:
    memory, reserved = hardware.memory_bytes, hardware.reserved_bytes
    if not memory or not reserved or reserved / memory > _MAX_MEMORY_USED:
        return
    factor = min(_MAX_BATCH_FACTOR, _USABLE_MEMORY * memory / reserved)
    host = average["Runtime"] + average["CPU Exec"] + average["Other"]
    because = (
        f"{percent(1 - reserved / memory, 0)} of the GPU's memory is unused, and for {percent(host, 0)} of the step "
        f"the GPU waits for the host; a batch {factor:.1f} times as large does not wait longer"
    )
    yield Suggestion("use a larger batch", because, host * (1 - 1 / factor))


def _precision(lost: AvoidableTime, hardware: Hardware) -> Iterator[Suggestion]:
    if (hardware.compute_major or 0) < _FIRST_WITH_TENSOR_CORES or not lost.eligible:
        return
    because = (
        f"{percent(lost.eligible / lost.kernel, 0)} of the kernel time is in convolutions and matrix products that "
        "tensor cores can do, and does not use them; there half precision is taken to be twice as fast"
    )
    action = "use mixed precision: torch.autocast"
    if (hardware.compute_major or 0) > _FIRST_WITH_TENSOR_CORES:
        action += ', or torch.set_float32_matmul_precision("high")'
    yield Suggestion(action, because, _HALF_PRECISION_SAVES * lost.eligible / lost.steps)


def _layout(lost: AvoidableTime) -> Iterator[Suggestion]:
    if lost.layout_calls:
        because = (
            f"{lost.layout_calls / lost.count:.0f} kernels a step do nothing but change the layout of tensors, "
            f"{_ms(lost.layout / lost.count)}"
        )
        action = "keep model and batch in channels_last: .to(memory_format=torch.channels_last)"
        yield Suggestion(action, because, lost.layout / lost.steps)


def _launching(lost: AvoidableTime) -> Iterator[Suggestion]:
    if lost.launch:
        because = (
            f"the GPU often idles while the host launches kernels one by one: {_ms(lost.launch / lost.count)} a step"
        )
        yield Suggestion("compile the model (torch.compile) or use CUDA graphs", because, lost.launch / lost.steps)


def _gradients(lost: AvoidableTime) -> Iterator[Suggestion]:
    if lost.zero_grad_launches:
        because = (
            f"clearing the gradients launches {lost.zero_grad_launches / lost.count:.0f} kernels a step and takes "
            f"{_ms(lost.zero_grad / lost.count)}"
        )
        yield Suggestion("optimizer.zero_grad(set_to_none=True)", because, lost.zero_grad / lost.steps)


def _waiting(lost: AvoidableTime) -> Iterator[Suggestion]:
    if lost.drain_calls:
        origin = f", most of it from {lost.drain_origin}" if lost.drain_origin else ""
        because = (
            f"{lost.drain_calls / lost.count:.1f} times a step the host waits for the GPU, which then idles for "
            f"{_ms(lost.drained / lost.count)}{origin}"
        )
        action = "remove a synchronisation: no .item(), .cpu() or print of a tensor in every step"
        yield Suggestion(action, because, lost.drained / lost.steps)


def _ms(microseconds: float) -> str:
    return milliseconds(microseconds * SECONDS_PER_US)
