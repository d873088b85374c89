"""transformers' Trainer: two batches for an update, evaluations in mid-epoch, a smaller last batch, its own counts."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch.utils.data import Dataset
from truth import Truth

truth = Truth()


class Sentences(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        return {"input_ids": torch.full((48,), index % 30 + 1), "labels": torch.tensor(index % 2)}


class Trainer(transformers.Trainer):
    def training_step(self, model, inputs, *args, **kwargs):
        truth.counts.update(steps=1, samples=len(inputs["labels"]))
        return super().training_step(model, inputs, *args, **kwargs)

    def evaluate(self, *args, **kwargs):
        with truth.timed("evaluation"):
            return super().evaluate(*args, **kwargs)


class EndsInTime(transformers.TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_training_stop = truth.over()


def main():
    size = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 192}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=40, **size))
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            num_train_epochs=1000,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=30,
            save_strategy="no",
        )
        data = {"train_dataset": Sentences(650), "eval_dataset": Sentences(250)}
        trainer = Trainer(model, settings, callbacks=[EndsInTime()], **data)
        trainer.train()
    truth.counts.update(optimizer_steps=trainer.state.global_step, epochs=round(trainer.state.epoch))
    truth.say()


if __name__ == "__main__":
    main()
