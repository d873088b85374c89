"""transformers' Trainer resumes from its checkpoint: ``transformers_resume.py FOLDER [stream]``.

From a stream, batches that were trained before are drawn once more and thrown away. A data set is asked from there on.
"""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import common
import torch
import transformers
from resuming import AGAIN, FOLDER, LAST, SAVED, trains
from torch.utils.data import IterableDataset


class Sentences(common.Slow):
    def __getitem__(self, index):
        super().__getitem__(index)
        return {"input_ids": torch.full((8,), index % 30 + 1), "labels": torch.tensor(index % 2)}


class Stream(IterableDataset):
    def __iter__(self):
        return map(Sentences(80).__getitem__, range(80))


class Trains(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        trains(state.global_step + 1)


def main():
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    arguments = transformers.TrainingArguments(
        str(FOLDER / "out"),
        max_steps=LAST,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=SAVED,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        transformers.BertForSequenceClassification(config),
        arguments,
        train_dataset=Stream() if sys.argv[2:] == ["stream"] else Sentences(80),
        callbacks=[Trains()],
    )
    trainer.train(resume_from_checkpoint=AGAIN)


main()
