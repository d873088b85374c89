"""The files of a worker stay open, and are never another's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from telemetry.collect import worker_files
from telemetry.collect.worker_files import FilesOfWorkers, WorkerFiles
from telemetry.sources.proc import read_stat


@pytest.fixture
def process():
    """It has run for a while, because the kernel counts its run time at the first timer tick."""
    script = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        started.stdout.readline()
        yield started
        started.kill()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_read_is_that_of_the_process(process, keep):
    files = WorkerFiles(process.pid, keep=keep)
    for _ in range(2):
        assert files.stat().start_ticks == read_stat(process.pid).start_ticks
        assert files.schedule(process.pid).run_ns > 0
        assert files.io().written_bytes >= 0
    files.close()


@pytest.mark.parametrize("keep", [True, False])
def test_a_process_that_is_gone_has_no_figures(process, keep):
    files = WorkerFiles(process.pid, keep=keep)
    assert files.stat() is not None
    process.kill()
    process.wait()
    assert files.stat() is None
    assert files.stat() is None


@pytest.mark.parametrize("keep", [True, False])
def test_a_process_of_others_is_no_worker(keep):
    files = WorkerFiles(1, keep=keep)
    assert files.stat() is None
    assert files.stat() is None


def test_closed_files_are_opened_again_and_others_left_alone(process, tmp_path):
    files = WorkerFiles(process.pid, keep=True)
    files.stat()
    numbers = [file.number for file in files._files.values()]
    for number in numbers:
        os.close(number)
    theirs = [os.open(tmp_path / str(number), os.O_CREAT | os.O_RDWR) for number in numbers]
    assert sorted(theirs) == sorted(numbers)
    assert files.stat().start_ticks == read_stat(process.pid).start_ticks
    files.close()
    for number in theirs:
        os.close(number)  # raises, had we closed it


def test_few_workers_have_open_files(process, monkeypatch):
    monkeypatch.setattr(worker_files, "MAX_WORKERS", 1)
    files, before = FilesOfWorkers(), descriptors()
    files.of(process.pid).stat()
    kept = len(descriptors() - before)
    assert files.of(1).kept is False
    files.of(1).stat()
    assert len(descriptors() - before) == kept > 0
    files.close()
    assert descriptors() == before
