"""What the scripts of transformers share: sentences that take their time, a small network, and settings of a Trainer."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import common
import torch
import transformers


class Sentences(common.Slow):
    def __getitem__(self, index):
        super().__getitem__(index)
        return {"input_ids": torch.full((8,), index % 30 + 1), "labels": torch.tensor(index % 2)}


def network():
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    return transformers.BertForSequenceClassification(config)


def arguments(folder, **more):
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "per_device_train_batch_size": 4}
    return transformers.TrainingArguments(str(folder), **quiet, **more)


BY_EPOCH = {"per_device_eval_batch_size": 4, "eval_strategy": "epoch", "save_strategy": "epoch"}
