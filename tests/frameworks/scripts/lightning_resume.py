"""Lightning writes a checkpoint, and its second attempt goes on from it (``ckpt_path``): ``lightning_resume.py FOLDER``."""

import common
import torch
from resuming import AGAIN, FOLDER, LAST, SAVED, trains
from torch.utils.data import DataLoader


def main():
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
        callbacks=[ModelCheckpoint(FOLDER / "out", "saved", every_n_train_steps=SAVED, enable_version_counter=False)],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(common.Slow(80), 4), ckpt_path=FOLDER / "out" / "saved.ckpt" if AGAIN else None)


main()
