"""Data sets on disk, written anew for each run: photographs, documents, recordings."""

from __future__ import annotations

import io
import random
import wave
from pathlib import Path

import numpy as np
from PIL import Image


def photograph(generator: np.random.Generator, width: int, height: int) -> bytes:
    """A JPEG with large shapes and some grain, so that it decodes like one from a camera."""
    coarse = generator.integers(0, 256, (height // 40, width // 40, 3), dtype=np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    grain = generator.normal(0, 9, (height, width, 1)).astype(np.int16)
    file = io.BytesIO()
    Image.fromarray(np.clip(picture + grain, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=88)
    return file.getvalue()


def write_photographs(folder: Path, count: int, width: int, height: int) -> list[Path]:
    """So many JPEG files."""
    generator = np.random.default_rng(0)
    paths = [folder / f"{number:04}.jpg" for number in range(count)]
    for path in paths:
        path.write_bytes(photograph(generator, width, height))
    return paths


def documents(count: int, words: int) -> list[str]:
    """Texts of so many words each, of a made-up language."""
    chance = random.Random(0)  # noqa: S311
    syllables = ["ka", "to", "mi", "ren", "sul", "ova", "pe", "dri", "an", "gu", "lis", "eth"]
    vocabulary = ["".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(3000)]
    return [" ".join(chance.choices(vocabulary, k=words)) for _ in range(count)]


def write_recordings(folder: Path, count: int, seconds: float) -> list[Path]:
    """So many mono WAV files of 16 kHz."""
    generator = np.random.default_rng(0)
    paths = [folder / f"{number:04}.wav" for number in range(count)]
    for path in paths:
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(generator.normal(0, 3000, int(16000 * seconds)).astype(np.int16).tobytes())
    return paths
