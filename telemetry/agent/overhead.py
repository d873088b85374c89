"""The cost of the agent itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from telemetry.core.clock import NS, thread_time

if TYPE_CHECKING:
    from telemetry.agent.collector_poller import CollectorPoller
    from telemetry.attach.step_tracker import StepTracker


class HasThread(Protocol):
    """A part of the agent with a thread of its own."""

    @property
    def cpu_seconds(self) -> float:
        """CPU time of that thread."""


class Overhead:
    """The cost in seconds, by thread.

    Args:
        tracker: measures the hooks on the training thread.
        collectors: the collectors, some of which have their own threads.

    Attributes:
        node: the endpoint, which has its own threads; else None.
        job: the link to other nodes, which has its own thread; else None.
        figures: the sinks, which have their own thread.
        agent_thread_seconds: CPU time of the agent thread.
    """

    def __init__(self, tracker: StepTracker, collectors: CollectorPoller) -> None:
        self._tracker = tracker
        self._collectors = collectors
        self.node: HasThread | None = None
        self.job: HasThread | None = None
        self.figures: HasThread | None = None
        self.agent_thread_seconds = 0.0

    def measure(self) -> None:
        """Read the CPU time of this thread, the agent's."""
        self.agent_thread_seconds = thread_time()

    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds on the training thread, and CPU seconds of the agent's own threads."""
        endpoint = self.node.cpu_seconds if self.node is not None else 0.0
        job = self.job.cpu_seconds if self.job is not None else 0.0
        sinks = self.figures.cpu_seconds if self.figures is not None else 0.0
        return {
            "training": self._tracker.overhead_ns / NS,
            "agent": self.agent_thread_seconds + self._collectors.cpu_seconds + endpoint + job + sinks,
        }
