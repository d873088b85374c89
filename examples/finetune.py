"""Fine-tune a small transformer to tell praise from complaint. Texts, vocabulary and model are made here."""

import argparse
import random

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import (
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

GOOD = "great lovely brilliant warm clever moving".split()
BAD = "dull awful noisy cold boring clumsy".split()
OTHER = "the a film book play of and with was in it story music end actor scene very quite".split()


class Reviews(Dataset):
    """Sentences of 8 to 40 words, some of them good or bad. Each is tokenized when it is asked for."""

    def __init__(self, count, seed, tokenizer):
        rng, self.tokenizer = random.Random(seed), tokenizer
        self.labels = [rng.randrange(2) for _ in range(count)]
        self.texts = []
        for label in self.labels:
            words = rng.choices(OTHER, k=rng.randint(8, 40)) + rng.choices(GOOD if label else BAD, k=3)
            rng.shuffle(words)
            self.texts.append(" ".join(words))

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {**self.tokenizer(self.texts[index], truncation=True), "labels": self.labels[index]}


def make_tokenizer():
    words = ["[PAD]", "[UNK]", *GOOD, *BAD, *OTHER]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", model_max_length=64)


def accuracy(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--reviews", type=int, default=2000)
    parser.add_argument("--output", default="finetuned")
    options = parser.parse_args()
    set_seed(0)
    tokenizer = make_tokenizer()
    config = DistilBertConfig(vocab_size=len(tokenizer), dim=64, n_layers=2, n_heads=4, hidden_dim=256)
    arguments = TrainingArguments(
        output_dir=options.output,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=16,
        learning_rate=5e-4,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=50,
    )
    trainer = Trainer(
        model=DistilBertForSequenceClassification(config),
        args=arguments,
        train_dataset=Reviews(options.reviews, 1, tokenizer),
        eval_dataset=Reviews(options.reviews // 5, 2, tokenizer),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    trainer.train()
    print(f"{trainer.state.global_step} steps, {options.epochs * options.reviews} samples")


if __name__ == "__main__":
    main()
