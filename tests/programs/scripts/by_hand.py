"""A recurrent language model whose parameters the script updates itself, with an evaluation after each epoch."""

import time

import torch
from torch import nn
from truth import Truth

truth = Truth()
text = torch.randint(0, 500, (1200, 8))
STEPS = 35


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(500, 64), nn.LSTM(64, 128, 2), nn.Linear(128, 500)

    def forward(self, x, hidden):
        y, hidden = self.rnn(self.embedding(x), hidden)
        return self.head(y), hidden


model, criterion = Net(), nn.CrossEntropyLoss()


def get_batch(source, i):
    return source[i : i + STEPS], source[i + 1 : i + 1 + STEPS].flatten()


def evaluate(source):
    model.eval()
    total, hidden = 0.0, None
    with torch.no_grad():
        for i in range(0, len(source) - STEPS - 1, 6):
            x, y = get_batch(source, i)
            out, hidden = model(x, hidden)
            total += criterion(out.flatten(0, 1), y).item()
    return total


def train():
    model.train()
    hidden = None
    for i in range(0, len(text) - STEPS - 1, 6):
        begun, timed = time.perf_counter(), sum(truth.parts.values())
        x, y = get_batch(text, i)
        model.zero_grad()
        with truth.timed("forward"):
            hidden = None if hidden is None else tuple(each.detach() for each in hidden)
            out, hidden = model(x, hidden)
            loss = criterion(out.flatten(0, 1), y)
        with truth.timed("backward"):
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.5)
        truth.counts["estimated_steps"] += 1
        truth.parts["rest"] += time.perf_counter() - begun - (sum(truth.parts.values()) - timed)


while not truth.over():
    train()
    with truth.timed("evaluation"):
        evaluate(text)
truth.say()
