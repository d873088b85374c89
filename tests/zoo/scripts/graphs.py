"""Train on small graphs: a batch is a list of them, so it travels as hundreds of small tensors.

With ``--joined`` the workers make one large graph of them.
"""

from __future__ import annotations

import common
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Graphs(Dataset):
    def __init__(self) -> None:
        self.graphs = [self.make(number) for number in range(256)]

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        graph = self.graphs[index % len(self.graphs)]
        return {name: value.clone() for name, value in graph.items()}

    @staticmethod
    def make(number: int) -> dict[str, torch.Tensor]:
        nodes = 12 + number % 20
        return {
            "nodes": torch.rand(nodes, 64),
            "edges": torch.randint(0, nodes, (2, 4 * nodes)),
            "weights": torch.rand(4 * nodes),
            "positions": torch.rand(nodes, 3),
            "label": torch.tensor([number % 10]),
        }


class GraphNetwork(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.first = nn.Linear(64, 4 * width)
        self.second = nn.Linear(4 * width, 4 * width)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, weights: torch.Tensor, owner: torch.Tensor):
        hidden = torch.relu(self.first(nodes))
        sent = torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]] * weights[:, None])
        hidden = torch.relu(self.second(hidden + sent))
        return self.head(torch.zeros(int(owner[-1]) + 1, hidden.shape[1]).index_add(0, owner, hidden))


def join(graphs: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Nodes, edges, weights, the graph of each node, and labels."""
    sizes = torch.tensor([len(graph["nodes"]) for graph in graphs])
    first = torch.cumsum(sizes, 0) - sizes
    edges = torch.cat([graph["edges"] + start for graph, start in zip(graphs, first, strict=True)], 1)
    nodes = torch.cat([graph["nodes"] for graph in graphs])
    weights = torch.cat([graph["weights"] for graph in graphs])
    owner = torch.repeat_interleave(torch.arange(len(graphs)), sizes)
    return nodes, edges, weights, owner, torch.cat([graph["label"] for graph in graphs])


def train_step(model, optimizer, nodes, edges, weights, owner, labels):
    loss = nn.functional.cross_entropy(model(nodes, edges, weights, owner), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    parser = common.arguments(__doc__, num_workers=2, batch_size=96, width=24)
    parser.add_argument("--joined", action="store_true")
    options = parser.parse_args()
    torch.multiprocessing.set_sharing_strategy("file_system")  # as advised against "too many open files"
    collate = join if options.joined else list
    loader = DataLoader(
        Graphs(), batch_size=options.batch_size, shuffle=True, collate_fn=collate, **common.loader_settings(options)
    )
    model = GraphNetwork(options.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    pace = common.Pace(options)
    for graphs in loader:
        train_step(model, optimizer, *(graphs if options.joined else join(graphs)))
        if pace.step():
            break


if __name__ == "__main__":
    main()
