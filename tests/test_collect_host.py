"""CPU and memory of the machine."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from telemetry.sources.proc import HostSource


def times(user: float, idle: float, iowait: float) -> SimpleNamespace:
    return SimpleNamespace(user=user, nice=1.0, system=20.0, idle=idle, iowait=iowait, irq=6.0, softirq=7.0, steal=3.0)


def test_the_use_of_the_cores_between_two_readings(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_times", lambda: times(user=100.0, idle=400.0, iowait=50.0))
    source = HostSource()
    assert source.read().cpu_ratio is None
    monkeypatch.setattr(psutil, "cpu_times", lambda: times(user=130.0, idle=400.0, iowait=120.0))
    assert source.read().cpu_ratio == pytest.approx(30 / 100)


def test_memory_in_use_is_what_is_not_available(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=600))
    sample = HostSource().read()
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (400, 1000)
