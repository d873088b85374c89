"""ignite's Engine, with an evaluator and checkpoints."""

import sys
import tempfile

import common
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch.utils.data import DataLoader


def main():
    record, model = common.Record(), common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader, check = DataLoader(common.Slow(80), 4, num_workers=int(sys.argv[1])), DataLoader(common.Slow(20), 4)

    def step(engine, batch):
        record.batch(batch[0])
        common.train_step(model, optimizer, *batch)

    def evaluate(engine, batch):
        with torch.no_grad():
            model(batch[0])

    trainer, evaluator = Engine(step), Engine(evaluate)
    with tempfile.TemporaryDirectory() as folder:
        saved = Checkpoint({"model": model}, DiskSaver(folder, require_empty=False), n_saved=2)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(check))
        trainer.add_event_handler(Events.EPOCH_COMPLETED, saved)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: record.epoch())
        trainer.run(loader, max_epochs=3)
    record.facts = {"len": len(loader), "type": type(loader).__name__}
    record.end(trainer.state.iteration)


main()
