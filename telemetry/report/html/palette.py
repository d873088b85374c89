"""Colours that can be distinguished with the common kinds of colour blindness, and are legible on light and dark paper.

The hues are those of Okabe and Ito. Most are a little lighter or darker than theirs: any two of these eleven differ
enough for people with protanopia, deuteranopia or tritanopia. `tests/test_palette.py` computes by how much.

The dashboards show the same things in the same colours: see `grafana/colours.py`.
"""

from __future__ import annotations

from typing import Final

from telemetry.model.records import CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP

GREEN: Final = "#009D70"
RED: Final = "#D55E08"
BLUE: Final = "#0B74B5"
PURPLE: Final = "#8B2BE2"
LIGHT_BLUE: Final = "#56B0E4"
ORANGE: Final = "#D6953B"
GREY: Final = "#969295"
YELLOW: Final = "#BCA800"
PINK: Final = "#C978B1"
DARK_RED: Final = "#A5330A"
DARK_GREY: Final = "#5F5F5F"

CATEGORIES: Final = {
    COMPUTE: GREEN,
    DATA_WAIT: RED,
    EVALUATION: BLUE,
    CHECKPOINT: PURPLE,
    STARTUP: LIGHT_BLUE,
    OTHER: GREY,
}
"""Colours of the ledger, from the bottom of the stack upwards."""

GOODPUT: Final = {
    "productive": GREEN,
    "data_wait": RED,
    "evaluation": BLUE,
    "checkpoint": PURPLE,
    "startup": LIGHT_BLUE,
    "redone": ORANGE,
    "restore": PINK,
    "replay": YELLOW,
    "stuck": DARK_RED,
    "down": DARK_GREY,
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
"""Colours of the average step of a trace."""

MARKS: Final = {
    "restart": DARK_GREY,
    "stall": RED,
    "hang": DARK_RED,
    "evaluation": BLUE,
    "checkpoint": PURPLE,
    "snapshot": LIGHT_BLUE,
    "change": ORANGE,
}
