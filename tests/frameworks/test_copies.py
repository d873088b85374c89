"""Real loops of frameworks, whose copies to the device are a part of the compute: their stacks name it."""

from __future__ import annotations

import sys
from importlib import import_module
from threading import get_ident
from typing import TYPE_CHECKING, Any

import pytest
import torch

from telemetry.model.records import BACKWARD, COPY
from telemetry.sources.parts import PartReader
from telemetry.util.stacks import Stack, stack_of
from tests.frameworks.test_frameworks import needs

if TYPE_CHECKING:
    from types import FrameType

pytestmark = pytest.mark.frameworks

STEPS = 8


class Training:
    """A step that computes nothing, and batches that note the stacks in which they are copied to the device."""

    def __init__(self) -> None:
        self.device, self.copies = torch.device("meta"), []
        self.backward: list[Stack] = []
        self.weight = torch.ones(1, requires_grad=True)

        class Batch(torch.Tensor):
            def to(batch, *_args: Any, **_named: Any) -> torch.Tensor:  # noqa: N805
                self.copies.append(stack_of(get_ident()))
                return batch

        self.kind = Batch

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, _: int) -> torch.Tensor:
        return torch.ones(1).as_subclass(self.kind)

    def step(self) -> None:
        self.weight.sum().backward()

    def loader(self, **named: Any) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(self, batch_size=None, **named)


def accelerate(training: Training) -> None:
    shard = import_module("accelerate.data_loader").DataLoaderShard
    for _ in shard(training, device=training.device, batch_size=None):
        training.step()


def fabric(training: Training, package: str = "lightning.fabric") -> None:
    for _ in import_module(f"{package}.wrappers")._FabricDataLoader(training.loader(), training.device):
        training.step()


def old_fabric(training: Training) -> None:
    fabric(training, "lightning_fabric")


def lightning(training: Training, package: str = "lightning.pytorch") -> None:
    library = import_module(package)

    class Module(library.LightningModule):
        automatic_optimization = False

        def training_step(self, batch: Any, number: int) -> None:
            training.step()

        def configure_optimizers(self) -> None: ...

    library.Trainer(accelerator="cpu", max_epochs=1, barebones=True).fit(Module(), training.loader())


def old_lightning(training: Training) -> None:
    lightning(training, "pytorch_lightning")


def fastai(training: Training) -> None:
    load = import_module("fastai.data.load")
    import_module("fastai.torch_core").defaults.use_cuda = True
    for _ in load.DataLoader(training, bs=None, device=training.device, num_workers=0):
        training.step()


def ignite(training: Training) -> None:
    engine = import_module("ignite.engine")

    def update(_: Any, batch: Any) -> None:
        engine._prepare_batch((batch, torch.ones(1)), training.device, non_blocking=True)
        training.step()

    engine.Engine(update).run(training.loader())


LOOPS = (accelerate, fabric, old_fabric, lightning, old_lightning, fastai, ignite)
PACKAGES = {"fabric": "lightning", "old_fabric": "pytorch_lightning", "old_lightning": "pytorch_lightning"}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_copies_of_a_framework_s_loop_are_a_part(loop):
    needs(PACKAGES.get(loop.__name__, loop.__name__))
    training, reader = Training(), PartReader()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "_engine_run_backward":
            training.backward.append(stack_of(get_ident()))

    sys.setprofile(profile)
    try:
        loop(training)
    finally:
        sys.setprofile(None)
    named = [part for stack in training.backward * 3 for part, _ in reader.take(stack, 1)]
    assert set(named) == {BACKWARD}
    assert len(training.copies) >= STEPS
    assert {part for stack in training.copies for part, _ in reader.take(stack, 1)} == {COPY}
