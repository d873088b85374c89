"""Which batches are for evaluation: by gradients, else by the steps of optimizers meanwhile."""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils.data import DataLoader

from telemetry.model.records import COMPUTE, DATA_WAIT, EVALUATION, OTHER
from telemetry.util.clock import NS
from tests.data_sets import Numbers

# -- a loader iterated with gradients off is evaluation ----------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loader_iterated_with_gradients_off_is_evaluation(observed, mode):
    """The same data may be trained with, also by an optimizer that is not torch's."""
    loader = DataLoader(Numbers(4), batch_size=1)
    for _ in range(2):
        list(loader)
        with mode():
            for _ in loader:
                time.sleep(0.005)
    list(loader)
    ledger = observed.read()
    assert len(observed.steps) == 12
    assert ledger.ns[EVALUATION] >= 8 * 0.005e9
    assert [p.name for p in observed.phases] == [EVALUATION] * 2


# -- training and evaluation are told apart where gradients are on while batches are requested -------------------------


class Loop:
    """A typical training loop."""

    def __init__(self, observed, accumulate: int = 1) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.observed, self.accumulate, self.batches = observed, accumulate, 0

    def train(self, loader) -> None:
        for _ in loader:
            self.step()

    def step(self) -> None:
        self.weight.grad = torch.ones(1)
        self.batches += 1
        if self.batches % self.accumulate == 0:
            self.optimizer.step()

    def evaluate(self, loader) -> None:
        """Gradients are off around the model alone."""
        for _ in loader:
            with torch.no_grad():
                self.weight * 2

    def read(self) -> int:
        """The steps so far."""
        self.observed.read()
        return len(self.observed.steps)

    def evaluated(self) -> float:
        self.observed.read()
        return self.observed.ledger.ns[EVALUATION] / 1e9


@pytest.fixture
def loop(observed):
    return Loop(observed)


def test_batches_without_an_optimizer_step_are_an_evaluation(loop):
    training, evaluation = DataLoader(Numbers(12)), DataLoader(Numbers(20, 0.002))
    loop.train(training)
    loop.evaluate(evaluation)
    assert loop.read() == 12
    assert loop.evaluated() >= 20 * 0.002
    assert loop.observed.ledger.category == OTHER


@pytest.mark.parametrize(("anew", "workers"), [(False, 0), (True, 0), (True, 2)])
def test_the_next_evaluation_with_it_is_known_from_its_first_batch(loop, anew, workers):
    """The loader may be a new one each time, as transformers' Trainer makes it: the data set is the same."""
    data = Numbers(20)
    training, evaluation = DataLoader(Numbers(12), num_workers=workers), DataLoader(data, num_workers=workers)
    loop.train(training)
    loop.evaluate(evaluation)
    for _ in range(3):
        steps, waited = loop.read(), loop.observed.ledger.epoch_boundaries
        loop.evaluate(DataLoader(data, num_workers=workers) if anew else evaluation)
        assert loop.read() == steps
        assert loop.observed.ledger.epoch_boundaries == waited, "nor does the start of its workers count as training"
        loop.train(training)
        assert loop.read() == steps + 12


def test_nothing_is_counted_before_it_is_known_what_it_is_and_nothing_is_taken_back(loop):
    """The clock of the ledger stands still meanwhile. After half a minute most are evaluations, and it goes on."""
    loop.train(DataLoader(Numbers(12)))
    ledger, counted = loop.observed.read(), loop.observed.accounting.batches
    for number, _ in enumerate(DataLoader(Numbers(20))):
        before = dict(ledger.ns), ledger.at_ns
        loop.observed.read()
        if number < 5:
            assert (loop.read(), ledger.batches, counted._all()) == (12, 12, 12)
            assert (dict(ledger.ns), ledger.at_ns) == before or not number
        if number == 4:
            ledger.advance(before[1] + 40 * NS, held_since_ns=loop.observed.tracker.ring.held_since)
            assert ledger.category == EVALUATION
            assert ledger.ns[EVALUATION] >= 30 * NS
            held = dict(ledger.ns)
            loop.step()
        elif number > 4:
            loop.step()
    assert (loop.read(), ledger.batches, counted._all()) == (32, 32, 32)
    assert all(ledger.ns[category] >= held[category] for category in held)
    assert ledger.evaluations == 0


@contextmanager
def checkpoint(tracker):
    before, began = tracker.enter_phase("checkpoint"), time.monotonic_ns()
    yield
    tracker.exit_phase("checkpoint", before, began)


def test_an_evaluation_that_a_break_has_left_is_one_all_the_same(loop):
    """Also if it was the run's last work, or a checkpoint comes next."""
    loop.train(DataLoader(Numbers(12)))
    for end in (
        lambda: checkpoint(loop.observed.tracker),
        lambda: nullcontext(loop.observed.tracker.settle(evaluates=True)),
    ):
        for number, _ in enumerate(DataLoader(Numbers(20, 0.002))):
            if number == 3:
                break
        with end():
            assert loop.read() == 12
    assert loop.evaluated() >= 8 * 0.002


def test_two_new_loaders_that_train_together_are_training(loop):
    loop.train(DataLoader(Numbers(12)))
    for _ in zip(DataLoader(Numbers(8)), DataLoader(Numbers(8)), strict=True):
        loop.step()
    assert loop.read() == 20
    assert loop.evaluated() == 0.0


def test_an_evaluation_in_mid_epoch_is_no_part_of_its_step(loop):
    evaluation = DataLoader(Numbers(20, 0.002))
    for number, _ in enumerate(DataLoader(Numbers(30))):
        if number % 10 == 5:
            loop.evaluate(evaluation)
        loop.step()
        if number % 10 == 9:
            assert loop.observed.tracker.fast_path_iterator_id, "training is back on the fast path"
    assert loop.read() == 30
    assert loop.evaluated() >= 60 * 0.002


@pytest.mark.parametrize("accumulate", [2, 8])
def test_gradients_that_are_accumulated_are_training(observed, accumulate):
    loop = Loop(observed, accumulate)
    for _ in range(3):
        loop.train(DataLoader(Numbers(40)))
    assert loop.read() == 120
    assert loop.evaluated() == 0.0


def test_the_loss_over_the_training_s_own_data_is_an_evaluation(loop):
    training = DataLoader(Numbers(40))
    loop.train(training)
    loop.train(training)
    loop.evaluate(training)
    assert loop.read() == 80
    assert loop.evaluated() > 0.0
    loop.train(training)
    assert loop.read() == 120, "and training goes on as before"


def test_an_evaluation_loader_may_be_trained_with_later(loop):
    held_out = DataLoader(Numbers(20))
    loop.train(DataLoader(Numbers(12)))
    loop.evaluate(held_out)
    for turn in range(2):
        loop.train(held_out)
        assert loop.read() == 12 + 20 * (turn + 1)


def test_a_batch_read_ahead_is_no_evaluation(loop):
    """Like accelerate's loaders, which thus know the last batch."""

    def ahead(loader):
        iterator = iter(loader)
        batch = next(iterator)
        for following in iterator:
            yield batch
            batch = following
        yield batch

    for _ in range(3):
        loop.train(ahead(DataLoader(Numbers(12))))
    assert loop.read() == 36
    assert loop.evaluated() == 0.0


def test_without_optimizer_steps_all_batches_are_training(loop):
    for _ in range(3):
        loop.evaluate(DataLoader(Numbers(20)))
    assert loop.read() == 60
    assert loop.evaluated() == 0.0


def test_an_evaluation_left_with_break_ends_where_training_goes_on(loop):
    evaluation = DataLoader(Numbers(20))
    loop.train(DataLoader(Numbers(12)))
    loop.evaluate(evaluation)
    for number, _ in enumerate(DataLoader(Numbers(12))):
        if number == 5:
            for turn, _ in enumerate(evaluation):
                if turn == 8:
                    break
        loop.step()
        loop.read()
        assert loop.observed.ledger.category == COMPUTE
    steps = loop.read()
    loop.train(DataLoader(Numbers(12)))
    assert loop.read() == steps + 12


def test_the_workers_of_an_evaluation_are_not_the_training_s(loop):
    data = Numbers(20)
    loop.train(DataLoader(Numbers(12)))
    for _ in range(2):
        for number, _ in enumerate(DataLoader(data, num_workers=1)):
            if number == 10:
                (handle,) = loop.observed.tracker.loaders.live()
                assert not handle.training
    for number, _ in enumerate(DataLoader(Numbers(12), num_workers=1)):
        loop.step()
        if number == 10:
            (handle,) = loop.observed.tracker.loaders.live()
            assert handle.training


def test_the_detector_keeps_no_loader_alive(loop):
    data, held_out = Numbers(12), Numbers(20)
    alive = [weakref.ref(data), weakref.ref(held_out)]
    loop.train(DataLoader(data))
    loop.evaluate(DataLoader(held_out))
    del data, held_out
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_data_without_weak_references_is_detected_anew_each_time(loop):
    loop.train(DataLoader(list(range(12))))
    for _ in range(2):
        steps, evaluated = loop.read(), loop.evaluated()
        loop.evaluate(DataLoader(list(range(20))))
        assert loop.read() == steps
        assert loop.evaluated() > evaluated


def test_a_training_with_gradients_off_is_training(loop):
    """As with evolution strategies: each batch has a step. Only the first of an epoch looks like an evaluation's."""
    with torch.no_grad():
        for _ in range(3):
            loop.train(DataLoader(Numbers(40, 0.002)))
    assert 3 * 39 <= loop.read() <= 120
    assert loop.observed.ledger.ns[DATA_WAIT] >= 3 * 39 * 0.002e9


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``: what was captured is done again without Python's optimizer."""

    def __init__(self) -> None:
        self.replays = 0

    def capture_begin(self) -> None:
        """Nothing to begin."""

    def capture_end(self) -> None:
        """Nothing to end."""

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return Graph()


def capture(graph, work) -> None:
    graph.capture_begin()
    work()
    graph.capture_end()


@pytest.mark.parametrize("captured_in_mid_loop", [False, True])
def test_a_replayed_graph_steps_as_often_as_its_optimizers(graph, observed, captured_in_mid_loop):
    loop, other = Loop(observed), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    tracker = observed.tracker

    def work() -> None:
        loop.optimizer.step()
        other.step()

    for number, _ in enumerate(DataLoader(Numbers(4))):
        if number == 3 and captured_in_mid_loop:
            capture(graph, work)
        loop.step()
    if not captured_in_mid_loop:
        capture(graph, work)
    assert tracker.optimizer_steps == 4, "nothing is computed in a capture"
    for _ in DataLoader(Numbers(600)):
        graph.replay()
    assert (loop.read(), loop.evaluated()) == (604, 0.0)
    assert tracker.optimizer_steps == 4 + 2 * 600
    assert graph.replays == 600


def test_a_replayed_graph_without_an_optimizer_trains_nothing(graph, loop):
    loop.train(DataLoader(Numbers(12)))
    capture(graph, lambda: None)
    for _ in DataLoader(Numbers(20, 0.002)):
        graph.replay()
    assert loop.read() == 12
    assert loop.observed.tracker.optimizer_steps == 12
    assert loop.evaluated() >= 20 * 0.002


def test_a_graph_keeps_no_optimizer_alive(graph, observed):
    loop = Loop(observed)
    capture(graph, loop.optimizer.step)
    graph.of = loop.optimizer
    optimizer, graphs = weakref.ref(loop.optimizer), weakref.ref(graph)
    del loop, graph.of
    gc.collect()
    assert optimizer() is None
    graph.replay()
    assert observed.tracker.optimizer_steps == 1
    assert graphs() is graph
