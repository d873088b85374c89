"""Lightning: a sanity check, validation in mid-epoch, three batches for an update, parts inside an optimizer's closure."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from truth import Truth

truth = Truth()


class Rows(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        return torch.full((256,), index / self.length), torch.tensor([float(index % 2)])


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1)
        )

    def training_step(self, batch, _):
        truth.counts.update(steps=1, samples=len(batch[0]))
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("loss", nn.functional.mse_loss(self.model(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class EndsInTime(lightning.Callback):
    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = truth.over()


def main():
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1000,
        accumulate_grad_batches=3,
        val_check_interval=25,
        callbacks=[EndsInTime()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(Rows(3230), 64, shuffle=True), DataLoader(Rows(1000), 64))
    truth.counts.update(optimizer_steps=trainer.global_step, epochs=trainer.current_epoch)
    truth.say()


if __name__ == "__main__":
    main()
