"""The NVML source against the real driver, under a real load."""

import time

import pytest

from telemetry.config import Config
from telemetry.doctor import PROBLEM, CheckContext, check_gpu
from telemetry.sources.collector import CollectorError
from telemetry.sources.gpu import GpuSource
from telemetry.sources.nvml import THROTTLE_BITS, Nvml

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.cuda is None, reason="no NVIDIA GPU that torch can use"
    ),
]


def torch_uuid():
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def newest(source):
    try:
        (found,) = source.read()
        return found
    except CollectorError as error:
        return str(error)


def under_load(source, satisfied, seconds=60):
    """Multiply matrices until a sample satisfies. Returns it."""
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    end = time.monotonic() + seconds
    while True:
        for _ in range(50):
            torch.mm(matrix, matrix, out=product)
        torch.cuda.synchronize()
        sample = newest(source)
        if not isinstance(sample, str) and satisfied(sample):
            return sample
        assert time.monotonic() < end, f"not within {seconds} s: {sample}"


@pytest.fixture
def source():
    torch.cuda.init()
    made = GpuSource(Nvml(), lambda: [torch_uuid()], interval_seconds=0.5)
    yield made
    made.close()


def test_it_finds_the_device_of_torch(source):
    sample = under_load(source, lambda sample: True)
    assert sample.uuid.partition("-")[2].lower() == torch_uuid().lower()
    assert torch.cuda.get_device_name() in sample.name


def test_a_load_is_seen(source):
    ready = lambda sample: (sample.utilization_ratio or 0) > 0.5
    sample = under_load(source, ready)
    assert sample.utilization_ratio <= 1.0
    assert sample.power_watts is None or sample.power_watts > 10
    assert sample.temperature_celsius is None or 0 < sample.temperature_celsius < 120
    assert sample.sm_clock_hertz is None or 1e8 < sample.sm_clock_hertz < 1e10
    assert sample.throttled is None or set(sample.throttled) <= set(THROTTLE_BITS)


def test_memory_agrees_with_torch(source):
    ballast = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    sample = under_load(source, lambda sample: (sample.memory_used_bytes or 0) > ballast.nbytes)
    assert torch.cuda.memory_reserved() <= sample.memory_used_bytes <= sample.memory_total_bytes
    _free, total = torch.cuda.mem_get_info()
    assert 0.9 * total <= sample.memory_total_bytes <= 1.2 * total


def test_the_sms_are_seen_at_work(source):
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("no GPM before Hopper, nor on every GPU after it")
    sample = under_load(source, lambda sample: (sample.sm_active_ratio or 0) > 0.5)
    assert sample.sm_active_source == "gpm"
    assert 0 < sample.sm_occupancy_ratio <= 1
    assert 0 < sample.tensor_active_ratio <= 1
    assert 0 <= sample.memory_bandwidth_ratio <= 1


def test_the_doctor_sees_it():
    torch.cuda.init()
    name = torch.cuda.get_device_name()
    found = list(check_gpu(CheckContext(Config.load({}, environ={}))))
    assert any(status != PROBLEM and name in text for status, text in found), found
