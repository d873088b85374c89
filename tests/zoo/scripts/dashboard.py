"""Train and report every step to an experiment server, synchronously; at some point the server does not answer."""

from __future__ import annotations

import common
import torch
from store_server import Behaviour, Client, remote_store
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--silent-after", type=float, default=12.0)
    parser.add_argument("--silent-seconds", type=float, default=20.0)
    options = parser.parse_args()
    server = Behaviour(
        object_bytes=16, latency=0.001, silent_after=options.silent_after, silent_seconds=options.silent_seconds
    )
    with remote_store(server) as port:
        client = Client(port)
        data = TensorDataset(torch.rand(512, 3, 64, 64), torch.randint(0, 10, (512,)))
        loader = DataLoader(data, options.batch_size, shuffle=True, **common.loader_settings(options))
        model = common.picture_network(options.width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        pace = common.Pace(options)
        step = 0
        while True:
            for pictures, labels in loader:
                common.train_step(model, optimizer, pictures, labels)
                step += 1
                client.get(step)
                if pace.step():
                    return


if __name__ == "__main__":
    main()
