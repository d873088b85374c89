"""transformers' Trainer with the callback: what a logger of ``report_to`` gets, and what is marked."""

import json
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import common
import torch
import transformers

from telemetry.integrations.transformers_callback import TelemetryTrainerCallback


class Sentences(common.Slow):
    def __getitem__(self, index):
        super().__getitem__(index)
        return {"input_ids": torch.full((8,), index % 30 + 1), "labels": torch.tensor(index % 2)}


class Logger(transformers.TrainerCallback):
    """Stands where the callbacks of ``report_to`` do: before all others of the script."""

    rows: list = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append({"step": state.global_step} | dict(logs))


def main():
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            num_train_epochs=2,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_steps=5,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            include_num_input_tokens_seen=True,
        )
        trainer = transformers.Trainer(
            transformers.BertForSequenceClassification(config),
            arguments,
            train_dataset=Sentences(160),
            eval_dataset=Sentences(40),
            callbacks=[Logger()],
        )
        TelemetryTrainerCallback.add_to(trainer)
        trainer.train()
    found = {"rows": Logger.rows, "steps": trainer.state.global_step, "tokens": trainer.state.num_input_tokens_seen}
    print("RESULT " + json.dumps(found))


main()
