"""An always-on agent inside a PyTorch training process: where every second of the run went.

    import telemetry

    telemetry.start("runs/today")

or, without touching the script, ``telemetry run train.py``. Importing this package loads nothing but itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from telemetry._version import __version__
from telemetry.util import clock as _clock  # noqa: F401 - now: a script may replace functions of `time` before it starts

if TYPE_CHECKING:
    from telemetry.api import metrics, phase, request_snapshot, resumed, start, step, stop, tokens, watch
    from telemetry.config import Config, SettingError

__all__ = [
    "Config",
    "SettingError",
    "__version__",
    "metrics",
    "phase",
    "request_snapshot",
    "resumed",
    "start",
    "step",
    "stop",
    "tokens",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Load what is public at its first use: ``python -m telemetry`` first has to look after the imports of the rest."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module("telemetry.config" if name in {"Config", "SettingError"} else "telemetry.api")
    globals()[name] = value = getattr(module, name)
    return value
