"""Lightning's Trainer with the callback: what a logger gets, and what is marked."""

import json
import sys
import tempfile

import common

if sys.argv[1] == "old":  # the older package of the same framework
    import pytorch_lightning as lightning
    from pytorch_lightning.loggers import CSVLogger
else:
    import lightning
    from lightning.pytorch.loggers import CSVLogger

import torch
from torch.utils.data import DataLoader

from telemetry.integrations.lightning_callback import TelemetryLightningCallback


class Logger(CSVLogger):
    rows: list = []

    def log_metrics(self, metrics, step=None):
        self.rows.append({"step": step} | metrics)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = common.network()
        self.tokens = 0

    def training_step(self, batch, index):
        self.tokens += batch[0].numel()
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.model(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=1,
            logger=Logger(folder),
            log_every_n_steps=5,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            num_sanity_val_steps=2,
            callbacks=[TelemetryLightningCallback(tokens=lambda batch: batch[0].numel())],
        )
        module = Module()
        trainer.fit(module, DataLoader(common.Slow(160), 4), DataLoader(common.Slow(40, 0.02), 4))
        found = {"rows": Logger.rows, "steps": trainer.global_step, "tokens": module.tokens}
        print("RESULT " + json.dumps(found))


main()
