"""Garbage collection is timed where it costs a step."""

from __future__ import annotations

import gc
import threading

from torch.utils.data import DataLoader

from tests.test_attach_loaders import Numbers


def test_a_collection_in_a_step_is_counted(observed):
    gc.collect()
    assert observed.tracker.garbage_ns == 0  # starting up
    loop = iter(DataLoader(Numbers(4), batch_size=1))
    next(loop)
    gc.collect()
    assert observed.tracker.garbage_ns > 0


def test_a_collection_on_another_thread_is_not(observed):
    loop = iter(DataLoader(Numbers(4), batch_size=1))
    next(loop)
    before = observed.tracker.garbage_ns
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert observed.tracker.garbage_ns == before


def test_the_callback_goes_with_the_rest(observed):
    callbacks = list(gc.callbacks)
    observed.attachment.detach()
    assert len(gc.callbacks) == len(callbacks) - 1
