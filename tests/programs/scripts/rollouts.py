"""Reinforcement learning: rollouts in an environment, then some epochs of small batches over them."""

import time

import numpy as np
import torch
from torch import nn
from truth import Truth

truth = Truth()


class Environment:
    """Many carts, stepped one after another in Python."""

    def __init__(self, number):
        self.states = np.zeros((number, 8), dtype=np.float32)

    def step(self, actions):
        for state, action in zip(self.states, actions, strict=True):
            for _ in range(25):
                state *= 0.99
                state += 0.01 * action
        return self.states.copy(), self.states.sum(1)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.action, self.value = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.action(h)), self.value(h).squeeze(-1)


environment, policy = Environment(8), Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)


def collect_rollouts(seen):
    stored = []
    with torch.no_grad():
        for _ in range(128):
            actions, values = policy(torch.from_numpy(seen))
            action = actions.sample()
            after, reward = environment.step(action.numpy())
            stored.append((torch.from_numpy(seen), action, actions.log_prob(action), torch.from_numpy(reward)))
            seen = after
    return seen, [torch.cat(each) for each in zip(*stored, strict=True)]


def update(states, actions, before, rewards):
    for _ in range(4):
        order = torch.randperm(len(states))
        for at in order.split(64):
            with truth.timed("forward"):
                found, values = policy(states[at])
                ratio = (found.log_prob(actions[at]) - before[at]).exp()
                advantage = rewards[at] - values.detach()
                loss = -(ratio * advantage).mean() + (values - rewards[at]).square().mean()
            optimizer.zero_grad()
            with truth.timed("backward"):
                loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            with truth.timed("optimizer"):
                optimizer.step()
            truth.counts.update(steps=1, optimizer_steps=1)


seen, begun = environment.states.copy(), time.perf_counter()
while not truth.over():
    seen, rollout = collect_rollouts(seen)
    update(*rollout)
truth.parts["rest"] = time.perf_counter() - begun - sum(truth.parts.values())
truth.say()
