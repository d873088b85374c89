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
    monkeypatch.setenv("TELEMETRY_END_LINE", "off")
    yield
    telemetry.stop()


@pytest.fixture
def start(tmp_path, capfd):
    """Starts an agent that ticks fast. At the end checks that no thread has printed anything."""

    def started(**settings):
        fast = {"port": 0, "interval_seconds": 0.1, "log_interval_seconds": 0.1, "start_line": False, "end_line": False}
        return telemetry.start(tmp_path / "run", **(fast | settings))

    yield started
    telemetry.stop()
    assert capfd.readouterr() == ("", "")
