"""Recognises an object by its type only: its attributes prove nothing, and reading one may raise."""

from __future__ import annotations

import sys
import weakref
from typing import Any


class Wrapper:
    """A wrapper around a watched object (``_telemetry_object``), or around an iterator of ``_telemetry_source``."""

    __slots__ = ("__weakref__", "_telemetry_object", "_telemetry_source")

    _telemetry_object: Any
    _telemetry_source: Any


def origin(candidate: object) -> weakref.ref[Any] | None:
    """A weak reference to the object that was passed to ``watch()``.

    Args:
        candidate: its wrapper, or an iterator of the wrapper. For anything else the result is None.
    """
    if not issubclass(type(candidate), Wrapper):
        return None
    wrapper: Any = candidate
    if wrapper._telemetry_source is not None:
        wrapper = wrapper._telemetry_source
    try:
        return weakref.ref(wrapper._telemetry_object)
    except TypeError:  # some objects, such as a list, do not support weak references
        return weakref.ref(wrapper)


def unwrapped(candidate: Any) -> Any:
    """The object inside a wrapper; anything else unchanged."""
    return candidate._telemetry_object if issubclass(type(candidate), Wrapper) else candidate


def is_loader(candidate: object) -> bool:
    """Whether an object is a ``DataLoader`` of torch or of a subclass."""
    return _is_a(candidate, "DataLoader")


def is_loader_iterator(candidate: object) -> bool:
    """Whether an object is an iterator of a ``DataLoader``, including torchdata's."""
    return _is_a(candidate, "_BaseDataLoaderIter")


def own_value(candidate: Any, name: str, default: Any = None) -> Any:
    """An attribute of an object that no code of its class computes, as ``vars`` has it, without making it a dictionary.

    With a dictionary, Python takes longer for each attribute of the object: 0.15 us more for torch's own part of
    ``next()`` (`benchmarks/`, hot; Python 3.11).

    Args:
        candidate: the object.
        name: the attribute.
        default: the result if the object has no such attribute.
    """
    if any(name in vars(kind) for kind in type(candidate).__mro__):
        return vars(candidate).get(name, default)  # a property, or a default of the class
    try:
        return object.__getattribute__(candidate, name)  # not the class's own
    except AttributeError:
        return default


def workers_of(candidate: Any) -> list[Any]:
    """The workers of a ``DataLoader``'s iterator, processes or threads; empty for anything else."""
    workers = own_value(candidate, "_workers") if is_loader_iterator(candidate) else None
    return workers if isinstance(workers, list) else []


def batch_size_of(candidate: Any) -> int | None:
    """The batch size of a ``DataLoader``'s iterator; None if another sampler than torch's makes its batches."""
    sampler = own_value(candidate, "_index_sampler") if is_loader_iterator(candidate) else None
    size = vars(sampler).get("batch_size") if _is_a(sampler, "BatchSampler", "torch.utils.data.sampler") else None
    return size if isinstance(size, int) else None


def _is_a(candidate: object, name: str, module: str = "torch.utils.data.dataloader") -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and issubclass(type(candidate), kind)
