"""Ways to use a loader that make other advice wrong are found, and no advice changes what is trained on."""

from __future__ import annotations

import dataclasses
import itertools
import time
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from telemetry.agent.line_monitor import StallLines
from telemetry.agent.stall_monitor import stall_record
from telemetry.diagnosis.causes import advise
from telemetry.diagnosis.costs import costs
from telemetry.diagnosis.hot_lines import LineShare, line_advice
from telemetry.diagnosis.misuse import misuse
from telemetry.diagnosis.stalls import DetectedStall
from telemetry.model.records import CodeLines, LoaderTraits
from telemetry.seams.loaders import traits_of
from telemetry.seams.worker import fingerprint
from telemetry.sources.workers import WorkersSource
from telemetry.util.profiles import WAIT
from tests.data_sets import Numbers
from tests.slice_cases import CASES, STARVED, a_slice, with_workers
from tests.slices import evidence_over

STREAM = LoaderTraits(iterable_data=True, asks_for_its_worker=True, sample_code=("train.py", 7, "__iter__"))


def seen(part, traits=LoaderTraits(), **conditions):  # noqa: B008 - it does not change
    return evidence_over([dataclasses.replace(part, traits=traits, **conditions)])


# -- what the data set and the sampler show ----------------------------------------------------------------------------


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor(
            index,
        )


class Batches(Rows):
    def __getitems__(self, indices):
        return indices


class Items(IterableDataset):
    """With ``split`` each worker gives a part of the items. With ``shards`` only the first so many workers give any."""

    def __init__(self, *, split=False, shards=None, first_seconds=0.0):
        self.split, self.shards, self.first_seconds = split, shards, first_seconds

    def set_epoch(self, epoch):
        pass

    def __iter__(self):
        info = get_worker_info()
        time.sleep(self.first_seconds)
        if self.shards is not None and info.id >= self.shards:
            return
        for number in range(info.id if self.split else 0, 40, info.num_workers if self.split else 1):
            time.sleep(0.002)
            yield torch.full((3,), float(number))


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (lambda: DataLoader(Rows(), 8, shuffle=True), {"one_by_one": True, "shuffled": True, "batch_size": 8}),
        (
            lambda: DataLoader(Subset(Rows(), range(9)), 3),
            {"one_by_one": True, "shuffled": False, "iterable_data": False},
        ),
        (lambda: DataLoader(Batches(), 8), {"one_by_one": False}),
        (lambda: DataLoader(Rows(), batch_size=None, sampler=[[1, 2]]), {"one_by_one": False, "batch_size": None}),
        (lambda: DataLoader(Items(), 8), {"iterable_data": True, "asks_for_its_worker": True, "has_set_epoch": True}),
    ],
)
def test_what_a_loader_shows(loader, expected):
    traits = structs.asdict(traits_of(iter(loader())))
    assert {name: traits[name] for name in expected} == expected


def test_the_line_that_gives_a_sample_is_known():
    def line_of(kind):
        file, line, _ = traits_of(iter(DataLoader(kind(), 8))).sample_code
        return open(file).read().splitlines()[line - 1].strip()

    assert line_of(Items) == "yield torch.full((3,), float(number))"
    assert line_of(Rows) == "return torch.tensor("


# -- the same samples from each worker ---------------------------------------------------------------------------------


def read_after(observed, dataset, workers):
    """The workers of a loader, after all its batches."""
    source = WorkersSource(observed.tracker.loaders)
    iterator = iter(DataLoader(dataset, batch_size=4, num_workers=workers, persistent_workers=True))
    for _ in iterator:
        pass
    sample = source.read()
    del iterator
    return sample


@pytest.mark.parametrize(("split", "same"), [(False, True), (True, False)])
def test_workers_that_give_the_same_batches_are_seen(observed, split, same):
    assert read_after(observed, Items(split=split), 2).same_batches is same


def test_batches_that_are_all_alike_show_nothing(observed):
    class Ones(IterableDataset):
        def __iter__(self):
            return itertools.repeat(torch.ones(2), 12)

    assert read_after(observed, Ones(), 2).same_batches is False


def test_equal_batches_have_one_fingerprint():
    tensor = torch.arange(6.0)
    assert fingerprint({"x": [tensor]}) == fingerprint({"x": [tensor.clone()]}) != fingerprint({"x": [tensor + 1]})
    assert fingerprint(("a", 1)) == fingerprint(("a", 2)) != 0
    assert fingerprint(object()) == 0


def test_the_same_samples_are_a_finding_and_no_workers_are_advised():
    slow = dataclasses.replace(CASES["workers_io_bound"], settings={"num_workers": 3})
    evidence = seen(slow, STREAM, same_batches=True)
    (finding,) = misuse(evidence)
    assert (finding.kind, finding.share_ratio) == ("duplicate_samples", pytest.approx(2 / 3))
    assert (finding.lines[0].file, finding.lines[0].line) == ("train.py", 7)
    starved = dataclasses.replace(slow, wait=0.9, exposed=0.9, compute=0.1)
    (finding,) = misuse(seen(starved, STREAM, same_batches=True))
    assert finding.share_ratio == pytest.approx(0.9), "it comes before the stall that it causes"
    (advice,) = advise("workers_io_bound", evidence)
    assert advice == finding.advice[0]
    assert "get_worker_info()" in advice.action
    assert advice.setting is None


def test_workers_for_a_stream_come_with_what_divides_it():
    one = a_slice(source="training_thread", wait=0.6, compute=0.4, steps=10, process_cpu=0.5, cores=8.0)
    (advice,) = advise("loader_on_training_thread", seen(one, STREAM))
    assert advice.setting is None
    assert advice.action.index("get_worker_info()") < advice.action.index("num_workers=2")
    assert (advice.predicted_low, advice.predicted_speedup) == (1.0, pytest.approx(2.5, rel=0.01))
    plain = advise("loader_on_training_thread", seen(one, LoaderTraits(iterable_data=False)))[0]
    assert (plain.setting, plain.value) == ("num_workers", "2")


def test_a_stream_that_was_seen_to_be_divided_gets_more_workers():
    two = dataclasses.replace(CASES["workers_io_bound"], settings={"num_workers": 2}, cores=8.0)
    assert advise("workers_io_bound", seen(two, STREAM, same_batches=False))[0].setting == "num_workers"
    assert advise("workers_io_bound", seen(two, STREAM))[0].setting is None


def test_kept_workers_come_with_the_epoch_if_the_data_set_wants_it():
    plain, epochs = (
        advise("worker_startup", seen(CASES["worker_startup"], LoaderTraits(iterable_data=False, has_set_epoch=wants)))[
            0
        ]
        for wants in (False, True)
    )
    assert plain.setting == "persistent_workers"
    assert epochs.setting is None
    assert "set_epoch()" in epochs.because


def test_an_order_that_may_matter_is_kept():
    def settings_for(shuffled):
        uneven = dataclasses.replace(
            CASES["uneven_batches, matched"], settings={"in_order": True, "prefetch_factor": 2}
        )
        return {
            a.setting
            for a in advise("uneven_batches", seen(uneven, LoaderTraits(iterable_data=False, shuffled=shuffled)))
        }

    assert "in_order" in settings_for(shuffled=True)
    assert "in_order" not in settings_for(shuffled=False)


# -- workers without items ---------------------------------------------------------------------------------------------


def test_workers_without_items_are_counted(observed):
    assert read_after(observed, Items(shards=1), 3).empty_workers == 2


def test_a_stream_that_is_short_has_no_workers_without_items(observed):
    assert read_after(observed, Items(split=True), 3).empty_workers == 0


def test_workers_without_items_are_a_finding_with_a_prediction():
    """One worker of four fetches 48 ms for each step of 60, and three have ended."""
    part = with_workers(
        busy=0.8, cpu=0.04, blocked=0.76, fetches=20, steps=20, wait=0.9, compute=0.3, workers=1,
        cores=8.0, process_cpu=0.02,
    )  # fmt: skip
    evidence = seen(dataclasses.replace(part, settings={"num_workers": 4}), STREAM, empty_workers=3)
    (finding,) = misuse(evidence)
    assert finding.kind == "empty_workers"
    assert "3 of 4 workers" in finding.text
    (advice,) = advise("workers_io_bound", evidence)
    assert "at least 4 shards" in advice.action
    assert advice.predicted_speedup == pytest.approx(60 / 15, rel=0.05)
    fast = dataclasses.replace(part, wait=0.05, exposed=0.05, compute=1.15, settings={"num_workers": 4})
    assert misuse(seen(fast, STREAM, empty_workers=3)) == []


# -- an iterator for each step -----------------------------------------------------------------------------------------


def iterated(**changes):
    """20 steps of 100 ms with an iterator each: 40 ms of compute, fetches of 32 ms in one of two workers."""
    part = with_workers(
        busy=0.16, cpu=0.01, blocked=0.15, fetches=20, steps=20, boundaries=20, left=20,
        wait=1.2, boundary_wait=1.2, compute=0.8, workers=2, cores=8.0, process_cpu=0.1,
    )  # fmt: skip
    return dataclasses.replace(part, settings={"num_workers": 2}, **changes)


def test_an_iterator_for_each_step_is_a_finding_at_its_line():
    evidence = seen(iterated(), iterated_at=("train.py", 28, "main"))
    (finding,) = misuse(evidence)
    assert (finding.kind, finding.lines[0].line) == ("iterator_per_step", 28)
    (advice,) = advise("worker_startup", evidence)
    assert "make the iterator once" in advice.action
    assert advice.predicted_speedup == pytest.approx(100 / 40, rel=0.05)
    assert finding.advice[0].predicted_speedup == advice.predicted_speedup
    epochs = dataclasses.replace(iterated(), boundaries=5)
    assert misuse(seen(epochs)) == []


def test_what_it_costs_to_make_iterators_ends_with_them():
    """The CPU time of starting workers, and the time of drawing the indices of an epoch."""
    for costly in ({"process_cpu": 1.6, "cores": 1.0}, {"boundary_sampler": 0.4, "boundary_sampler_cpu": 0.4}):
        (advice,) = advise("worker_startup", seen(iterated(**costly)))
        assert advice.predicted_speedup == pytest.approx(100 / 41, rel=0.05)


def test_without_the_time_of_a_fetch_nothing_is_predicted():
    (advice,) = advise("worker_startup", seen(iterated(fetches=None)))
    assert advice.predicted_speedup is None
    short = dataclasses.replace(iterated(fetches=None), boundaries=4, left=0)
    assert advise("worker_startup", seen(short))[0].predicted_speedup is None


def test_the_line_that_makes_an_iterator_is_noted(observed):
    loader = DataLoader(Numbers(8), 2)
    next(iter(loader))
    file, line, function = observed.tracker.loaders.iterated_at
    assert file == __file__
    assert "next(iter(loader))" in open(file).read().splitlines()[line - 1]
    assert function == "test_the_line_that_makes_an_iterator_is_noted"


# -- rows in memory ----------------------------------------------------------------------------------------------------

ROWS = LoaderTraits(iterable_data=False, one_by_one=True, batch_size=256)


def test_rows_in_memory_are_fetched_at_once_and_not_by_workers():
    """6 ms for 256 rows."""
    rows = a_slice(
        source="training_thread", wait=0.6, compute=0.4, steps=100, process_cpu=1.0, cores=8.0,
        timed_fetch=0.6, timed_fetch_cpu=0.6,
    )  # fmt: skip
    (advice,) = advise("loader_on_training_thread", seen(rows, ROWS))
    assert "__getitems__" in advice.action
    assert advice.predicted_speedup is None
    assert advice.setting is None
    no_core = dataclasses.replace(rows, timed_fetch_cpu=0.1, own_runnable=0.7)
    assert "__getitems__" in advise("loader_on_training_thread", seen(no_core, ROWS))[0].action, "it waits for a core"
    decoded = structs.replace(ROWS, batch_size=16)  # 375 us each
    assert advise("loader_on_training_thread", seen(rows, decoded))[0].setting == "num_workers"
    whole = structs.replace(ROWS, one_by_one=False)
    assert advise("loader_on_training_thread", seen(rows, whole))[0].setting == "num_workers"


def test_a_line_that_fetches_a_row_cannot_be_done_once():
    rows = a_slice(
        source="training_thread", wait=0.6, compute=0.4, steps=100, process_cpu=1.0, cores=8.0,
        timed_fetch=0.6, timed_fetch_cpu=0.6,
    )  # fmt: skip
    row = LineShare("train.py", 16, "__getitem__", None, 0.6, 0.6, 0.05)
    for traits, several in ((ROWS, False), (structs.replace(ROWS, batch_size=16), True)):
        evidence = seen(rows, traits)
        about = line_advice(evidence, WAIT, row, cause="loader_on_training_thread")
        assert len(about) == 2
        stall = DetectedStall("loader_on_training_thread", 0, costs(evidence), evidence.loop_seconds, None, evidence)
        lines = StallLines(CodeLines(lines=[row.told()], lines_of=WAIT, line_samples=60), about)
        record = stall_record(stall, None, SimpleNamespace(rank=0, node="n"), "t", lines)
        assert (about[0] in record.advice) is several
        assert [line.line for line in record.details.lines] == [16]
        assert not any("smaller size" in one.action for one in record.advice), "the line says it better"
        known = stall_record(stall, None, SimpleNamespace(rank=0, node="n"), "t", lines._replace(is_known=True))
        assert known.advice[0] is about[0], "what to do instead is known"


def test_rows_in_workers_are_fetched_at_once_as_well():
    busy = with_workers(busy=1.0, cpu=0.95, blocked=0.05, fetches=400, **STARVED)
    (advice,) = advise("workers_cpu_bound", seen(busy, ROWS))
    assert "__getitems__" in advice.action


# -- the first fetch of an epoch ---------------------------------------------------------------------------------------


def first_fetches(**changes):
    """Four epochs of 50 steps: 1.6 s for the first fetch of each of two workers, and 20 ms for the others."""
    part = with_workers(
        busy=0.67, cpu=0.05, blocked=0.62, fetches=200, steps=200, boundaries=4, wait=6.4,
        boundary_wait=6.4, compute=6.0, workers=2, cores=8.0, process_cpu=0.2, seconds=12.4,
    )  # fmt: skip
    return dataclasses.replace(
        part, first_fetches=8, first_fetch=12.8, worker_fetches=200, worker_fetch=16.64, settings={"num_workers": 2},
        **changes,
    )  # fmt: skip


def test_a_first_fetch_is_not_the_start_of_workers():
    evidence = seen(first_fetches(), STREAM)
    assert evidence.first_fetch_seconds == pytest.approx(1.6)
    lost = costs(evidence)
    assert lost["workers_io_bound"] == pytest.approx(6.3, abs=0.1)
    assert lost.get("worker_startup", 0.0) < 0.2
    advice = advise("workers_io_bound", evidence)[0]
    assert "buffer" in advice.action
    assert "persistent_workers" not in {a.setting for a in advise("workers_io_bound", evidence)}
    assert advice.predicted_speedup == pytest.approx(12.4 / 6.1, rel=0.05)
    assert advice.predicted_low == pytest.approx(62 / 41.6, rel=0.05), "if the workers have as much to do as now"


def test_first_fetches_are_all_that_takes_time_at_the_boundaries_of_kept_workers():
    part = dataclasses.replace(first_fetches(), settings={"num_workers": 2, "persistent_workers": True})
    (advice,) = advise("worker_startup", seen(part, STREAM))
    assert "at the start of an epoch only once" in advice.action
    assert "the first fetch takes longer" in advice.because


def test_the_first_fetch_of_a_map_style_data_set_belongs_to_its_worker():
    lost = costs(seen(first_fetches(), LoaderTraits(iterable_data=False)))
    assert lost["worker_startup"] == pytest.approx(6.4)


def test_first_fetches_are_timed_apart(observed):
    first = read_after(observed, Items(split=True, first_seconds=0.1), 2).first_fetches
    assert first.fetches == 2
    assert first.seconds >= 2 * 0.1
    assert first.start_seconds > 0


# -- a loader that another thread reads, waits that are not matched, own collections -----------------------------------


def test_reading_ahead_is_not_advised_to_who_does_it():
    slow = with_workers(
        busy=1.0, cpu=0.02, blocked=0.98, fetches=15, steps=15, wait=0.68, compute=0.32, workers=1,
        cores=8.0, process_cpu=0.05,
    )  # fmt: skip
    watched = dataclasses.replace(slow, source="watched")
    plain, ahead = ([a.action for a in advise("source_slow", seen(watched, read_by_thread=r))] for r in (False, True))
    assert any("another thread" in action for action in plain)
    assert ahead == ["use more workers"]


def test_waits_that_were_not_matched_are_unknown():
    part = with_workers(busy=0.2, cpu=0.1, blocked=0.1, wait=1.0, compute=1.0, transfer_wait=0.1)
    assert costs(evidence_over([part])) == pytest.approx({"batch_transfer": 0.1, "unknown": 0.9})


def test_the_scripts_own_collections_are_not_frozen():
    part = a_slice(source="training_thread", compute=1.0, garbage=0.6, collections=20, younger_collections=0)
    remove, freeze = advise("gc_pause", evidence_over([part]))
    assert "remove the calls of gc.collect()" in remove.action
    assert (remove.setting, freeze.setting, freeze.predicted_speedup) == (None, "gc.freeze()", None)
    automatic = dataclasses.replace(part, collections=3, younger_collections=30)
    (freeze,) = advise("gc_pause", evidence_over([automatic]))
    assert freeze.predicted_speedup == pytest.approx(2.5)


def test_an_unknown_supply_predicts_nothing():
    part = a_slice(source="workers", compute=1.0, garbage=0.4)
    assert advise("gc_pause", structs.replace(evidence_over([part]), fetch_seconds=None))[0].predicted_speedup is None
