"""The first fetch asks a server that takes the connection and never answers."""

import socket

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    def __init__(self, address):
        self.address = address

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        if not common.FIXED:
            with socket.create_connection(self.address) as connection:
                connection.sendall(b"GET %d\n" % index)
                connection.recv(256)  # <- slow
        return torch.full((64,), float(index % 97))


def main():
    with socket.create_server(("127.0.0.1", 0)) as server:
        remote = Remote(server.getsockname())
        loader = DataLoader(remote, 8, num_workers=common.workers(2), timeout=common.RUN_FOR)
        trainer, pace = common.Trainer(), common.Pace()
        for x in loader:
            trainer.step(x)
            if pace.step(len(x)):
                break
    pace.say()


if __name__ == "__main__":
    main()
