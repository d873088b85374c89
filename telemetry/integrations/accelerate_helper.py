"""A helper for training loops with accelerate.

    from telemetry.integrations.accelerate_helper import AccelerateTelemetry

    helper = AccelerateTelemetry(accelerator, every_steps=50)
    for step, batch in enumerate(loader):
        ...
        helper.log(step)

It gives the figures to the trackers of ``Accelerator(log_with=...)``. ``telemetry run`` works without it.
"""

from __future__ import annotations

from typing import Any

from telemetry.api import phase
from telemetry.integrations import prefixed, tell_tokens


class AccelerateTelemetry:
    """Logs the figures of the agent with accelerate's trackers; without an agent, nothing.

    Args:
        accelerator: the accelerator, after ``init_trackers``.
        every_steps: how often figures are logged.

    Raises:
        ValueError: ``every_steps`` is less than 1.
    """

    def __init__(self, accelerator: Any, *, every_steps: int = 50) -> None:
        if every_steps < 1:
            raise ValueError(f"every_steps is at least 1, not {every_steps}")
        self._accelerator = accelerator
        self._every = every_steps

    def log(self, step: int, *, tokens: int = 0) -> None:
        """Log the figures if it is time. Call it once a step.

        Args:
            step: the step, as the script counts it for its own figures.
            tokens: tokens that this rank has trained on in this step; 0 if they are not counted.
        """
        tell_tokens(tokens)
        if step % self._every == 0:
            figures = prefixed()
            if figures:
                self._accelerator.log(dict(figures), step=step)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """``accelerator.save_state``, all of it as one checkpoint."""
        with phase("checkpoint"):
            return self._accelerator.save_state(*args, **kwargs)
