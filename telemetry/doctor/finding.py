"""What checks are told, and what they find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from telemetry.config import Config, SettingError

OK: Final = "ok"
ABSENT: Final = "--"
PROBLEM: Final = "!!"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found. ``status`` is ``ok``, ``--`` (absent, but harmless) or ``!!`` (a problem)."""

    status: str
    name: str
    text: str


@dataclass(slots=True)
class Place:
    """What the checks are told, and tell each other.

    Attributes:
        config: the settings; the defaults where they are not valid.
        error: why they are not.
        gpus: whether NVML has found any.
    """

    config: Config
    error: SettingError | None = None
    gpus: bool = False


def as_bytes(amount: float) -> str:
    """Bytes in the unit a person would use."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
