"""A training that writes a checkpoint, and goes on from it in its second attempt: ``resume.py FRAMEWORK FOLDER``.

The first attempt raises after ten steps, the checkpoint is of step eight. The second one draws eight batches again, where
the framework does so, and ends after sixteen steps.
"""

import os
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import common
import torch
from torch.utils.data import DataLoader

SAVED, FAILS, LAST = 8, 10, 16
STEP_SECONDS = 0.05
framework, folder = sys.argv[1], Path(sys.argv[2])
again = (folder / "resume").exists()


def trains(step):
    """In step ``step`` of the whole training, from 1."""
    time.sleep(STEP_SECONDS)
    if step == FAILS and not again:
        (folder / "resume").touch()
        raise ValueError("as told")


def transformers_trainer():
    import transformers

    class Sentences(common.Slow):
        def __getitem__(self, index):
            super().__getitem__(index)
            return {"input_ids": torch.full((8,), index % 30 + 1), "labels": torch.tensor(index % 2)}

    class Paced(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            trains(self.state.global_step + 1)
            return super().training_step(*args, **kwargs)

    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    arguments = transformers.TrainingArguments(
        str(folder / "out"), max_steps=LAST, per_device_train_batch_size=4, save_steps=SAVED, use_cpu=True, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Paced(transformers.BertForSequenceClassification(config), arguments, train_dataset=Sentences(80))
    trainer.train(resume_from_checkpoint=again)


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


def accelerate_loop():
    import accelerate

    accelerator, model = accelerate.Accelerator(cpu=True), common.network()
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(common.Slow(80), 4))
    step = 0
    if again:
        accelerator.load_state(folder / "out")
        step = SAVED
        loader = accelerator.skip_first_batches(loader, step)
    for inputs, targets in loader:
        step += 1
        trains(step)
        common.train_step(model, optimizer, inputs, targets)
        if step == SAVED and not again:
            accelerator.save_state(folder / "out")
        if step == LAST:
            break


def safetensors_loop():
    from safetensors.torch import load_model, save_model

    model, step = common.network(), 0
    if again:
        load_model(model, folder / "model.safetensors")
    optimizer = torch.optim.Adam(model.parameters())
    if again:
        state = torch.load(folder / "optimizer.pt")
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    for number, (inputs, targets) in enumerate(DataLoader(common.Slow(80), 4), 1):
        if number <= step:
            continue
        trains(number)
        common.train_step(model, optimizer, inputs, targets)
        if number == SAVED and not again:
            save_model(model, folder / "model.safetensors")
            torch.save({"optimizer": optimizer.state_dict(), "step": number}, folder / "optimizer.pt")
        if number == LAST:
            break


{
    "transformers": transformers_trainer,
    "lightning": lightning_trainer,
    "accelerate": accelerate_loop,
    "safetensors": safetensors_loop,
}[framework]()
