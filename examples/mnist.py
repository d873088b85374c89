"""Train a small convolutional network on digits of 28 x 28 pixels. They are drawn here, so nothing is downloaded."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

# The digits 0 to 9, each as seven rows of five dots.
FONT = [
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
]


class Digits(Dataset):
    """Digits as bytes, at random places, with noise: what is read is scaled and normalised, as MNIST usually is."""

    def __init__(self, count: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        shapes = torch.tensor([[[int(dot) for dot in row] for row in digit.split()] for digit in FONT])
        shapes = shapes.repeat_interleave(3, 1).repeat_interleave(3, 2)  # 21 x 15 pixels
        self.labels = torch.randint(10, (count,), generator=random)
        self.images = torch.randint(0, 60, (count, 28, 28), dtype=torch.uint8, generator=random)
        tops, lefts = torch.randint(7, (count,), generator=random), torch.randint(13, (count,), generator=random)
        for image, label, top, left in zip(self.images, self.labels, tops, lefts, strict=True):
            image[top : top + 21, left : left + 15] += (180 * shapes[label]).to(torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index].float().div(255).sub(0.25).div(0.3)
        return image.unsqueeze(0), self.labels[index]


def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in loader:
            right += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
    return right / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--digits", type=int, default=8000)
    parser.add_argument("--checkpoint", default="mnist.pt")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = DataLoader(Digits(options.digits, seed=1), batch_size=64, shuffle=True)
    test = DataLoader(Digits(options.digits // 5, seed=2), batch_size=256)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 5 * 5, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    steps = samples = 0
    for epoch in range(options.epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            steps, samples = steps + 1, samples + len(images)
        print(f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {accuracy(model, test, device):.1%}", flush=True)
        torch.save({"epoch": epoch, "model": model.state_dict()}, options.checkpoint)
    print(f"{steps} steps, {samples} samples")


if __name__ == "__main__":
    main()
