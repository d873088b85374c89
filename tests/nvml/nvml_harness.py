"""Helpers of the tests of the NVML source: a source above a fake driver, and what it reads."""

import time
from contextlib import contextmanager

from fakes.nvml import Gpu, Mig

from telemetry.sources.collector import CollectorError
from telemetry.sources.nvml import NvmlSource
from telemetry.util import threads

A = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000000"
AB = "GPU-aaaabbbb-0000-0000-0000-000000000000"
M1 = "MIG-11111111-0000-0000-0000-000000000000"
M2 = "MIG-22222222-0000-0000-0000-000000000000"
SECOND = 1_000_000_000
TICKED = "nvmlDeviceGetClockInfo"  # called once in every complete tick


class Clock:
    """Monotonic ns that move with the driver's ticks, 200 ms each, and when told."""

    def __init__(self, state):
        self.state = state
        self.extra_ns = 0

    def __call__(self):
        return self.state.calls[TICKED] * SECOND // 5 + self.extra_ns


@contextmanager
def source(state, uuid=A, environ=None, **settings):
    settings = {"interval_seconds": 0.001, "clock": Clock(state)} | settings
    made = NvmlSource(
        uuid if callable(uuid) else lambda: uuid,
        environ={} if environ is None else environ,
        **settings,
    )
    try:
        yield made
    finally:
        made.close()
        for release in list(state.hang.values()):
            release.set()


def nvml_threads():
    return [name for name in threads.running() if name.startswith("telemetry-nvml")]


def until(met, seconds=20):
    """Wait for something to come true, and return it."""
    end = time.monotonic() + seconds
    while not (value := met()):
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.002)
    return value


def outcome(made):
    """The sample, or the reason why it is missing, as text."""
    try:
        return made.read()
    except CollectorError as error:
        return str(error)


def ticks(state, number=3):
    """Wait for this many complete ticks from now."""
    target = state.calls[TICKED] + number
    until(lambda: state.calls[TICKED] >= target)


def sample(state, made):
    """A sample taken after now, with two ticks before it."""
    until(lambda: not isinstance(outcome(made), str))
    ticks(state)
    return until(lambda: outcome(made) if not isinstance(outcome(made), str) else None)


def reason(made, part):
    """Wait until ``read`` gives this reason."""
    return until(lambda: text if isinstance(text := outcome(made), str) and part in text else None)


def read_one(state, **settings):
    with source(state, **settings) as made:
        return sample(state, made)


# --- MIG


def partitioned(**settings):
    migs = [
        Mig(uuid=M1, gpu_instance=7, memory_used=1 << 30),
        Mig(uuid=M2, gpu_instance=8, memory_used=2 << 30),
    ]
    return Gpu(uuid=B, mig_enabled=True, mig=migs, **settings)
