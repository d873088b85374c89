"""Optimizers for scripts that only need one: the first of torch's own takes as long as importing torch.

torch's imports torch._dynamo when it is made and when it steps, 1.6 s of CPU, in each process. What the agent hooks is
the same: the class of all optimizers.
"""

from __future__ import annotations

import inspect

import torch

for _member in vars(torch.optim.Optimizer).values():
    if hasattr(_member, "__wrapped__"):
        # Torch wraps what must not be compiled, and imports dynamo at the first call. Here nothing is compiled. The agent
        # may have wrapped it as well.
        _plain = inspect.unwrap(_member)
        _plain.__dynamo_disable = _plain


class QuickSGD(torch.optim.Optimizer):
    def __init__(self, parameters, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad


class CountingSGD(QuickSGD):
    """Counts the steps of each parameter in its state, as Adam does: a checkpoint tells from it how far it came."""

    def step(self, closure=None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", torch.tensor(0.0)) + 1
