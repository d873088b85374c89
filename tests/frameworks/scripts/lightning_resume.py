"""Lightning writes a checkpoint, and its second attempt goes on from it (``ckpt_path``): ``lightning_resume.py FOLDER``.

The first attempt raises in step ten, the checkpoint is of step eight. The second one ends after sixteen steps.
"""

import sys
import time
from pathlib import Path

import common
import torch
from torch.utils.data import DataLoader

SAVED, FAILS, LAST = 8, 10, 16
STEP_SECONDS = 0.05
folder = Path(sys.argv[1])
again = (folder / "resume").exists()


def trains(step):
    """In step ``step`` of the whole training, from 1."""
    time.sleep(STEP_SECONDS)
    if step == FAILS and not again:
        (folder / "resume").touch()
        raise ValueError("as told")


def lightning_trainer():
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = common.network()

        def training_step(self, batch, index):
            trains(self.global_step + 1)
            return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    trainer = lightning.Trainer(
        max_steps=LAST, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder / "out", "saved", every_n_train_steps=SAVED, enable_version_counter=False)],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(common.Slow(80), 4), ckpt_path=folder / "out" / "saved.ckpt" if again else None)


lightning_trainer()
