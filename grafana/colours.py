"""Each thing has the same colour everywhere, also on the page of the report.

The colours of series can be told apart with colour blindness and on both of Grafana's themes, which
`tests/test_palette.py` computes. States have names from Grafana's own palette, which fit both themes.
"""

from __future__ import annotations

from typing import Final

from telemetry.report.html import palette

GOOD: Final = "green"
FAIR: Final = "yellow"
BAD: Final = "red"
NEUTRAL: Final = "blue"

CATEGORIES: Final = palette.CATEGORIES
"""Colours of the ledger's categories, from the bottom of the stack upwards."""

COMPUTE_PARTS: Final = {
    "copy": palette.ORANGE,
    "forward": palette.BLUE,
    "backward": palette.GREEN,
    "optimizer": palette.PURPLE,
    "compile": palette.RED,
    "other": palette.GREY,
}
"""Colours of the parts of the compute."""

LOST: Final = {name: palette.GOODPUT[name] for name in ("redone", "down", "stuck", "restore", "replay", "startup")}
"""Colours of what restarts and hangs cost."""

WAITS: Final = {"exposed": palette.RED, "hidden": palette.BLUE}
WAITED_FOR: Final = {"fetch wait": palette.RED, "head of line": palette.YELLOW, "transfer wait": palette.PURPLE}
WORKERS: Final = {"running": palette.GREEN, "blocked": palette.RED, "without a core": palette.ORANGE}
PRESSURE: Final = {"cpu": palette.ORANGE, "io": palette.RED, "memory": palette.PURPLE}

NO_STALL: Final = palette.GREEN
CAUSES: Final = {
    "loader_on_training_thread": palette.DARK_RED,
    "workers_cpu_bound": "#F04662",
    "workers_io_bound": "#F19244",
    "workers_throttled": "#9E5834",
    "worker_startup": "#A2843C",
    "uneven_batches": "#96ACBC",
    "batch_transfer": "#CA9F00",
    "worker_stuck": "#AF5799",
    "source_slow": "#D4630F",
    "straggler": "#328AF8",
    "checkpoint": palette.PURPLE,
    "gc_pause": "#C47DC4",
    "recompiling": "#604A8B",
    "host_bound": "#33677D",
    "gpu_throttled": "#4A61CE",
    "unknown": palette.GREY,
}
"""Reds, browns and yellows, mostly: waiting for data. Blues and purples: other causes."""
