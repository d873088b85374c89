"""Draws the pictures that the demo trains on: real JPEG files, of two kinds that a small network can distinguish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

from telemetry.util.files import temporary_name

if TYPE_CHECKING:
    from pathlib import Path

KINDS: Final = ("rings", "stripes")

_QUALITY: Final = 92
_GRAIN: Final = 10.0
"""Standard deviation of the noise, 0 to 255. Without noise a JPEG decodes several times faster than a photograph."""


def draw_missing(folder: Path, count: int, width: int, height: int) -> int:
    """Draw the pictures that are not in a folder yet, as ``KIND/NUMBER.jpg``. Returns how many were drawn.

    Raises:
        OSError: the folder cannot be written.
    """
    drawn = 0
    for number in range(count):
        path = folder / KINDS[number % len(KINDS)] / f"{number:04d}.jpg"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(temporary_name(path.name))  # another demo may be reading the same folder
            _draw(number, width, height).save(temporary, format="JPEG", quality=_QUALITY)
            temporary.replace(path)
            drawn += 1
    return drawn


def _draw(number: int, width: int, height: int) -> Image.Image:
    """Draw one picture: waves around a point, or straight ones. Its number is the seed."""
    random = np.random.default_rng(number)
    # How far right and how far down of the middle a pixel is. The width is 2.
    down, across = (np.mgrid[:height, :width] - [[[height / 2]], [[width / 2]]]) * 2 / width
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
    grain = _GRAIN * random.standard_normal((height, width, 1))
    pixels = (dark + (light - dark) * pattern[..., None]) * shade[..., None] + grain
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
