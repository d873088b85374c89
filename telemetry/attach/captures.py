"""Captures of CUDA graphs that are under way in this process, on whatever thread.

In the capture mode "global", torch's default, a capture fails if any thread of the process makes a call that CUDA
thinks unsafe meanwhile; the query of an event is one. Torch tells a thread about its own stream only. So the beginning
and the end of every capture are noted here.
"""

from __future__ import annotations

import functools
import time
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.frames import forget_frame
from telemetry.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.attach.patches import Patches

_MOST_NS: Final = 1_000_000_000
"""How long the beginning of a capture waits at most for a call of ours to return. Such calls take microseconds."""


class Captures:
    """Follows the captures.

    Either side first says what it is about to do and then looks at the other: so an event is not touched during a
    capture, also where both begin at the same moment.

    Attributes:
        touching: the thread that makes calls to the device for us right now; 0 for none.
    """

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.touching = 0

    @property
    def under_way(self) -> bool:
        """Whether a graph is being captured."""
        return len(self._graphs) > 0

    def patch(self, graph: Any, patches: Patches) -> None:
        """Patch a class of graphs, such as ``torch.cuda.CUDAGraph``, if it has what there is to patch."""
        if graph is None or not {"capture_begin", "capture_end"} <= vars(graph).keys():
            return
        patches.replace(graph, "capture_begin", self._begin)
        patches.replace(graph, "capture_end", self._end)

    def _begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._graphs.add(graph)
            deadline = now_ns() + _MOST_NS
            while self.touching not in {0, get_ident()} and now_ns() < deadline:
                time.sleep(0.0001)
            try:
                return original(graph, *args, **kwargs)
            except BaseException as error:
                self._graphs.discard(graph)
                forget_frame(error)
                raise

        return capture_begin

    def _end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            except BaseException as error:
                forget_frame(error)
                raise
            finally:
                self._graphs.discard(graph)

        return capture_end
