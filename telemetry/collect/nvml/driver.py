"""Calls of the NVML binding.

The only module that imports ``pynvml``, the binding of the package ``nvidia-ml-py``. The import happens on the thread
that makes the driver, not on the sampling thread: a child forked during an import inherits the lock of that module
without the thread that would release it, and hangs when it imports the module itself.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

from telemetry.collect.nvml.device import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    LIBRARY_NOT_FOUND,
    NoGpuError,
    NvmlError,
)
from telemetry.core.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class NvmlDriver:
    """Calls the binding, converts its errors, and records which call is running.

    Attributes:
        binding: the ``pynvml`` module, or the error of its import.
        running: name of the running function and its start in monotonic ns; None between calls.
    """

    def __init__(self, clock: Callable[[], int] = now_ns) -> None:
        self.binding: Any = _binding()
        self.running: tuple[str, int] | None = None
        self._clock = clock
        self._initialised = False

    def open(self) -> None:
        """Load the library and initialise it, once.

        Raises:
            NoGpuError: there is no driver on this machine.
            NvmlError: the driver does not initialise.
        """
        if self._initialised:
            return
        if isinstance(self.binding, ImportError):
            raise NoGpuError(f"the package nvidia-ml-py is not installed: {self.binding}")
        try:
            self.call("nvmlInit")  # NVML counts these calls, so other users of NVML in this process are not affected
        except NvmlError as error:
            if error.code == LIBRARY_NOT_FOUND:
                raise NoGpuError("no NVIDIA driver: libnvidia-ml.so.1 is missing") from error
            if error.code == DRIVER_NOT_LOADED:
                raise NoGpuError("no NVIDIA driver: its kernel module is not loaded") from error
            raise
        self._initialised = True

    def close(self) -> None:
        """Undo ``open``."""
        if self._initialised:
            self._initialised = False
            try:
                self.call("nvmlShutdown")
            except NvmlError:
                return  # the driver is gone, so there is nothing to shut down

    def call(self, function: str, *args: Any) -> Any:
        """Run one function of the binding.

        Raises:
            NvmlError: the function failed, or this version of the binding does not have it.
        """
        run = getattr(self.binding, function, None)
        if run is None:
            raise NvmlError(function, FUNCTION_NOT_FOUND, "not in this version of nvidia-ml-py")
        self.running = (function, self._clock())
        try:
            return run(*args)
        except self.binding.NVMLError as error:
            raise NvmlError(function, error.value, str(error)) from None
        finally:
            self.running = None


def _binding() -> ModuleType | ImportError:
    codecs.lookup("ascii")  # the binding's calls import this codec, so import it here, too
    try:
        import pynvml
    except ImportError as error:
        return error.with_traceback(None)
    return pynvml  # type: ignore[no-any-return]
