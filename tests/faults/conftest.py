"""A clean start and end for every test of this folder."""

from __future__ import annotations

import os

import pytest

import telemetry


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TELEMETRY_") or name in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
            monkeypatch.delenv(name)
    yield
    telemetry.stop()
