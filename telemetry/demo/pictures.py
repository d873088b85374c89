"""Draws the pictures that the demo trains on: real JPEG files, of two kinds that a small network can distinguish.

A set is identical on every machine with the same version of Pillow. It is drawn once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

from telemetry.util.files import temporary_name

if TYPE_CHECKING:
    from pathlib import Path

KINDS: Final = ("rings", "stripes")

_COMPLETE: Final = ".complete"
"""The file that is written last. If it is missing, the drawing was interrupted."""

_QUALITY: Final = 92
_GRAIN: Final = 10.0
"""Standard deviation of the noise, 0 to 255. Without noise a JPEG decodes several times faster than a photograph."""


@dataclass(frozen=True)
class PictureSet:
    """A number of pictures of this width and height in pixels."""

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
    paths = [folder / KINDS[number % len(KINDS)] / f"{number:04d}.jpg" for number in range(wanted.count)]
    if complete.exists() and all(path.exists() for path in paths):
        return 0
    complete.unlink(missing_ok=True)
    for kind in KINDS:
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(paths):
        temporary = path.with_name(temporary_name(path.name))  # another demo may be reading the same folder
        _draw(number, wanted).save(temporary, format="JPEG", quality=_QUALITY)
        temporary.replace(path)
    complete.touch()
    return wanted.count


def _draw(number: int, size: PictureSet) -> Image.Image:
    """Draw one picture: waves around a point, or straight ones. Its number is the seed."""
    random = np.random.default_rng(number)
    # How far right and how far down of the middle a pixel is. The width is 2.
    down, across = (np.mgrid[: size.height, : size.width] - [[[size.height / 2]], [[size.width / 2]]]) * 2 / size.width
    turn, light_from = random.uniform(0, 2 * np.pi, 2)
    if KINDS[number % len(KINDS)] == "rings":
        x, y = random.uniform(-0.6, 0.6, 2)
        place = np.hypot(across - x, down - y)
    else:
        place = np.cos(turn) * across + np.sin(turn) * down
    pattern = 0.5 + 0.5 * np.sin(random.uniform(18, 45) * place)
    # A dark colour and a light one, blended by the pattern; light that falls off to one side; grain.
    dark, light = random.uniform(0, 120, 3), random.uniform(130, 255, 3)
    shade = 1.0 + 0.25 * (np.cos(light_from) * across + np.sin(light_from) * down)
    grain = _GRAIN * random.standard_normal((size.height, size.width, 1))
    pixels = (dark + (light - dark) * pattern[..., None]) * shade[..., None] + grain
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
