"""The user's own profilers: which are at work, and a word before one begins.

Kineto has one session a process. A second one empties the first, and the one that stops last then ends the process
with a segmentation fault (torch 2.13, sessions on two threads). So ours is never begun beside theirs, and is over
before theirs begins.

Everything that records passes through `torch.autograd.profiler`: `torch.profiler.profile` with its schedules (its
warm-up included, which no public state shows), Lightning's profilers, the autograd profiler and ``emit_nvtx``.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.frames import forget_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from telemetry.attach.patches import Patches

_BEGIN: Final = {
    "profile": ("_prepare_trace", "_start_trace"),
    "emit_nvtx": ("__enter__",),
    "emit_itt": ("__enter__",),
}

_DAEMON_VARIABLE: Final = "KINETO_USE_DAEMON"


class ProfilerWatch:
    """Follows the profilers of the process.

    Args:
        on_error: told of a failure of ours on the way to theirs.

    Attributes:
        before_theirs: called before one of theirs begins, on its thread; returns when ours is over.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self.before_theirs: Callable[[], None] | None = None
        self._on_error = on_error
        self._theirs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._our_thread = 0
        self._enabled: Callable[[], bool] = lambda: False

    def patch(self, module: ModuleType, enabled: Callable[[], bool], patches: Patches) -> None:
        """Patch ``torch.autograd.profiler``. ``enabled``: whether a profiler records on the calling thread."""
        self._enabled = enabled
        for name, beginnings in _BEGIN.items():
            owner = vars(module).get(name)
            if owner is None:
                continue
            for beginning in beginnings:
                patches.replace(owner, beginning, self._begin)
            patches.replace(owner, "__exit__", self._end)

    def theirs(self) -> str | None:
        """Why ours is not to begin on the calling thread; None if it may."""
        if os.environ.get(_DAEMON_VARIABLE):
            return f"{_DAEMON_VARIABLE} is set: profiling is left to the daemon"
        if self.at_work() or self._enabled():
            return "a profiler of the script's own is at work"
        return None

    def at_work(self) -> bool:
        """Whether one of theirs is at work, on whatever thread."""
        return len(self._theirs) > 0

    @contextmanager
    def ours(self) -> Iterator[None]:
        """While this thread begins or ends ours."""
        self._our_thread = threading.get_ident()
        try:
            yield
        finally:
            self._our_thread = 0

    def _begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def begin(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._our_thread:
                try:
                    self._theirs.add(profiler)  # first: from here on ours does not begin
                    if self.before_theirs is not None:
                        self.before_theirs()
                except Exception as error:
                    self._on_error(error)
            try:
                return original(profiler, *args, **kwargs)
            except BaseException as error:
                self._theirs.discard(profiler)
                forget_frame(error)
                raise

        return begin

    def _end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __exit__(profiler: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            try:
                return original(profiler, *args, **kwargs)
            except BaseException as error:
                forget_frame(error)
                raise
            finally:
                self._theirs.discard(profiler)

        return __exit__
