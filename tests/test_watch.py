"""``telemetry.watch``: any iterable as a source of batches."""

from __future__ import annotations

import time

import pytest
from torch.utils.data import DataLoader

import telemetry
from telemetry.hooks.watch import Watched
from telemetry.records import DATA_WAIT
from tests.data_sets import Numbers


def test_watch_times_any_iterable(agent):
    def source():
        for index in range(5):
            time.sleep(0.005)
            yield index

    assert list(telemetry.watch(source())) == list(range(5))
    agent.accounting.update()
    assert agent.accounting.stats.steps == 5
    assert agent.accounting.ledger.ns[DATA_WAIT] >= 5 * 0.005e9


def test_a_watched_iterable_behaves_as_itself(agent):
    watched = telemetry.watch([3, 1, 2])
    assert isinstance(watched, Watched)
    assert (len(watched), watched[1], watched.index(2), list(watched), list(watched)) == (3, 1, 2, [3, 1, 2], [3, 1, 2])
    iterator = iter(watched)
    assert iter(iterator) is iterator
    assert next(iterator) == 3
    generator = iter(telemetry.watch(x for x in (1, 2)))
    next(generator)
    generator.close()
    assert list(generator) == []


def test_watching_a_loader_does_not_count_twice(agent):
    loader = DataLoader(Numbers(4), batch_size=1)
    assert telemetry.watch(loader) is loader

    def outer():
        yield from DataLoader(Numbers(4), batch_size=1)

    list(telemetry.watch(outer()))
    agent.accounting.update()
    assert agent.accounting.stats.steps == 4


def test_watch_without_an_agent_is_the_iterable_itself():
    items = [1, 2]
    assert telemetry.watch(items) is items


def test_watch_needs_something_to_iterate_over(agent):
    with pytest.raises(TypeError, match="not int"):
        telemetry.watch(7)
