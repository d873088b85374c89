"""Which settings of a DataLoader must not be changed from outside, and why.

Some settings change what the loader gives, or break it. What can be seen of the data set and the sampler is checked
here. The rest shows when a trial fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

from telemetry.util.errors import let_pass

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKERS: Final = "num_workers"

_MAX_PARTS: Final = 64
_MAX_DEPTH: Final = 3
_HOST: Final = frozenset({"cpu", "meta"})


def refused(arguments: Mapping[str, Any]) -> tuple[dict[str, str], int]:
    """Settings that must not be changed, each with its reason; and how many workers are safe if that is limited.

    Args:
        arguments: of the call of DataLoader, by name.
    """
    found: dict[str, str] = {}
    max_workers = 0
    dataset = arguments.get("dataset")
    if on_device(list(_attributes(dataset))):
        found[WORKERS] = "the data set holds tensors on a device, which worker processes cannot use"
        found["pin_memory"] = "the data set holds tensors on a device, and only memory of the host can be pinned"
    if _is_iterable(dataset):
        if int(arguments.get(WORKERS) or 0) < 2 and not _asks_for_its_worker(type(dataset)) and WORKERS not in found:
            max_workers = 1
            found[WORKERS] = (
                "the IterableDataset does not call get_worker_info(), so each of several workers would give all items"
            )
        found["in_order"] = "the order of an IterableDataset is its own"
    elif not _is_shuffled(arguments):
        found["in_order"] = "the loader does not shuffle, so the order may matter"
    if callable(getattr(type(dataset), "set_epoch", None)):
        found["persistent_workers"] = "the data set has set_epoch(), which workers that are kept would not see"
    return found, max_workers


def refused_batch(batch: object) -> dict[str, str]:
    """The same, from a batch that the training thread has got."""
    if not on_device([batch]):
        return {}
    return {
        WORKERS: "its batches are tensors on a device, which worker processes cannot make",
        "pin_memory": "its batches are on a device already, and only memory of the host can be pinned",
    }


def on_device(values: list[object]) -> bool:
    """Whether there is a tensor among these values that is not in the host's memory."""
    return any(_device(tensor) not in _HOST for tensor in _tensors(values))


def tensor_bytes(batch: object) -> int:
    """Bytes of the tensors and arrays in a batch."""
    return sum(int(getattr(part, "nbytes", 0)) for part in _parts([batch], 0))


def _tensors(values: list[object]) -> Iterator[Any]:
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    if isinstance(kind, type):
        yield from (part for part in _parts(values, 0) if isinstance(part, kind))


def _device(tensor: Any) -> str:
    try:
        return str(tensor.device.type)
    except Exception as error:  # a subclass of the user's own
        let_pass(error)
        return "cpu"


def _parts(values: Iterable[object], depth: int) -> Iterator[object]:
    """The values in lists, tuples and dictionaries, a few of each."""
    for number, value in enumerate(values):
        if number >= _MAX_PARTS:
            return
        inner: Iterable[object] | None = None
        if isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, (list, tuple)):
            inner = value
        if inner is None:
            yield value
        elif depth < _MAX_DEPTH:
            yield from _parts(inner, depth + 1)


def _attributes(dataset: object) -> Iterator[object]:
    try:
        yield from list(vars(dataset).values())[:_MAX_PARTS]
    except TypeError:  # it has none
        return


def _is_iterable(dataset: object) -> bool:
    kind = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", None)
    return isinstance(kind, type) and isinstance(dataset, kind)


def _is_shuffled(arguments: Mapping[str, Any]) -> bool:
    """Whether the batches come in random order. A sampler of the user's own may have a reason for its order."""
    if arguments.get("batch_sampler") is not None:
        return False
    sampler = arguments.get("sampler")
    if sampler is None:
        return bool(arguments.get("shuffle"))
    name = type(sampler).__name__
    return "Random" in name or (name == "DistributedSampler" and bool(getattr(sampler, "shuffle", False)))


def _asks_for_its_worker(kind: type) -> bool:
    """Whether a class of data sets divides its items among the workers: one of its functions names get_worker_info."""
    return any(
        "get_worker_info" in names
        for base in kind.__mro__
        for value in vars(base).values()
        for names in _names(getattr(value, "__code__", None))
    )


def _names(code: object) -> Iterator[tuple[str, ...]]:
    """The names that a function uses, and those of the functions inside it."""
    if isinstance(code, CodeType):
        yield code.co_names
        for constant in code.co_consts:
            yield from _names(constant)
