"""Graphs of different size that an own loader class joins into one batch object, on the training thread."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from truth import Truth

truth = Truth()


class Graph:
    def __init__(self, nodes: int) -> None:
        self.x = torch.ones(nodes, 16)
        self.edges = torch.randint(0, nodes, (2, nodes * 3))
        self.y = torch.ones(1)


class Joined:
    """Graphs put side by side: features in a row, edges with an offset."""

    def __init__(self, graphs: list[Graph]) -> None:
        edges, first = [], 0
        for graph in graphs:
            edges.append(graph.edges + first)
            first += len(graph.x)
        self.x = torch.cat([graph.x for graph in graphs])
        self.edges = torch.cat(edges, dim=1)
        self.y = torch.cat([graph.y for graph in graphs])
        self.owner = torch.repeat_interleave(torch.tensor([len(graph.x) for graph in graphs]))
        self.num_graphs = len(graphs)


class Molecules(Dataset):
    def __init__(self, size: int) -> None:
        numbers = random.Random(0)
        self.sizes = [numbers.randint(10, 60) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Graph:
        return Graph(self.sizes[index])


class GraphLoader(DataLoader):
    def __init__(self, dataset, **settings) -> None:
        super().__init__(dataset, collate_fn=Joined, **settings)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, batch: Joined):
        x = self.first(batch.x)
        x = torch.zeros_like(x).index_add_(0, batch.edges[1], x[batch.edges[0]]).relu()
        x = self.second(x)
        return self.out(torch.zeros(batch.num_graphs, 32).index_add_(0, batch.owner, x)).squeeze(1)


def main():
    loader = GraphLoader(Molecules(1000), batch_size=64, shuffle=True)
    test_loader = GraphLoader(Molecules(200), batch_size=64)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    while not truth.over():
        model.train()
        truth.asks()
        for batch in loader:
            truth.gets()
            optimizer.zero_grad()
            with truth.timed("forward"):
                loss = (model(batch) - batch.y).square().mean()
            with truth.timed("backward"):
                loss.backward()
            with truth.timed("optimizer"):
                optimizer.step()
            truth.counts.update(steps=1, optimizer_steps=1)
            truth.asks()
        truth.leaves()
        model.eval()
        with truth.timed("evaluation"), torch.no_grad():
            for batch in test_loader:
                model(batch)
        truth.counts["epochs"] += 1
    truth.say()


if __name__ == "__main__":
    main()
