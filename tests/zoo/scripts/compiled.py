"""A text model under torch.compile, with batches of varying length.

By default, a graph for any length is compiled once a second length has come. With ``--sizes static`` each length is
compiled anew. With ``--count number`` the model counts its steps in a plain attribute, which the compiled code checks.
"""

from __future__ import annotations

import common
import torch
import torch._dynamo
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 2_000


class Documents(Dataset):
    """Documents of tokens. Those of one batch have the same length."""

    def __init__(self, batch_size: int, lengths: int) -> None:
        self.batch_size = batch_size
        self.lengths = lengths

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        length = 16 + index // self.batch_size * 37 % self.lengths
        return torch.arange(index, index + length) % VOCABULARY, index % 10


class Model(nn.Module):
    def __init__(self, width: int, count: str) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(12))
        self.out = nn.Linear(width, 10)
        self.seen = torch.zeros(()) if count == "tensor" else 0
        self.count = count

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        if self.count != "nothing":
            self.seen = self.seen + 1
            hidden = hidden * (self.seen / (self.seen + 1_000))  # a warm-up
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.out(hidden.mean(1))


def main() -> None:
    parser = common.arguments(__doc__, batch_size=16, width=128)
    parser.add_argument("--lengths", type=int, default=200, help="how many different lengths there are")
    parser.add_argument("--sizes", choices=("auto", "static", "dynamic"), default="auto")
    parser.add_argument("--count", choices=("nothing", "number", "tensor"), default="nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 100_000
    data = Documents(options.batch_size, options.lengths)
    loader = DataLoader(data, options.batch_size, **common.loader_settings(options))
    model = Model(options.width, options.count)
    dynamic = {"auto": None, "static": False, "dynamic": True}[options.sizes]
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pace = common.Pace(options)
    for tokens, labels in loader:
        common.train_step(compiled, optimizer, tokens, labels)
        if pace.step():
            break


if __name__ == "__main__":
    main()
