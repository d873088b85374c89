"""How large a demo is, and the error that ends one."""

from __future__ import annotations

from dataclasses import dataclass


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """How large a demo is.

    Attributes:
        pictures: how many pictures to train on.
        width, height: their size in pixels.
        seconds: how long to train.
        poll_seconds: time between two rows about the running training.
        arguments: further arguments of the training script.
    """

    pictures: int = 384
    width: int = 512
    height: int = 384
    seconds: float = 25.0
    poll_seconds: float = 2.0
    arguments: tuple[str, ...] = ()
