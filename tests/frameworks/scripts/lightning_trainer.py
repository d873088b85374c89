"""Lightning's Trainer, with a validation loader and checkpoints."""

import sys
import tempfile

import common
import lightning
import torch
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self, record):
        super().__init__()
        self.model, self.record = common.network(), record

    def training_step(self, batch, index):
        self.record.batch(batch[0])
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.model(batch[0])

    def on_train_epoch_end(self):
        self.record.epoch()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
    workers, record = int(sys.argv[1]), common.Record()
    train = DataLoader(common.Slow(80), 4, num_workers=workers)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            num_sanity_val_steps=0,
        )
        trainer.fit(Module(record), train, DataLoader(common.Slow(20), 4))
        record.facts = {"len": len(train), "type": type(trainer.train_dataloader).__name__}
        record.end(trainer.global_step)


main()
