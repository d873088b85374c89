"""Draws the pictures that the demo trains on: real JPEG files, of four kinds that a small network can tell apart.

A set is identical on every machine with the same version of Pillow. It is drawn once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

from telemetry.util.files import temporary_name

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Pixels = NDArray[np.float32]

KINDS: Final = ("blocks", "clouds", "rings", "stripes")

_COMPLETE: Final = ".complete"
"""The file that is written last. If it is missing, the drawing was interrupted."""

_QUALITY: Final = 92
_GRAIN: Final = 10.0
"""Standard deviation of the noise, 0 to 255. Without noise a JPEG decodes several times faster than a photograph."""


@dataclass(frozen=True, slots=True)
class PictureSet:
    """How many pictures there are, and their width and height in pixels."""

    count: int
    width: int
    height: int

    @property
    def folder_name(self) -> str:
        """Name of the folder. Each set has its own, so that no set overwrites another."""
        return f"pictures-{self.count}-{self.width}x{self.height}"


def ensure(folder: Path, wanted: PictureSet) -> int:
    """Draw a set into a folder, as ``KIND/NUMBER.jpg``, unless it is complete. Returns how many were drawn.

    Raises:
        OSError: the folder cannot be written.
    """
    complete = folder / _COMPLETE
    names = [f"{KINDS[number % len(KINDS)]}/{number:04d}.jpg" for number in range(wanted.count)]
    if complete.exists() and all((folder / name).exists() for name in names):
        return 0
    complete.unlink(missing_ok=True)
    for kind in KINDS:
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        _save(draw(number, wanted), folder / name)
    complete.touch()
    return wanted.count


def draw(number: int, size: PictureSet) -> Image.Image:
    """Draw one picture. Its number is the seed."""
    random = np.random.default_rng(number)
    across, down = _coordinates(size)
    pattern = _PATTERNS[KINDS[number % len(KINDS)]](across, down, random)
    # A dark colour and a light one, blended by the pattern; light that falls off to one side; grain.
    dark, light = random.uniform(0, 120, 3), random.uniform(130, 255, 3)
    angle = random.uniform(0, 2 * np.pi)
    shade = 1.0 + 0.25 * (np.cos(angle) * across + np.sin(angle) * down)
    grain = _GRAIN * random.standard_normal((size.height, size.width, 1), dtype=np.float32)
    pixels = (dark + (light - dark) * pattern[..., None]) * shade[..., None] + grain
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _coordinates(size: PictureSet) -> tuple[Pixels, Pixels]:
    """Two arrays of the picture's shape: how far right and how far down of the middle a pixel is. The width is 2."""
    unit = 2.0 / size.width
    across = (np.arange(size.width, dtype=np.float32) - size.width / 2) * unit
    down = (np.arange(size.height, dtype=np.float32) - size.height / 2) * unit
    return across[None, :] + 0 * down[:, None], down[:, None] + 0 * across[None, :]


# Each pattern is an array of the picture's shape with values from 0 to 1.


def _blocks(across: Pixels, down: Pixels, random: Any) -> Pixels:
    """Rectangles, one above the other."""
    pattern = np.zeros_like(across)
    for _ in range(12):
        left, top = random.uniform(-1.1, 0.8), random.uniform(-0.85, 0.5)
        width, height = random.uniform(0.15, 0.6, 2)
        inside = (across > left) & (across < left + width) & (down > top) & (down < top + height)
        pattern[inside] = random.uniform(0, 1)
    return pattern


def _clouds(across: Pixels, down: Pixels, random: Any) -> Pixels:
    """Soft spots that melt into each other."""
    pattern = np.zeros_like(across)
    for _ in range(10):
        x, y, width = random.uniform(-1, 1), random.uniform(-0.75, 0.75), random.uniform(0.1, 0.4)
        pattern += np.exp(-((across - x) ** 2 + (down - y) ** 2) / (2 * width**2))
    return np.minimum(pattern / 2, 1).astype(np.float32)


def _rings(across: Pixels, down: Pixels, random: Any) -> Pixels:
    """Circles around a point."""
    x, y = random.uniform(-0.6, 0.6, 2)
    distance = np.sqrt((across - x) ** 2 + (down - y) ** 2)
    return _wave(distance, random)


def _stripes(across: Pixels, down: Pixels, random: Any) -> Pixels:
    """Straight waves in some direction."""
    angle = random.uniform(0, np.pi)
    along = np.cos(angle) * across + np.sin(angle) * down
    return _wave(along, random)


def _wave(place: Pixels, random: Any) -> Pixels:
    wave: Pixels = 0.5 + 0.5 * np.sin(np.float32(random.uniform(18, 45)) * place)
    return wave


_PATTERNS: Final = {"blocks": _blocks, "clouds": _clouds, "rings": _rings, "stripes": _stripes}


def _save(picture: Image.Image, path: Path) -> None:
    """Write a picture under a temporary name first: another demo may be reading the same folder."""
    temporary = path.with_name(temporary_name(path.name))
    picture.save(temporary, format="JPEG", quality=_QUALITY)
    temporary.replace(path)
