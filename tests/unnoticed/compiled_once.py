"""Has compiled a training, so that a process forked from this one need not import what that takes."""

from __future__ import annotations

import torch
import torch._dynamo

_model = torch.nn.Linear(8, 1)
_optimizer = torch.optim.SGD(_model.parameters(), lr=1e-3)


@torch.compile(backend="eager")
def _step(x: torch.Tensor) -> None:
    _model(x).sum().backward()
    _optimizer.step()


_step(torch.ones(8))
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
