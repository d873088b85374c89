"""Columns that the tables of several dashboards share."""

from __future__ import annotations

from grafana.panels import fair_bad
from grafana.tables import Column


def exposed_wait(expr: str, width: int) -> Column:
    """The exposed wait, as a share of the training loop."""
    return Column("exposed wait", "percentunit", expr, steps=fair_bad(0.1, 0.2), bar=1, width=width)


def lost(name: str, expr: str, width: int) -> Column:
    """The share of its time that a rank loses to stalls."""
    return Column(name, "percentunit", expr, steps=fair_bad(0.1, 0.2), bar=1, width=width)


def sm_activity(expr: str, width: int) -> Column:
    """How much of the GPU worked."""
    return Column("SM activity", "percentunit", expr, bar=1, width=width)


def steps(name: str, expr: str, width: int = 130) -> Column:
    """Steps per second."""
    return Column(name, "short", expr, decimals=2, width=width)
