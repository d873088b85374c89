"""Train on tensors that are all in memory."""

from __future__ import annotations

import common
import torch
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--samples", type=int, default=1024)
    options = parser.parse_args()
    data = TensorDataset(torch.rand(options.samples, 3, 64, 64), torch.randint(0, 10, (options.samples,)))
    loader = DataLoader(data, options.batch_size, shuffle=True, **common.loader_settings(options))
    common.train(loader, options)


if __name__ == "__main__":
    main()
