"""Tracks captures of CUDA graphs in progress in this process, on any thread.

In torch's default capture mode, "global", a capture fails if any thread of the process makes a call that CUDA considers
unsafe, such as the query of an event. Torch only reports captures on the calling thread's own stream. So the start and
the end of every capture are recorded here.

Where the step of an optimizer is captured, a replay of the graph is that step: Python no longer calls the optimizer.
"""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.fast_path import LOOP_CHANGED
from telemetry.attach.patches import around
from telemetry.core.clock import NS, now_ns, sleep
from telemetry.core.weak_map import WeakMap

if TYPE_CHECKING:
    from telemetry.attach.patches import Patches
    from telemetry.attach.step_tracker import StepTracker

_MAX_NS: Final = NS
"""How long the start of a capture waits at most until a call of the agent returns. Such a call takes microseconds."""


class Captures:
    """Tracks the captures.

    Each side first announces what it is about to do and then checks the other side. So no event is used during a
    capture, even if both begin at the same moment.

    Args:
        tracker: gets the steps of optimizers in graphs that are replayed.

    Attributes:
        touching: ident of the thread that makes calls to the device for the agent right now; 0 for none.
    """

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._graphs: WeakMap[None] = WeakMap()
        # The optimizers whose steps a graph contains. They are not kept alive: one may have a reference to its graph.
        self._optimizers: WeakMap[list[weakref.ref[Any]]] = WeakMap()
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
        if "replay" in vars(graph):
            patches.replace(graph, "replay", lambda original: around(original, after=self._replayed))

    def recorded(self, optimizer: object) -> bool:
        """An optimizer has stepped. Returns whether that was only recorded in a graph, by this thread."""
        if not self._graphs or not self._tracker.here:
            return False
        for graph in self._graphs.objects():
            captured = self._optimizers.get(graph) or []
            self._optimizers[graph] = [*captured, weakref.ref(optimizer)]
        return True

    def _replayed(self, graph: Any, _noted: None, failed: bool) -> None:  # noqa: FBT001
        captured = self._optimizers.get(graph)
        if failed or captured is None:
            return
        tracker = self._tracker
        try:
            for reference in captured:
                optimizer = reference()
                if optimizer is None:
                    tracker.optimizer_steps += 1
                else:
                    tracker.optimizer.count(optimizer)
        except Exception as error:
            tracker.fault(error)

    def _begin(self, graph: Any) -> None:
        if self._tracker.here:
            self._tracker.fast_path.disable(LOOP_CHANGED)  # the steps of optimizers are to be seen
        self._optimizers.discard(graph)
        self._graphs[graph] = None
        deadline = now_ns() + _MAX_NS
        while self.touching not in {0, get_ident()} and now_ns() < deadline:
            sleep(0.0001)

    def _begun(self, graph: Any, _noted: None, failed: bool) -> None:  # noqa: FBT001
        if failed:
            self._graphs.discard(graph)

    def _ended(self, graph: Any, _noted: None, _failed: bool) -> None:  # noqa: FBT001
        self._graphs.discard(graph)
