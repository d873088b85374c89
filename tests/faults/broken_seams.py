"""Helpers that break a seam of the agent and check that the training is unharmed."""

from __future__ import annotations

from faults.processes import fetch, value, wait_for


class Broken(Exception):
    """Raised at a seam."""


def break_(*_, **__):
    raise Broken("injected")


def counted(agent, source: str) -> int:
    """Wait until a failure of this source is on the page of metrics; how many."""
    return wait_for(
        lambda: value(fetch(agent.metrics_url), "telemetry_errors_total", source=source),
        f"errors of {source} are counted, of {agent.errors.counts}",
    )


def break_seam(monkeypatch, agent, seam: str) -> None:
    """Put `break_` in the place of one method. A slotted object's class is changed."""
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
    "tracker.sources.register",
    "tracker.sources.delivered",
    "tracker.sources.known",
    "tracker.mark_request",
    "tracker.ring.push",
    "tracker.optimizer.stepped",
    "tracker.scopes.enter_phase",
    "tracker.scopes.exit_phase",
    "tracker.scopes.enter_step",
    "tracker.scopes.exit_step",
    "tracker.switch",
    "tracker._enter_evaluation",
]
