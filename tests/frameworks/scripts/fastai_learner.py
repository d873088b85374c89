"""fastai's Learner: its DataLoader does not derive from torch's, but makes torch's iterators."""

import sys
import tempfile

import common
from fastai.basics import Callback, DataLoaders, Learner
from fastai.callback.tracker import SaveModelCallback
from fastai.data.load import DataLoader
from torch import nn


class Recording(Callback):
    def __init__(self, record):
        self.record = record

    def before_batch(self):
        if self.training:
            self.record.batch(self.x)

    def after_epoch(self):
        self.record.epoch()


def main():
    record = common.Record()
    train = DataLoader(common.Slow(80), bs=4, num_workers=int(sys.argv[1]))
    check = DataLoader(common.Slow(20), bs=4, num_workers=0)
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(DataLoaders(train, check), common.network(), loss_func=nn.MSELoss(), path=folder)
        saving = SaveModelCallback(every_epoch=True)
        with learner.no_bar(), learner.no_logging():
            learner.fit(3, lr=0.01, cbs=[Recording(record), saving])
        record.facts = {"len": len(train), "type": type(train).__name__, "iterator": type(iter(train)).__name__}
        record.end(learner.train_iter)


main()
