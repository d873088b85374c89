"""What to change, and the share of the step that it could win back: only where this trace shows the reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from telemetry.snapshot.reading.facts import Facts

_WORTH_IT: Final = 0.005
"""Less than this share of the step is not worth a person's time."""

_LOADING: Final = 0.02
_HALF_PRECISION: Final = 0.5
"""The share of a kernel's time that half precision saves on tensor cores, taken low: their peak is 8 times as fast."""

_UINT8: Final = 0.75
"""The share of a float32 tensor that need not be copied as uint8."""

_FIRST_WITH_TENSOR_CORES: Final = 7
_MEMORY_UNUSED: Final = 0.5
_MEMORY_USABLE: Final = 0.9
_LARGEST_FACTOR: Final = 4.0
_LOADER_HEADROOM: Final = 0.8


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change.

    Attributes:
        action: what to do.
        because: what this trace shows.
        share_ratio: of the average step that it could win back, at most, taken alone.
    """

    action: str
    because: str
    share_ratio: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the trace says of the device; None where it does not."""

    compute_major: int | None
    memory_bytes: int | None
    reserved_bytes: int | None


def advise(facts: Facts, average: Mapping[str, float], hardware: Hardware) -> tuple[Suggestion, ...]:
    """All changes that this trace gives a reason for, the one that wins most first.

    Args:
        facts: of the trace.
        average: ratios of the average step by category.
        hardware: what it ran on.
    """
    if facts.steps <= 0:
        return ()
    found = [
        *_loading(facts, average),
        *_copying(facts),
        *_batch(average, hardware),
        *_precision(facts, hardware),
        *_layout(facts),
        *_launching(facts),
        *_gradients(facts),
        *_waiting(facts),
    ]
    worth = [each for each in found if each.share_ratio >= _WORTH_IT]
    return tuple(sorted(worth, key=lambda each: -each.share_ratio))


def _loading(facts: Facts, average: Mapping[str, float]) -> Iterator[Suggestion]:
    share = average["DataLoader"]
    if share < _LOADING or facts.single_process is None:
        return
    waits = f"{_ms(share * facts.steps / facts.count)} of every {_ms(facts.steps / facts.count)} are spent in next()"
    if facts.single_process:
        workers = max(2, math.ceil(share / max(1e-3, 1 - share) / _LOADER_HEADROOM))
        yield Suggestion(
            f"load batches in worker processes: DataLoader(num_workers={workers})",
            f"the training thread loads each batch itself: {waits}",
            share,
        )
    else:
        action = "give the DataLoader more workers or cheaper transforms; persistent_workers=True if epochs are short"
        yield Suggestion(action, f"the workers do not keep up: {waits}", share)


def _copying(facts: Facts) -> Iterator[Suggestion]:
    if facts.pageable_bytes:
        share = facts.pageable / facts.steps
        because = (
            f"{_mb(facts.pageable_bytes / facts.count)} a step are copied to the GPU from pageable memory, and no "
            f"kernel runs for {_ms(facts.pageable / facts.count)} of that"
        )
        yield Suggestion(
            "pin batches and copy them with non_blocking=True: DataLoader(pin_memory=True)", because, share
        )
    if facts.copy_wait_calls and not facts.pageable_bytes:
        share = facts.copy_waits / facts.steps
        because = (
            f"the host waits for the end of pinned copies {facts.copy_wait_calls / facts.count:.1f} times a step, "
            f"{_ms(facts.copy_waits / facts.count)} of it with no kernel running"
        )
        yield Suggestion("copy with .to(device, non_blocking=True): the batch is pinned already", because, share)
    if facts.copied_bytes and facts.float_bytes > facts.copied_bytes / 2:
        share = _UINT8 * facts.copying / facts.steps
        because = (
            f"{_mb(facts.float_bytes / facts.count)} of floats a step are copied to the GPU, and no kernel runs for "
            f"{_ms(facts.copying / facts.count)} of that; as uint8 they are a quarter"
        )
        yield Suggestion("send uint8 and convert on the GPU, if these are images", because, share)


def _batch(average: Mapping[str, float], hardware: Hardware) -> Iterator[Suggestion]:
    memory, reserved = hardware.memory_bytes, hardware.reserved_bytes
    if not memory or not reserved or reserved / memory > _MEMORY_UNUSED:
        return
    factor = min(_LARGEST_FACTOR, _MEMORY_USABLE * memory / reserved)
    host = average["Runtime"] + average["CPU Exec"] + average["Other"]
    because = (
        f"{100 * (1 - reserved / memory):.0f} % of the GPU's memory is unused, and for {100 * host:.0f} % of the step "
        f"the GPU waits for work that a batch {factor:.1f} times as large would need no more often"
    )
    yield Suggestion("use a larger batch", because, host * (1 - 1 / factor))


def _precision(facts: Facts, hardware: Hardware) -> Iterator[Suggestion]:
    if (hardware.compute_major or 0) < _FIRST_WITH_TENSOR_CORES or not facts.eligible:
        return
    because = (
        f"{100 * facts.eligible / facts.kernel:.0f} % of the kernel time is in convolutions and matrix products that "
        "tensor cores can do, and does not use them; there half precision is taken to be twice as fast"
    )
    action = "use mixed precision: torch.autocast"
    if (hardware.compute_major or 0) > _FIRST_WITH_TENSOR_CORES:
        action += ', or torch.set_float32_matmul_precision("high")'
    yield Suggestion(action, because, _HALF_PRECISION * facts.eligible / facts.steps)


def _layout(facts: Facts) -> Iterator[Suggestion]:
    if facts.layout_calls:
        because = (
            f"{facts.layout_calls / facts.count:.0f} kernels a step do nothing but change the layout of tensors, "
            f"{_ms(facts.layout / facts.count)}"
        )
        action = "keep model and batch in channels_last: .to(memory_format=torch.channels_last)"
        yield Suggestion(action, because, facts.layout / facts.steps)


def _launching(facts: Facts) -> Iterator[Suggestion]:
    if facts.launch:
        because = (
            "the GPU runs dry again and again while the host launches kernels one by one: "
            f"{_ms(facts.launch / facts.count)} a step"
        )
        yield Suggestion("compile the model (torch.compile) or use CUDA graphs", because, facts.launch / facts.steps)


def _gradients(facts: Facts) -> Iterator[Suggestion]:
    if facts.zero_grad_launches:
        because = (
            f"clearing the gradients launches {facts.zero_grad_launches / facts.count:.0f} kernels a step and takes "
            f"{_ms(facts.zero_grad / facts.count)}"
        )
        yield Suggestion("optimizer.zero_grad(set_to_none=True)", because, facts.zero_grad / facts.steps)


def _waiting(facts: Facts) -> Iterator[Suggestion]:
    if facts.drain_calls:
        origin = f", most of it from {facts.drain_origin}" if facts.drain_origin else ""
        because = (
            f"{facts.drain_calls / facts.count:.1f} times a step the host waits for the GPU, which then idles for "
            f"{_ms(facts.drained / facts.count)}{origin}"
        )
        action = "remove a synchronisation: no .item(), .cpu() or print of a tensor in every step"
        yield Suggestion(action, because, facts.drained / facts.steps)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms"


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"
