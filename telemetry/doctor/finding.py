"""The input and the results of checks."""

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
    """The result of a check. ``status`` is ``ok``, ``--`` (optional and missing) or ``!!`` (a problem)."""

    status: str
    name: str
    text: str


@dataclass(slots=True)
class CheckContext:
    """The input of the checks, and results that later checks use.

    Attributes:
        config: the settings; the defaults if the settings are not valid.
        error: why the settings are not valid.
        gpus: whether NVML has found any.
    """

    config: Config
    error: SettingError | None = None
    gpus: bool = False
