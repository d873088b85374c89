"""Which asynchronous device the training uses. Never imports torch and never initialises a device."""

from __future__ import annotations

import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.hooks.gpu import DeviceStream
from telemetry.util.errors import let_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from telemetry.hooks.tracker import Captures

CUDA: Final = "cuda"

_HOST: Final = frozenset({"cpu", "meta"})
_MODULES: Final = (CUDA, "xpu", "npu", "hpu", "mlu", "musa", "mtia", "maia")
"""Types of devices whose module in torch may report whether the device is initialised."""

_BATCHED: Final = frozenset({"xla", "hpu"})
"""These queue operations and run them later. Their events give the time of recording, not of execution."""


def in_use(trained_on: str | None) -> str | None:
    """The type of the asynchronous device that the training uses, such as ``cuda``; None if the host computes.

    Args:
        trained_on: the type of device that holds the optimizer's parameters; None until it is known.
    """
    if trained_on is not None and trained_on not in _HOST:
        return trained_on
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    for name in _names(torch):
        if _says_yes(getattr(vars(torch).get(name), "is_initialized", None)):
            return name
    if trained_on is None:  # no torch optimizer has stepped yet
        xla = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
        if _says_yes(getattr(xla, "_xla_runtime_is_initialized", None)):
            return "xla"
        return _allocated(torch)
    return None


def _names(torch: ModuleType) -> Iterator[str]:
    yield from _MODULES
    try:
        yield str(torch._C._get_privateuse1_backend_name())  # a device that an extension has added to torch
    except Exception:
        return  # torch is half imported


def _allocated(torch: ModuleType) -> str | None:
    """The accelerator of this torch, if some of its memory is allocated. Used for devices that report no more (MPS)."""
    named = getattr(vars(torch).get("accelerator"), "current_accelerator", None)
    used = getattr(vars(torch).get("_C"), "_accelerator_isAllocatorInitialized", None)
    try:
        device = named() if named is not None else None
        return str(device.type) if device is not None and _says_yes(used) else None
    except Exception as error:
        let_pass(error)
        return None


def _says_yes(question: Callable[[], object] | None) -> bool:
    try:
        return question is not None and question() is True
    except Exception as error:
        let_pass(error)
        return False


class DeviceEvents:
    """Timing events of one type of device. Used only on the training thread.

    Args:
        torch: the module ``torch``.
        name: the type of device.
        captures: the captures in progress; the device must not be used during one.
    """

    def __init__(self, torch: ModuleType, name: str, captures: Captures) -> None:
        self._module: Any = vars(torch).get(name)
        self._generic: Any = vars(torch).get("accelerator")
        self._torch = torch
        self._name = name
        self._captures = captures

    def event(self) -> Any:
        """A new event with timing. Raises what torch raises if the device has no events."""
        if self._name == CUDA:
            return self._module.Event(enable_timing=True)
        return self._torch.Event(device=self._name, enable_timing=True)

    def begin(self) -> DeviceStream | None:
        """Announce calls to the device. Must always be followed by `end`.

        Returns:
            The device and stream of this thread's work; None if no call may be made now.
        """
        self._captures.touching = get_ident()
        if self._captures.under_way:
            return None
        module = self._module
        initialised = getattr(module, "is_initialized", None)
        if initialised is not None and not initialised():
            return None
        capturing = getattr(module, "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            return None
        stream = (module if hasattr(module, "current_stream") else self._generic).current_stream()
        return DeviceStream(stream.device_index, stream.stream_id)

    def end(self) -> None:
        """The calls are over."""
        self._captures.touching = 0


def timed(torch: ModuleType, name: str) -> bool:
    """Whether this torch has events that can time the work of a type of device, as far as torch reports it."""
    if name in _BATCHED:
        return False
    if name == CUDA:
        return True
    module, generic = vars(torch).get(name), vars(torch).get("accelerator")
    streams = hasattr(module, "current_stream") or hasattr(generic, "current_stream")
    return "Event" in vars(torch) and streams
