"""huggingface/transformers#9574: random batches are padded to their longest sentence."""

import random
import time

import common
import torch
from torch.utils.data import DataLoader, Dataset

SIZE = 16


class Sentences(Dataset):
    def __init__(self):
        chance = random.Random(3)
        self.lengths = [min(250, max(5, round(chance.lognormvariate(3.2, 0.8)))) for _ in range(12_000)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.full((self.lengths[index],), float(index % 7))


class Grouped:
    """Batches of sentences of similar length, out of pools of 50 batches."""

    def __init__(self, lengths):
        self.lengths, self.chance = lengths, random.Random(4)

    def __iter__(self):
        order = [*range(len(self.lengths))]
        self.chance.shuffle(order)
        for begin in range(0, len(order), 50 * SIZE):
            pool = sorted(order[begin : begin + 50 * SIZE], key=self.lengths.__getitem__)
            batches = [pool[first : first + SIZE] for first in range(0, len(pool), SIZE)]
            self.chance.shuffle(batches)
            yield from batches


def pad(sentences):
    return torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)


def main():
    sentences = Sentences()
    how = {"batch_sampler": Grouped(sentences.lengths)} if common.FIXED else {"batch_size": SIZE, "shuffle": True}
    loader = DataLoader(sentences, collate_fn=pad, num_workers=common.workers(1), **how)
    trainer, pace = common.Trainer(seconds=0.0), common.Pace()
    over = False
    while not over:
        for x in loader:
            time.sleep(0.0004 * x.shape[1])  # an accelerator computes for each position
            trainer.step(x.mean(1, keepdim=True).expand(-1, 64))
            over = pace.step(len(x))
            if over:
                break
    pace.say()


if __name__ == "__main__":
    main()
