"""Where the compute goes: its parts by the stacks of the training thread, and what is compiled."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from benchmarks import compute_split
from benchmarks.compute_split import Loop, Rows, Timers, shares
from telemetry.log.reader import load
from telemetry.model.records import BACKWARD, COMPILE, COPY, FORWARD, OPTIMIZER, OTHER
from telemetry.sources.compiles import CompilationReader
from telemetry.sources.parts import PartReader
from telemetry.util.stacks import Spot
from tests.data_sets import Numbers
from tests.report_logs import summarize
from tests.running_agent import scrape, wait_for
from tests.sampled_thread import often, sampled

# -- the part that a stack is in ---------------------------------------------------------------------------------------


def frame(module: str, function: str, line: int = 1) -> Spot:
    return Spot(f"/lib/{module}.py", line, function, module)


def at(line: int, function: str = "main", module: str = "__main__") -> Spot:
    """A line of the script, or of a framework."""
    return frame(module, function, line)


LINEAR = frame("torch.nn.functional", "linear"), frame("torch.nn.modules.module", "_call_impl")
ENGINE = frame("torch.autograd.graph", "_engine_run_backward"), frame("torch.autograd", "backward")
ADAM = frame("torch.optim.adam", "adam"), frame("torch.optim.optimizer", "wrapper")
NO_GRAD = frame("torch.utils._contextlib", "decorate_context")
LION = at(40, "step", "lion"), NO_GRAD, frame("torch.optim.optimizer", "wrapper")
ZERO = (frame("torch.optim.optimizer", "zero_grad"),)
OWN = (at(3, "loss_of", "losses"),)  # operators that the script's own code calls

# For each script: where its stacks end, the line of the loop that they begin at, and the part.
HOOK = at(329, "call_hook", "trainer.call")

SCRIPTS = {
    "a loop": [
        (LINEAR, at(10), FORWARD),
        (OWN, at(11), FORWARD),
        (ENGINE, at(12), BACKWARD),
        ((frame("torch.nn.utils.clip_grad", "clip_grad_norm_"),), at(13), OTHER),
        (ADAM, at(14), OPTIMIZER),
        ((frame("torch.optim.lr_scheduler", "step"),), at(15), OTHER),
        ((at(7, "write", "logger"),), at(16), OTHER),
    ],
    "gradients are dropped before the backward pass": [
        (OWN, at(10), FORWARD),
        (ZERO, at(11), OTHER),
        (ENGINE, at(12), BACKWARD),
        (ADAM, at(13), OPTIMIZER),
        (OWN, at(14), OTHER),
    ],
    "accumulated gradients": [
        (LINEAR, at(5, "one_pass"), FORWARD),
        (OWN, at(6, "one_pass"), FORWARD),
        (ENGINE, at(7, "one_pass"), BACKWARD),
        (ADAM, at(13), OPTIMIZER),
    ],
    "two networks": [
        (OWN, at(10), FORWARD),
        (ENGINE, at(11), BACKWARD),
        (ADAM, at(12), OPTIMIZER),
        (OWN, at(13), FORWARD),
        (ENGINE, at(14), BACKWARD),
        (ADAM, at(15), OPTIMIZER),
        (OWN, at(16), OTHER),
    ],
    "a closure": [
        ((*LINEAR, at(4, "closure"), *ADAM), at(10), FORWARD),
        ((*OWN, at(5, "closure"), *ADAM), at(10), FORWARD),
        ((*ENGINE, at(6, "closure"), *ADAM), at(10), BACKWARD),
        (ADAM, at(10), OPTIMIZER),
    ],
    "an optimizer of the script's own, that calls for the passes": [
        ((*LINEAR, at(4, "closure"), *LION), at(14), FORWARD),
        ((*OWN, at(5, "closure"), *LION), at(14), FORWARD),
        ((*ENGINE, at(6, "closure"), *LION), at(14), BACKWARD),
        ((LION[0]._replace(line=45), *LION[1:]), at(14), OPTIMIZER),
        ((at(80, "step", "lion"),), at(15), OTHER),
    ],
    "layers that are computed again in the backward pass": [
        ((*LINEAR, frame("torch.utils.checkpoint", "checkpoint")), at(10), FORWARD),
        ((*LINEAR, frame("torch.utils.checkpoint", "backward"), *ENGINE), at(12), BACKWARD),
    ],
    "a loop in a framework": [
        ((*LINEAR, at(8, "training_step", "net"), at(60, "step", "trainer")), at(10), FORWARD),
        ((*OWN, at(9, "training_step", "net"), at(60, "step", "trainer")), at(10), FORWARD),
        ((*ENGINE, at(33, "backward", "accelerate.accelerator"), at(61, "step", "trainer")), at(10), BACKWARD),
        ((*ADAM, at(90, "fit", "trainer")), at(10), OPTIMIZER),
        ((at(2, "on_step_end", "callbacks"), at(92, "fit", "trainer")), at(10), OTHER),
        ((at(5, "send_to_device", "accelerate.utils"), at(55, "step", "trainer")), at(10), COPY),
    ],
    "a framework's closure, which calls all by one line of a helper": [
        ((*OWN, at(8, "training_step", "net"), HOOK, at(31, "closure", "trainer"), *ADAM), at(10), FORWARD),
        ((*ENGINE, at(33, "backward", "strategy"), HOOK, at(40, "closure", "trainer"), *ADAM), at(10), BACKWARD),
        ((at(12, "on_after_backward", "net"), HOOK, at(45, "closure", "trainer"), *ADAM), at(10), OTHER),
        (ADAM, at(10), OPTIMIZER),
    ],
    "torch.compile": [
        ((frame("torch._dynamo.convert_frame", "compile"), *LINEAR), at(10), COMPILE),
        ((frame("torch._inductor.compile_fx", "compile_fx"), *ENGINE), at(12), COMPILE),
        (ENGINE, at(12), BACKWARD),
    ],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stack_is_in_a_part(script):
    reader = PartReader()
    stacks = [((*inner, line, at(99, "<module>")), part) for inner, line, part in SCRIPTS[script]]
    early = [found for stack, _ in stacks * 12 for found in reader.take(stack, 7)]
    assert len(early) == 12 * len(stacks), "what came first is named later"
    assert {ns for _, ns in early} == {7}
    assert {part for part, _ in early} == {part for _, part in stacks}
    assert [reader.take(stack, 1) for stack, _ in stacks] == [[(part, 1)] for _, part in stacks]


def test_without_a_backward_pass_nothing_is_known():
    reader = PartReader()
    assert not any(reader.take((*LINEAR, at(10)), 1) for _ in range(500))


# -- real loops --------------------------------------------------------------------------------------------------------


@pytest.fixture
def _often(monkeypatch):
    """Many samples, of operators that take as long as they do on one core."""
    often(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_often")
@pytest.mark.parametrize("kind", compute_split.KINDS[1:])
def test_parts_are_those_of_the_script_s_own_timers(observed, kind):
    loop, batches = Loop(), itertools.chain.from_iterable(iter(DataLoader(Rows(), batch_size=32).__iter__, None))
    loop.run(kind, batches, 0.2)
    loop.timers = Timers()
    with sampled(observed.tracker) as made:
        while made.steps.samples < 1000:
            loop.run(kind, batches, 0.2)
    own, seen = shares(loop.timers.seconds), shares(made.part_ns)
    assert {part: seen[part] for part in own} == {part: pytest.approx(share, abs=5) for part, share in own.items()}


@pytest.mark.usefixtures("_often")
def test_parts_reach_metrics_log_and_report(tmp_path):
    agent = telemetry.start(tmp_path / "run", port=0, interval_seconds=0.1, log_interval_seconds=0.2, start_line=False)
    try:
        model, images = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]), torch.ones(256, 256)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        loader = iter(DataLoader(Numbers(100_000), batch_size=1))

        def split() -> dict:
            for _ in range(20):
                next(loader)
                model(images).sum().backward()
                optimizer.step()
            name = "training_compute_seconds_total"
            return {key[1]: value for key, value in scrape(agent).items() if key[0] == name}

        seen = wait_for(split)
        assert seen.keys() <= {FORWARD, BACKWARD, OPTIMIZER, OTHER}
        wait_for(lambda: split().get(BACKWARD, 0.0) > seen.get(BACKWARD, 0.0))
    finally:
        telemetry.stop()
    (rank,) = summarize(load(tmp_path / "run"))["ranks"]
    parts = rank["compute_seconds"]
    assert sum(parts.values()) == pytest.approx(rank["ledger"]["compute"], rel=0.01)
    assert parts[BACKWARD] > parts[OPTIMIZER] > 0


# -- what is compiled --------------------------------------------------------------------------------------------------


def test_dynamo_s_records_are_read_once_and_say_what_was_compiled_again():
    reader = CompilationReader()

    def scaled(values):
        return values * 2

    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    (first,) = reader.take()
    assert first.function.startswith("scaled at test_compute.py:")
    assert first.seconds > 0
    assert not first.again
    assert reader.take() == []
    compiled(torch.ones(3))
    compiled(torch.ones(4))
    compiled(torch.ones(4))
    again = reader.take()
    assert [(each.function, each.again) for each in again] == [(first.function, True)] * 2
    assert "size mismatch" in again[0].reason
    assert CompilationReader().take() == [], "what was compiled before the start"
