"""Helpers that make a part of the agent fail and check that the training is unharmed."""

from __future__ import annotations

from faults.processes import fetch, value, wait_for


class Broken(Exception):
    """The error that is raised in a part of the agent."""


def break_(*_, **__):
    raise Broken("injected")


def counted(agent, source: str) -> int:
    """Wait until the metrics count a failure of this source. Returns the count."""
    return wait_for(
        lambda: value(fetch(agent.metrics_url), "telemetry_errors_total", source=source),
        f"errors of {source} are counted, of {agent.errors.counts}",
    )


def break_seam(monkeypatch, agent, seam: str) -> None:
    """Replace one method by `break_`. If the object has slots, its class is replaced."""
    owner: object = agent
    *path, name = seam.split(".")
    for part in path:
        owner = owner[part] if isinstance(owner, dict) else getattr(owner, part)
    target = owner if hasattr(owner, "__dict__") else type(owner)
    monkeypatch.setattr(target, name, break_)


# -- on the training thread --------------------------------------------------------------------------------------

HOOKS = [
    "tracker.request",
    "tracker.delivered",
    "tracker.failed",
    "tracker.iteration",
    "tracker.iterated",
    "tracker.loaders.register",
    "tracker.loaders.delivered",
    "tracker.loaders.known",
    "tracker.mark_request",
    "tracker.ring.push",
    "attachment.optimizer.stepped",
    "tracker.enter_phase",
    "tracker.exit_phase",
    "tracker.enter_step",
    "tracker.exit_step",
    "tracker.switch",
    "tracker._enter_evaluation",
]
