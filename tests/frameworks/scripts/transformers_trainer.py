"""transformers' Trainer, with evaluations and checkpoints."""

import sys
import tempfile

import common
import transformers
from sentences import BY_EPOCH, Sentences, arguments, network


class Recorded(transformers.Trainer):
    record = common.Record()

    def training_step(self, model, inputs, *args, **kwargs):
        self.record.batch(inputs["input_ids"])
        return super().training_step(model, inputs, *args, **kwargs)


class Epochs(transformers.TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        Recorded.record.epoch()


def main():
    with tempfile.TemporaryDirectory() as folder:
        settings = arguments(folder, num_train_epochs=3, dataloader_num_workers=int(sys.argv[1]), **BY_EPOCH)
        data = {"train_dataset": Sentences(80), "eval_dataset": Sentences(20)}
        trainer = Recorded(network(), settings, callbacks=[Epochs()], **data)
        trainer.train()
        loader = trainer.get_train_dataloader()
        trainer.record.facts = {"len": len(loader), "type": type(loader).__name__}
        trainer.record.end(trainer.state.global_step)


main()
