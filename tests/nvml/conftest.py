"""The fake driver of each test."""

import pytest
from fakes import nvml as fake
from fakes.nvml import State

from tests.nvml.nvml_harness import nvml_threads, until


@pytest.fixture
def state():
    state = State()
    with fake.installed(state):
        yield state
        for release in list(state.hang.values()):
            release.set()
        # A thread of this test must be gone before the next one installs another driver.
        until(lambda: not nvml_threads())
