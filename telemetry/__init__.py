"""An always-on agent inside a PyTorch training process: where every second of the run went.

    import telemetry

    telemetry.start("runs/today")

or, without touching the script, ``telemetry run train.py``. Importing this package loads nothing but itself.
"""

from __future__ import annotations

from telemetry._version import __version__
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
