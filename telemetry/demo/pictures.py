"""Draws the pictures that the demo trains on: real JPEG files, of two kinds that a small network can distinguish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

from telemetry.safety.files import temporary_name

if TYPE_CHECKING:
    from pathlib import Path

KINDS: Final = ("rings", "stripes")


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
            _draw(number, width, height).save(temporary, format="JPEG", quality=92)
            temporary.replace(path)
            drawn += 1
    return drawn


def _draw(number: int, width: int, height: int) -> Image.Image:
    """Draw one picture: dark and light waves around a point, or straight ones. Its number is the seed."""
    random = np.random.default_rng(number)
    down, across = np.mgrid[:height, :width] * 2 / width
    x, y = random.uniform(0.2, 1.8, 2)
    rings = KINDS[number % len(KINDS)] == "rings"
    place = np.hypot(across - x, down - y) if rings else np.cos(np.pi * x) * across + np.sin(np.pi * x) * down
    wave = 0.5 + 0.5 * np.sin(random.uniform(18, 45) * place[..., None])
    dark, light = random.uniform(0, 120, 3), random.uniform(130, 255, 3)
    # Noise, as in a photograph: without it a JPEG decodes several times faster.
    pixels = dark + (light - dark) * wave + random.normal(0, 10, (height, width, 1))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
