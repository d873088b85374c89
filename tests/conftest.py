"""Fixtures of all tests: an attached tracker whose ledger can be read at any moment, and a running agent."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from torch.utils.data._utils import worker as worker_module

import telemetry
from telemetry.config import Config
from telemetry.log.reader import load
from telemetry.loop.ledger import Accounting, Ledger
from telemetry.model.records import PhaseSpan, Step
from telemetry.safety import threads
from telemetry.safety.errors import ErrorLog
from telemetry.seams.attachment import Attachment
from telemetry.seams.garbage import GarbageTimer
from telemetry.seams.ring import Ring
from telemetry.seams.tracker import StepTracker
from telemetry.util.clock import now_ns
from tests.report_logs import summarize
from tests.start_order import start_order

# Tests that compare stderr are not about the last line; those of the line itself remove this.
os.environ.setdefault("TELEMETRY_END_LINE", "off")

# Kineto writes two lines to stderr for each snapshot, and reads this once in a process.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# No deadline: the duration of an example depends on the machine, not on the code.
settings.register_profile("telemetry", deadline=None)
settings.load_profile("telemetry")


# From Python 3.14 on workers come from a fork server. Without this each of them would import torch, for seconds.
multiprocessing.set_forkserver_preload(["torch.utils.data"])

SHARED_SERVERS = ("stack/cluster", "stack/job")
"""Folders of which all tests run on one worker."""


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # under xdist; within a file, and within such a folder, the order stays
        items.sort(key=lambda item: start_order(item.nodeid))


def pytest_collection_finish():
    """Thousands of collected tests stay alive until the end: no garbage collection has to go through them each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of one file run on one worker: they share fixtures. So do those of a folder that share real servers."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            if file.endswith("frameworks/test_frameworks.py"):
                return nodeid  # a process each, which takes 20 s; nothing is shared
            folder = file.rpartition("/")[0]
            return folder if folder.endswith(SHARED_SERVERS) else file

    config.option.loadscopereorder = False  # it would begin with the files that have most tests: those are quick
    return Together(config, log)


@pytest.fixture(autouse=True, scope="session")
def _forked_workers_end_soon():
    """An iterator that a garbage collection ends cannot wake its workers: each looks after itself, every 5 s.

    Only in workers of this process that are forked. The 5 s are torch's.
    """
    worker_module.MP_STATUS_CHECK_INTERVAL = 0.5


@pytest.fixture
def small_heap():
    """A garbage collection goes through what the test makes, not through what thousands before it have left.

    With that, a collection takes a second and more, and holds the GIL for as long.
    """
    gc.collect()
    gc.freeze()


class Observed:
    """A tracker attached to the real torch, and its accounting, which is read when the test asks for it."""

    def __init__(self) -> None:
        self.tracker, self.errors = StepTracker(Ring()), ErrorLog()
        self.attachment = Attachment(self.tracker, partial(self.errors.note, "attach"))
        self.accounting = Accounting(self.tracker, self.attachment, Config.load({}), self.errors, now_ns())
        self.ledger = self.accounting.ledger
        self.steps: list[Step] = []
        self.phases: list[PhaseSpan] = []
        self.waited_for: str | None = None

    def read(self) -> Ledger:
        """Bring the ledger up to now, as the agent thread does once a second."""
        self.accounting.update()
        self.attachment.optimizer.read_new()
        source = self.accounting.batches.take_source()
        self.waited_for = source and source.kind
        self.steps += self.accounting.take_steps()
        self.phases += self.ledger.take_phases()
        assert self.tracker.ring.closed == self.accounting.steps_total, "the training thread counts steps as the ledger"
        self.check_sum()
        return self.ledger

    @property
    def garbage(self) -> GarbageTimer:
        """The collections up to now."""
        self.tracker.garbage.read()
        return self.tracker.garbage

    def check_sum(self) -> None:
        assert sum(self.ledger.ns.values()) == self.ledger.at_ns - self.ledger.start_ns
        assert not self.errors.counts, self.errors.counts
        assert self.tracker.errors == 0, self.tracker.last_error


@pytest.fixture
def observed():
    watched = Observed()
    watched.attachment.attach()
    yield watched
    watched.attachment.detach()


@pytest.fixture
def agent(tmp_path: Path):
    running = telemetry.start(
        tmp_path / "run", port=0, interval_seconds=0.1, log_interval_seconds=0.2, start_line=False
    )
    yield running
    telemetry.stop()


@pytest.fixture
def run(tmp_path):
    """Starts an agent; the result is called at the end and returns the rank's entry of the report."""
    telemetry.start(tmp_path / "run", port="off", interval_seconds=0.1, start_line=False)

    def ended() -> dict:
        telemetry.stop()
        (rank,) = summarize(load(tmp_path / "run"))["ranks"]
        return rank

    yield ended
    telemetry.stop()


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    telemetry.stop()
    for thread in [*threads._running.values()]:
        if thread.name == "telemetry-request":  # its client has the answer; the thread is about to end
            thread.join(10)
    ours = threads.running() + [t.name for t in threading.enumerate() if t.name.startswith("telemetry-")]
    assert ours in ([], ["telemetry-nvml"]), ours


@pytest.fixture
def taken(observed, tmp_path):
    """A capture on the real hooks; see `snapshot_recording`."""
    from tests.snapshot_recording import Taken

    return Taken(observed, tmp_path)
