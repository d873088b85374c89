"""transformers' Trainer, with evaluations and checkpoints."""

import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import common
import torch
import transformers


class Sentences(common.Slow):
    def __getitem__(self, index):
        super().__getitem__(index)
        return {"input_ids": torch.full((8,), index % 30 + 1), "labels": torch.tensor(index % 2)}


class Recorded(transformers.Trainer):
    record = common.Record()

    def training_step(self, model, inputs, *args, **kwargs):
        self.record.batch(inputs["input_ids"])
        return super().training_step(model, inputs, *args, **kwargs)


class Epochs(transformers.TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        Recorded.record.epoch()


def main():
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            num_train_epochs=3,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            eval_strategy="epoch",
            save_strategy="epoch",
            dataloader_num_workers=int(sys.argv[1]),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Recorded(
            transformers.BertForSequenceClassification(config),
            arguments,
            train_dataset=Sentences(80),
            eval_dataset=Sentences(20),
            callbacks=[Epochs()],
        )
        trainer.train()
        loader = trainer.get_train_dataloader()
        trainer.record.facts = {"len": len(loader), "type": type(loader).__name__}
        trainer.record.end(trainer.state.global_step)


main()
