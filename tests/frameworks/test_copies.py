"""Real loops of frameworks, whose copies to the device are a part of the compute. The device has a stand-in clock."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from telemetry.hooks.compute import TIMED_PARTS
from tests.frameworks.test_frameworks import needs
from tests.test_compute import MS, Host, Stream

pytestmark = pytest.mark.frameworks

STEPS, MOVE_MS, BEFORE_MS = 8, 4, 5
PARTS = {"copy": MOVE_MS, "forward": 20, "backward": 30, "optimizer": 10, "other": 2}


class Batches(torch.utils.data.Dataset):
    """Tensors that take their time to be moved, and stay where they are."""

    def __init__(self, host: Host) -> None:
        class Batch(torch.Tensor):
            def to(self, *_args: Any, **_named: Any) -> torch.Tensor:
                host.work(MOVE_MS)
                return self

        self.kind = Batch

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, _: int) -> torch.Tensor:
        return torch.ones(1).as_subclass(self.kind)


class Training:
    """A step of 62 ms on a stand-in device, and the framework's own way around it."""

    def __init__(self, host: Host) -> None:
        self.host, self.batches, self.device = host, Batches(host), torch.device("meta")

    def step(self) -> None:
        self.host.loss().backward()
        self.host.optimizer.step()
        self.host.work(2)

    def loader(self, **named: Any) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(self.batches, batch_size=None, **named)


def accelerate(training: Training) -> None:
    shard = import_module("accelerate.data_loader").DataLoaderShard
    for _ in shard(training.batches, device=training.device, batch_size=None):
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

        def on_before_batch_transfer(self, batch: Any, number: int) -> Any:
            training.host.work(BEFORE_MS)
            return batch

        def configure_optimizers(self) -> None: ...

    library.Trainer(accelerator="cpu", max_epochs=1, barebones=True).fit(Module(), training.loader())


def old_lightning(training: Training) -> None:
    lightning(training, "pytorch_lightning")


def fastai(training: Training) -> None:
    load = import_module("fastai.data.load")
    import_module("fastai.torch_core").defaults.use_cuda = True
    for _ in load.DataLoader(training.batches, bs=None, device=training.device, num_workers=0):
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
def test_the_copies_of_a_framework_s_loop_are_a_part(observed, monkeypatch, loop):
    needs(PACKAGES.get(loop.__name__, loop.__name__))
    host = Host(monkeypatch)
    timer = observed.tracker.compute
    timer.events, timer.wanted = Stream(host), STEPS
    observed.tracker.slow_path()
    loop(Training(host))
    timer.begin(host.ns)  # reads the newest one
    timer.drop()
    host.hook.remove()
    assert timer.steps >= STEPS - 2
    parts = {part: ns / MS / timer.steps for part, ns in zip(TIMED_PARTS, timer.ns, strict=True)}
    before = BEFORE_MS if loop in {lightning, old_lightning} else 0
    assert parts == pytest.approx(PARTS | {"forward": 20 + before}, abs=1)
    assert observed.errors == []
