"""This rank's GPU through AMD SMI: the real binding above a fake `libamd_smi.so`."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fakes import amd as fake
from fakes.amd import NONE_16, NONE_32, NONE_64, Gpu, Library

import telemetry.doctor
from telemetry.model.records import GpuSample
from telemetry.safety import threads
from telemetry.safety.errors import ErrorLog
from telemetry.seams.ring import Ring
from telemetry.seams.tracker import StepTracker
from telemetry.sources.amd import Amd
from telemetry.sources.collector import CollectorError
from telemetry.sources.gpu import GpuSource
from telemetry.sources.polling import CollectorPoller

ADDRESS, OTHER = "0000:c1:00", "0001:c1:00"
IDENTITY = {"amdsmi_get_gpu_device_bdf", "amdsmi_get_gpu_device_uuid"}

FULL = GpuSample(
    index=0, uuid="a-uuid", name="AMD Fake MI300X", utilization_ratio=0.8, utilization_source="amdsmi",
    memory_bandwidth_ratio=0.4, memory_used_bytes=20 << 30, memory_total_bytes=192 << 30, power_watts=717.0,
    power_limit_watts=750.0, energy_joules=61.0, temperature_celsius=61.0, memory_temperature_celsius=48.0,
    sm_clock_hertz=2.1e9, sm_clock_max_hertz=2.1e9, memory_clock_hertz=1.3e9, ecc_corrected_errors_total=12,
    ecc_uncorrected_errors_total=0, pcie_replays_total=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def binding():
    if importlib.util.find_spec("amdsmi") is None:
        pytest.skip("amdsmi is not installed")
    with fake.imported() as library:
        yield library


@pytest.fixture
def library(binding):
    vars(binding).update(vars(Library()))
    yield binding
    for release in binding.hang.values():
        release.set()
    until(lambda: "telemetry-amdsmi" not in threads.running())


def until(met, seconds=20):
    end = time.monotonic() + seconds
    while not (value := met()):
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.002)
    return value


def outcome(made):
    try:
        (found,) = made.read()
        return found
    except CollectorError as error:
        return str(error)


@contextmanager
def source(address=ADDRESS, environ=None, **settings):
    made = GpuSource(Amd(environ or {}), lambda: filter(None, [address]), interval_seconds=0.001, **settings)
    try:
        yield made
    finally:
        made.close()


def read(*args):
    """The first sample, or the first reason that is not a wait for it."""
    with source(*args) as made:
        return until(lambda: found if "no reading yet" not in str(found := outcome(made)) else None)


def test_every_reading_in_base_units(library):
    assert read() == FULL
    library.gpus = [Gpu(current=NONE_16, average=94, limit=750_000_000)]  # an older GPU, and a newer library
    assert read() == replace(FULL, power_watts=94.0)
    assert library.calls["amdsmi_shut_down"] == 0, "the script may use it, too"


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("activity", ["utilization_ratio", "utilization_source", "memory_bandwidth_ratio"]),
        ("power", ["power_watts", "power_limit_watts"]),
        ("temp", ["temperature_celsius", "memory_temperature_celsius"]),
        ("clock", ["sm_clock_hertz", "sm_clock_max_hertz", "memory_clock_hertz"]),
        ("memory_usage", ["memory_used_bytes"]),
        ("energy", ["energy_joules"]),
        ("ecc_count", ["ecc_corrected_errors_total", "ecc_uncorrected_errors_total"]),
    ],
)
def test_a_call_that_fails_leaves_its_values_out(library, function, fields):
    (name,) = [name for name in fake.READINGS if function in name and "ecc_enabled" not in name]
    library.errors = {name: fake.NO_DATA}
    assert read() == replace(FULL, **dict.fromkeys(fields))
    library.errors = dict.fromkeys(fake.READINGS.keys() - IDENTITY, fake.NOT_SUPPORTED)
    assert "NOT_SUPPORTED" in read(), "no reading at all is no sample"


def test_what_a_gpu_does_not_have_is_absent(library):
    library.gpus = [
        Gpu(busy=NONE_16, umc=NONE_32, used=NONE_64, current=0, limit=NONE_32, energy=NONE_64, junction=0,
            memory_celsius=-1, clock=NONE_16, blocks=0)
    ]  # fmt: skip
    kept = "index uuid name memory_total_bytes sm_clock_max_hertz memory_clock_hertz pcie_replays_total".split()
    assert {name for name in GpuSample.__slots__ if getattr(read(), name) is not None} == set(kept)


def test_which_gpu(library):
    library.gpus = [Gpu(), Gpu(domain=1, busy=10)]
    assert (read(OTHER).index, read(OTHER).utilization_ratio) == (1, 0.1)
    assert "knows no GPU with the PCI address 0000:05:00" in read("0000:05:00")
    assert "not known" in read(None)
    library.gpus = [Gpu(), Gpu()]
    assert "partitioned" in read()
    library.gpus = [Gpu()]
    assert read(None) == FULL
    assert "hides them all" in read(None, {"HIP_VISIBLE_DEVICES": ""})
    library.gpus = []
    assert "no GPU is" in read()


def test_without_a_driver_or_the_package(library, monkeypatch):
    library.errors = {"amdsmi_init": fake.DRIVER_NOT_LOADED}
    with source() as made:
        until(lambda: "no AMD driver: amdsmi_init: AMDSMI_STATUS_DRIVER_NOT_LOADED" in str(outcome(made)))
        library.errors = {}
        until(lambda: outcome(made) == FULL)
    monkeypatch.delitem(sys.modules, "amdsmi")
    assert "amdsmi is not installed" in read()


def test_a_call_that_hangs_holds_up_nobody(library):
    release = library.hang["amdsmi_get_power_info"] = threading.Event()
    with source(deadline_seconds=0.01) as made:
        until(lambda: outcome(made) == "an AMD SMI call has not returned for over 0.01 s (amdsmi_get_power_info)")
        assert threads.running().count("telemetry-amdsmi") == 1
        release.set()
        until(lambda: outcome(made) == FULL)


def test_the_agent_reads_the_gpu_of_a_rocm_build(library, monkeypatch):
    """Torch may be imported after the start."""
    at = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=0)
    cuda = SimpleNamespace(device_count=lambda: 1, get_device_properties=lambda _device: at)
    monkeypatch.setattr("telemetry.sources.polling.cuda", lambda: cuda)
    library.gpus = [Gpu(), Gpu(domain=1)]
    poller = CollectorPoller(StepTracker(Ring()), 0.001, ErrorLog())
    try:
        assert "amdsmi" not in list(poller.poll())
        monkeypatch.setattr(torch.version, "hip", "6.4")
        assert "amdsmi" in until(lambda: names if "nvml" not in (names := list(poller.poll())) else None)
        until(lambda: [*poller.poll()] and poller.samples.gpu)
        assert poller.samples.gpu.index == 1
        assert [health.up for health in poller.health() if health.name == "amdsmi"] == [True]
        assert dict(poller.take_log_fields())["gpu"]["utilization_source"] == "amdsmi"
    finally:
        poller.close()


@pytest.mark.parametrize(("version", "status"), [("7.0.2", telemetry.doctor.OK), (None, telemetry.doctor.ABSENT)])
def test_the_doctor_says_whether_amd_gpus_can_be_read(monkeypatch, tmp_path, version, status):
    (tmp_path / "version.py").write_text("hip = '6.4'")
    torch = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(telemetry.doctor.importlib.util, "find_spec", lambda _name: torch)
    monkeypatch.setattr(telemetry.doctor, "version_of", {"amdsmi": version}.get)
    assert [found for found, _ in telemetry.doctor.check_gpu(None)] == [status]
