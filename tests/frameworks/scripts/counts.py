"""Short trainings with frameworks, each of which says what it has counted: ``counts.py FRAMEWORK {OPTIONS as JSON}``.

Options: ``accumulate`` batches before an optimizer steps; ``every`` so many batches there is an evaluation, besides the
one after each epoch; ``workers``; ``stop`` after so many optimizer steps. The last batch of an epoch is smaller, and the
last accumulation of an epoch has fewer batches.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings

import common
import torch
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
BATCH, TRAINING, CHECKING, EPOCHS = 4, 82, 18, 2
COUNTED = {"steps": 0, "optimizer_steps": 0, "samples": 0, "epochs": 0}


def trained(batch: torch.Tensor) -> None:
    COUNTED["steps"] += 1
    COUNTED["samples"] += len(batch)


def data(size: int) -> common.Slow:
    return common.Slow(size, seconds=0)


def loaders(workers: int, kind=DataLoader):
    return kind(data(TRAINING), batch_size=BATCH, num_workers=workers, shuffle=True), kind(
        data(CHECKING), batch_size=BATCH
    )


def loop(training, checking, *, accumulate=1, every=0, stop=0, take=lambda batch: batch) -> None:
    """A plain loop. Gradients are off around the model alone while it evaluates."""
    model = common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def evaluate() -> None:
        for batch in checking or ():
            with torch.no_grad():
                model(take(batch)[0])

    for _ in range(EPOCHS):
        for batch in training:
            inputs, targets = take(batch)
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            trained(inputs)
            if COUNTED["steps"] % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                COUNTED["optimizer_steps"] += 1
            if every and COUNTED["steps"] % every == 0:
                evaluate()
            if stop and COUNTED["optimizer_steps"] == stop:
                return
        COUNTED["epochs"] += 1
        evaluate()


def transformers(accumulate=1, every=0, workers=0, stop=0) -> None:
    from sentences import Sentences, arguments, network
    from transformers import Trainer

    class Counted(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            trained(inputs["labels"])
            return super().training_step(model, inputs, *args, **kwargs)

    settings = arguments(
        tempfile.mkdtemp(),
        gradient_accumulation_steps=accumulate,
        num_train_epochs=EPOCHS,
        max_steps=stop or -1,
        dataloader_num_workers=workers,
        per_device_eval_batch_size=BATCH,
        eval_strategy="steps" if every else "epoch",
        eval_steps=every or None,
        save_strategy="no",
    )
    sizes = {"train_dataset": Sentences(TRAINING, 0), "eval_dataset": Sentences(CHECKING, 0)}
    trainer = Counted(network(), settings, **sizes)
    trainer.train()
    COUNTED.update(optimizer_steps=trainer.state.global_step, epochs=int(trainer.state.epoch))


def lightning(accumulate=1, every=0, workers=0, stop=0, sanity=0, epochs=EPOCHS) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = common.network()

        def training_step(self, batch, _):
            trained(batch[0])
            return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.model(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        max_steps=stop or -1,
        accumulate_grad_batches=accumulate,
        val_check_interval=every or None,
        num_sanity_val_steps=sanity,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), *loaders(workers))
    whole = 0 if stop else trainer.fit_loop.epoch_progress.current.completed  # it takes one that is cut off for whole
    COUNTED.update(optimizer_steps=trainer.global_step, epochs=whole)


def accelerate(accumulate=1, every=0, workers=0, stop=0) -> None:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=accumulate), common.network()
    parts = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), *loaders(workers))
    model, optimizer, training, checking = parts

    def evaluate() -> None:
        for inputs, _ in checking:
            with torch.no_grad():
                model(inputs)

    for _ in range(EPOCHS):
        for inputs, targets in training:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            trained(inputs)
            COUNTED["optimizer_steps"] += accelerator.sync_gradients
            if every and COUNTED["steps"] % every == 0:
                evaluate()
            if stop and COUNTED["optimizer_steps"] == stop:
                return
        COUNTED["epochs"] += 1
        evaluate()


def fastai(accumulate=1, workers=0) -> None:
    from fastai.basics import Callback, DataLoaders, Learner
    from fastai.callback.training import GradientAccumulation
    from fastai.data.load import DataLoader as Loader

    time.sleep(2)  # the agent looks for fastai's optimizer while the script goes on, and the training takes a second

    class Counting(Callback):
        order = 1000

        def before_batch(self):
            if self.training:
                trained(self.x)

        def after_step(self):
            COUNTED["optimizer_steps"] += 1

    training = Loader(data(TRAINING), bs=BATCH, shuffle=True, num_workers=workers)
    learner = Learner(
        DataLoaders(training, Loader(data(CHECKING), bs=BATCH, num_workers=0)),
        common.network(),
        loss_func=torch.nn.MSELoss(),
        path=tempfile.mkdtemp(),
        cbs=[Counting()] + ([GradientAccumulation(accumulate * BATCH)] if accumulate > 1 else []),
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit(EPOCHS, lr=0.01)
    COUNTED.update(epochs=learner.epoch + 1)


def ignite(accumulate=1, every=0, workers=0, own=False) -> None:
    """``own``: the training data are evaluated, too."""
    from ignite.engine import Engine, Events

    model = common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training, checking = loaders(workers)

    def step(engine, batch):
        torch.nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        trained(batch[0])
        if engine.state.iteration % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            COUNTED["optimizer_steps"] += 1

    def check(engine, batch):
        with torch.no_grad():
            model(batch[0])

    trainer, evaluator = Engine(step), Engine(check)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(checking))
    if own:
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(training))
    if every:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=every), lambda: evaluator.run(checking))
    trainer.run(training, max_epochs=EPOCHS)
    COUNTED.update(steps=trainer.state.iteration, epochs=trainer.state.epoch)


def monai(workers=0, **options) -> None:
    from monai.data import ThreadDataLoader

    loop(*loaders(workers, ThreadDataLoader), **options)


def webdataset(workers=0, **options) -> None:
    import io
    import tarfile

    import webdataset

    path = f"{tempfile.mkdtemp()}/shard-0.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(TRAINING):
            content, info = str(number).encode(), tarfile.TarInfo(f"{number:04d}.txt")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))

    def decode(content: bytes):
        return torch.full((4,), float(content)), torch.tensor([1.0])

    samples = webdataset.WebDataset(path, shardshuffle=False).to_tuple("txt").map_tuple(decode)
    samples = samples.map(lambda sample: sample[0])
    checking = DataLoader(data(CHECKING), batch_size=BATCH)
    loop(webdataset.WebLoader(samples, batch_size=BATCH, num_workers=workers), checking, **options)


def datasets(workers=0, **options) -> None:
    import os

    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    def rows(size: int):
        content = {"inputs": [[float(number)] * 4 for number in range(size)], "targets": [[1.0]] * size}
        return datasets.Dataset.from_dict(content).with_format("torch")

    training = DataLoader(rows(TRAINING), batch_size=BATCH, shuffle=True, num_workers=workers)
    checking = DataLoader(rows(CHECKING), batch_size=BATCH)
    loop(training, checking, take=lambda batch: (batch["inputs"], batch["targets"]), **options)


def nodes(**options) -> None:
    from torch.utils.data import RandomSampler, default_collate
    from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, Prefetcher, SamplerWrapper

    def node(size: int):
        samples = data(size)
        items = ParallelMapper(SamplerWrapper(RandomSampler(samples)), samples.__getitem__, num_workers=1)
        return Loader(Prefetcher(Mapper(Batcher(items, BATCH, drop_last=False), default_collate), prefetch_factor=2))

    loop(node(TRAINING), node(CHECKING), **options)


globals()[sys.argv[1]](**json.loads(sys.argv[2]))
print("RESULT " + json.dumps(COUNTED))
