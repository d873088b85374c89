"""What the agent itself costs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from telemetry.core.clock import NS

if TYPE_CHECKING:
    from telemetry.agent.job_link import JobLink
    from telemetry.agent.sampler import Sampler
    from telemetry.attach.step_tracker import StepTracker
    from telemetry.publish.node import NodeService


class Overhead:
    """Seconds by thread.

    Args:
        tracker: measures the hooks on the training thread.
        sampler: has threads of its own.

    Attributes:
        node: serves the endpoint, on threads of its own; None where there is none.
        job: talks to the other nodes, on a thread of its own; None where there is none.
        agent_thread_seconds: CPU time of the agent thread.
    """

    def __init__(self, tracker: StepTracker, sampler: Sampler) -> None:
        self._tracker = tracker
        self._sampler = sampler
        self.node: NodeService | None = None
        self.job: JobLink | None = None
        self.agent_thread_seconds = 0.0

    def measure(self) -> None:
        """Read the CPU time of this thread, the agent's."""
        self.agent_thread_seconds = time.thread_time()

    def seconds(self) -> dict[str, float]:
        """On the training thread, by the wall clock; of the agent's own threads, CPU time."""
        endpoint = self.node.cpu_seconds if self.node is not None else 0.0
        job = self.job.cpu_seconds if self.job is not None else 0.0
        return {
            "training": self._tracker.overhead_ns / NS,
            "agent": self.agent_thread_seconds + self._sampler.cpu_seconds + endpoint + job,
        }
