"""Colours that people with colour blindness can tell apart (Okabe and Ito), legible on light and on dark pages.

The dashboards show the same things in the same kind of colour: see `grafana/colours.py`.
"""

from __future__ import annotations

from typing import Final

from telemetry.core.labels import CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP

GREEN: Final = "#009E73"
RED: Final = "#D55E00"
BLUE: Final = "#0072B2"
PURPLE: Final = "#CC79A7"
LIGHT_BLUE: Final = "#56B4E9"
ORANGE: Final = "#E69F00"
GREY: Final = "#8A8F98"
YELLOW: Final = "#F0E442"

CATEGORIES: Final = {
    COMPUTE: GREEN,
    DATA_WAIT: RED,
    EVALUATION: BLUE,
    CHECKPOINT: PURPLE,
    STARTUP: LIGHT_BLUE,
    OTHER: GREY,
}
"""Of the ledger, from the bottom of the stack upwards."""

GOODPUT: Final = {
    "productive": GREEN,
    "data_wait": RED,
    "evaluation": BLUE,
    "checkpoint": PURPLE,
    "startup": LIGHT_BLUE,
    "redone": ORANGE,
    "restore": "#7B5EA7",
    "replay": YELLOW,
    "stuck": "#A6340B",
    "down": "#4D4D4D",
    "other": GREY,
}

TRACE: Final = {
    "Kernel": GREEN,
    "Communication": BLUE,
    "Memcpy": ORANGE,
    "Memset": YELLOW,
    "Runtime": LIGHT_BLUE,
    "DataLoader": RED,
    "CPU Exec": PURPLE,
    "Other": GREY,
}
"""Of the average step of a trace."""

MARKS: Final = {
    "restart": "#4D4D4D",
    "stall": RED,
    "hang": "#A6340B",
    "evaluation": BLUE,
    "checkpoint": PURPLE,
    "snapshot": LIGHT_BLUE,
    "change": ORANGE,
}
