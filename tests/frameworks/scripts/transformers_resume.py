"""transformers' Trainer resumes from its checkpoint: ``transformers_resume.py FOLDER [stream]``.

From a stream, batches that were trained before are drawn once more and thrown away. A data set is asked from there on.
"""

import sys

import transformers
from resuming import AGAIN, FOLDER, LAST, SAVED, trains
from sentences import Sentences, arguments, network
from torch.utils.data import IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        return map(Sentences(80).__getitem__, range(80))


class Trains(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        trains(state.global_step + 1)


def main():
    settings = arguments(FOLDER / "out", max_steps=LAST, save_strategy="steps", save_steps=SAVED)
    data = Stream() if sys.argv[2:] == ["stream"] else Sentences(80)
    trainer = transformers.Trainer(network(), settings, train_dataset=data, callbacks=[Trains()])
    trainer.train(resume_from_checkpoint=AGAIN)


main()
