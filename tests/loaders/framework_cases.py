"""Cases with loaders of training frameworks, over many short epochs."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler

from tests.loaders.observe import EPOCHS, depth, raised
from tests.loaders.torch_cases import note
from tests.loaders.unusual_loaders import Numbers

WORKER_EPOCHS = 3


def plain(batch: Any) -> Any:
    """A batch as lists and numbers."""
    if isinstance(batch, dict):
        return {name: plain(each) for name, each in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain(each) for each in batch]
    return batch.tolist() if hasattr(batch, "tolist") else batch


def layers_of(loader: Any) -> list[int]:
    """Wrappers around the methods with which a loop reads a loader, and around what its workers call."""
    found = [vars(kind).get(name) for kind in type(loader).__mro__ for name in ("__iter__", "__next__")]
    return [*(depth(method) for method in found), depth(getattr(loader, "worker_init_fn", None))]


def short_epochs(loader: Any, count: int = EPOCHS) -> dict[str, Any]:
    """What the epochs give, where they differ from those before, and what they pile up."""
    seen: list[Any] = []
    first: list[int] = []
    for _ in range(count):
        batches = [plain(batch) for batch in loader]
        first = first or layers_of(loader)
        if not seen or seen[-1] != batches:
            seen.append(batches)
    return {
        "epochs": count,
        "batches": seen,
        "len": raised(lambda: len(loader)),
        "types": [type(loader).__name__, type(iter(loader)).__name__],
        "attributes": sorted(vars(loader)),
        "init": repr(getattr(loader, "worker_init_fn", None)),
        "wrappers that were added": [now - then for now, then in zip(layers_of(loader), first)],
    }


def with_workers(make: Any, *, fails: bool = True) -> list[Any]:
    """Many epochs without workers, some with one, and an exception in each kind."""
    failing = (0, 1) if fails else ()
    return [
        short_epochs(make(Numbers(4), 0)),
        short_epochs(make(Numbers(4), 1), WORKER_EPOCHS),
        *(raised(lambda workers=workers: list(make(Numbers(4, fail_at=1), workers))) for workers in failing),
    ]


def lightning_loaders():
    from lightning.pytorch.utilities import CombinedLoader

    def make(data, workers):
        loaders = {"a": DataLoader(data, 2, num_workers=workers, worker_init_fn=note), "b": DataLoader(data, 1)}
        return CombinedLoader(loaders, "max_size_cycle")

    return with_workers(make)


def lightning_trainer():
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.batches = torch.nn.Linear(1, 1), 0

        def training_step(self, batch, index):
            self.batches += 1
            return self.layer(batch[:, None].float()).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    loader, module = DataLoader(Numbers(4), 2), Module()
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", devices=1, **dict.fromkeys(silent, False))
    trainer.fit(module, loader)
    loader = trainer.train_dataloader
    return module.batches, trainer.global_step, type(loader).__name__, sorted(vars(loader)), layers_of(loader)[-1]


def accelerate_loader():
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    return with_workers(
        lambda data, workers: accelerator.prepare(DataLoader(data, 2, num_workers=workers, worker_init_fn=note))
    )


def fastai_loader():
    from fastai.data.load import DataLoader as FastaiLoader

    return with_workers(lambda data, workers: FastaiLoader(data, bs=2, num_workers=workers))


def monai_loader():
    from monai.data import ThreadDataLoader

    def make(data, workers):
        return ThreadDataLoader(data, batch_size=2, num_workers=workers, worker_init_fn=note)

    threads = ThreadDataLoader(Numbers(4), batch_size=2, num_workers=1, use_thread_workers=True)
    # An exception is left out: it ends the thread that reads ahead, and MONAI waits for that thread forever.
    return with_workers(make, fails=False), short_epochs(threads, 60)


def webdataset_loader():
    import webdataset

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(4):
                info = tarfile.TarInfo(f"{number}.txt")
                info.size = 1
                tar.addfile(info, io.BytesIO(b"%d" % number))

        def make(data, workers):
            shards = webdataset.WebDataset([str(path)], shardshuffle=False).to_tuple("txt")
            return webdataset.WebLoader(
                shards.map(lambda sample: data[int(sample[0])]), batch_size=2, num_workers=workers
            )

        return with_workers(make)


def datasets_loader():
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    def make(data, workers):
        rows = datasets.Dataset.from_dict({"number": list(range(len(data)))})
        rows = rows.with_transform(lambda found: {"value": [data[number] for number in found["number"]]})
        return DataLoader(rows, 2, num_workers=workers, worker_init_fn=note)

    return with_workers(make)


def nodes_loader():
    from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, Prefetcher, SamplerWrapper

    def make(data, workers):
        node = SamplerWrapper(SequentialSampler(data))
        read = data.__getitem__
        node = ParallelMapper(node, read, num_workers=workers) if workers else Mapper(node, read)
        return Loader(Prefetcher(Batcher(node, 2), prefetch_factor=2))

    return with_workers(make)


PACKAGES = {
    lightning_loaders: "lightning",
    lightning_trainer: "lightning",
    accelerate_loader: "accelerate",
    fastai_loader: "fastai",
    monai_loader: "monai",
    webdataset_loader: "webdataset",
    datasets_loader: "datasets",
    nodes_loader: "torchdata",
}
"""Which package each case needs."""

CASES = {case.__name__: case for case in PACKAGES}
