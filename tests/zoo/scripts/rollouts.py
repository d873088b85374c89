"""Reinforcement learning: an environment elsewhere plays, a policy learns from each rollout in an explicit step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import common
import numpy as np
import torch
from store_server import Behaviour, Client, remote_store
from torch import nn

import telemetry


def play(client: Client, moves: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rollouts of so many moves; each move is a round trip to the environment."""
    while True:
        seen = [np.frombuffer(client.get(move)[:12288], dtype=np.uint8) for move in range(moves)]
        yield torch.from_numpy(np.stack(seen) / np.float32(255)).reshape(-1, 3, 64, 64), torch.rand(moves)


def ahead(rollouts: Iterator, depth: int) -> Iterator:
    """The same, played on another thread."""
    ready: queue.Queue = queue.Queue(depth)

    def fill() -> None:
        for rollout in rollouts:
            ready.put(rollout)

    threading.Thread(target=fill, daemon=True).start()
    while True:
        yield ready.get()


def train_step(model, optimizer, seen, rewards):
    chosen = torch.log_softmax(model(seen), 1).amax(1)
    loss = -(chosen * rewards).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return nn.functional.softplus(loss.detach())


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--move-ms", type=float, default=3.0)
    parser.add_argument("--ahead", type=int, default=0, help="rollouts played ahead on another thread")
    options = parser.parse_args()
    with remote_store(Behaviour(latency=options.move_ms / 1e3)) as port:
        rollouts = play(Client(port), options.batch_size)
        if options.ahead:
            rollouts = ahead(rollouts, options.ahead)
        model = common.picture_network(options.width)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        pace = common.Pace(options)
        for seen, rewards in telemetry.watch(rollouts):
            with telemetry.step():
                train_step(model, optimizer, seen, rewards)
            if pace.step():
                break


if __name__ == "__main__":
    main()
