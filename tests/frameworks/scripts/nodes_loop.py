"""torchdata.nodes: a graph of nodes, the last of which reads ahead on a thread."""

import common
import torch
from torch.utils.data import SequentialSampler, default_collate
from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, Prefetcher, SamplerWrapper


def main():
    record, model, samples = common.Record(), common.network(), common.Slow(80)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    node = SamplerWrapper(SequentialSampler(samples))
    node = ParallelMapper(node, samples.__getitem__, num_workers=1)
    loader = Loader(Prefetcher(Mapper(Batcher(node, 4), default_collate), prefetch_factor=2))
    steps = 0
    for _ in range(3):
        for inputs, targets in loader:
            record.batch(inputs)
            common.train_step(model, optimizer, inputs, targets)
            steps += 1
        record.epoch()
    record.facts = {"type": type(loader).__name__, "iterator": type(loader._it).__name__}
    record.end(steps)


main()
