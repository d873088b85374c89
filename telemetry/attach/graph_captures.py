"""Tracks captures of CUDA graphs in progress in this process, on any thread.

In torch's default capture mode, "global", a capture fails if any thread of the process makes a call that CUDA considers
unsafe, such as the query of an event. Torch only reports captures on the calling thread's own stream. So the start and
the end of every capture are recorded here.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.patches import around
from telemetry.core.clock import NS, now_ns, sleep
from telemetry.core.weak_map import WeakMap

if TYPE_CHECKING:
    from telemetry.attach.patches import Patches

_MAX_NS: Final = NS
"""How long the start of a capture waits at most until a call of the agent returns. Such a call takes microseconds."""


class Captures:
    """Tracks the captures.

    Each side first announces what it is about to do and then checks the other side. So no event is used during a
    capture, even if both begin at the same moment.

    Attributes:
        touching: ident of the thread that makes calls to the device for the agent right now; 0 for none.
    """

    def __init__(self) -> None:
        self._graphs: WeakMap[None] = WeakMap()
        self.touching = 0

    @property
    def under_way(self) -> bool:
        """Whether a graph is being captured."""
        return len(self._graphs) > 0

    def patch(self, graph: Any, patches: Patches) -> None:
        """Patch a class of graphs, such as ``torch.cuda.CUDAGraph``, if it has the methods to patch."""
        if graph is None or not {"capture_begin", "capture_end"} <= vars(graph).keys():
            return
        patches.replace(
            graph, "capture_begin", lambda original: around(original, before=self._begin, after=self._begun)
        )
        patches.replace(graph, "capture_end", lambda original: around(original, after=self._ended))

    def _begin(self, graph: Any) -> None:
        self._graphs[graph] = None
        deadline = now_ns() + _MAX_NS
        while self.touching not in {0, get_ident()} and now_ns() < deadline:
            sleep(0.0001)

    def _begun(self, graph: Any, _noted: None, failed: bool) -> None:  # noqa: FBT001
        if failed:
            self._graphs.discard(graph)

    def _ended(self, graph: Any, _noted: None, _failed: bool) -> None:  # noqa: FBT001
        self._graphs.discard(graph)
