"""A small convolution network on digits: one worker, a test after each epoch, a line each ten batches."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset
from truth import Truth

truth = Truth()


class Digits(Dataset):
    def __init__(self, size: int) -> None:
        self.pictures = torch.randint(0, 256, (size, 28, 28), dtype=torch.uint8)
        self.labels = torch.randint(0, 10, (size,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return (self.pictures[index].float() / 255 - 0.13).div(0.31)[None], self.labels[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.fc1, self.fc2 = nn.Linear(4608, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), dim=1)


def train(model, loader, optimizer, epoch):
    model.train()
    truth.asks()
    for batch, (data, target) in enumerate(loader):
        truth.gets()
        optimizer.zero_grad()
        with truth.timed("forward"):
            loss = F.nll_loss(model(data), target)
        with truth.timed("backward"):
            loss.backward()
        with truth.timed("optimizer"):
            optimizer.step()
        truth.counts["steps"] += 1
        truth.counts["optimizer_steps"] += 1
        truth.counts["samples"] += len(data)
        if batch % 10 == 0:
            print(f"epoch {epoch} [{batch}/{len(loader)}] loss {loss.item():.4f}")
        truth.asks()
    truth.leaves()


def test(model, loader):
    model.eval()
    wrong = 0
    with truth.timed("evaluation"), torch.no_grad():
        for data, target in loader:
            wrong += (model(data).argmax(dim=1) != target).sum().item()
    print(f"test: {wrong} wrong")


def main():
    settings = {"num_workers": 1, "shuffle": True}
    train_loader = DataLoader(Digits(2570), batch_size=64, **settings)
    test_loader = DataLoader(Digits(1000), batch_size=200, **settings)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    while not truth.over():
        train(model, train_loader, optimizer, truth.counts["epochs"])
        test(model, test_loader)
        scheduler.step()
        truth.counts["epochs"] += 1
    truth.say()


if __name__ == "__main__":
    main()
