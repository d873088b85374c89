"""Train a small residual network on JPEG files in one folder per class. The files are drawn if they are not there."""

import argparse
import math
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import DataLoader, Dataset

CLASSES = ("circle", "square")


def draw(folder: Path, count: int) -> None:
    """Draw pictures of 320 x 240 pixels, as many of each class."""
    for number in range(count):
        name = CLASSES[number % len(CLASSES)]
        image = Image.effect_noise((320, 240), 80).convert("RGB")  # decoded as slowly as a photograph
        x, y, size = 40 + number * 37 % 160, 30 + number * 53 % 100, 40 + number * 29 % 60
        pen = ImageDraw.Draw(image)
        shape = pen.ellipse if name == "circle" else pen.rectangle
        shape((x, y, x + size, y + size), fill=(number * 71 % 256, number * 31 % 256, number * 97 % 256))
        (folder / name).mkdir(parents=True, exist_ok=True)
        image.save(folder / name / f"{number:05d}.jpg", quality=90)


class ImageFolder(Dataset):
    """Gives what torchvision's `ImageFolder` with `RandomResizedCrop` and `RandomHorizontalFlip` gives."""

    def __init__(self, folder: Path, size: int) -> None:
        self.paths, self.size = sorted(folder.glob("*/*.jpg")), size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.paths[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        area = image.width * image.height * torch.empty(()).uniform_(0.3, 1).item()
        ratio = math.exp(torch.empty(()).uniform_(-0.28, 0.28).item())
        width, height = min(image.width, math.sqrt(area * ratio)), min(image.height, math.sqrt(area / ratio))
        left, top = torch.rand(2).mul(torch.tensor([image.width - width, image.height - height])).tolist()
        box = (left, top, left + width, top + height)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(self.size, self.size, 3)
        pixels = pixels.permute(2, 0, 1).float().div(255).sub(0.45).div(0.225)
        return pixels.flip(2) if torch.rand(()) < 0.5 else pixels, CLASSES.index(path.parent.name)


class Block(nn.Module):
    """Two convolutions around which the input is added."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.around = nn.Conv2d(inputs, outputs, 1, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.second(self.first(x)) + self.around(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("pictures"))
    parser.add_argument("--pictures", type=int, default=800)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if not options.folder.exists():
        draw(options.folder, options.pictures)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pictures = ImageFolder(options.folder, size=64)
    loader = DataLoader(pictures, batch_size=32, shuffle=True, num_workers=options.workers, drop_last=True)
    layers = [Block(3, 16), Block(16, 32), Block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    steps = samples = 0
    for epoch in range(options.epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps, samples = steps + 1, samples + len(images)
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
        torch.save(model.state_dict(), options.folder / "model.pt")
    print(f"{steps} steps, {samples} samples")


if __name__ == "__main__":
    main()
