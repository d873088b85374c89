"""Writes the generated part of integrations.md: ``python docs/tools/generate_figures.py``.

The table comes from `telemetry.agent.figures`. The text around it is written by hand, in integrations.md itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from telemetry.agent.figures import STATE_FIGURES, WINDOW_FIGURES, metric_figures

PAGE: Final = Path(__file__).resolve().parents[1] / "integrations.md"
BEGIN: Final = "<!-- begin generated: `make docs-reference` writes this part from telemetry/agent/figures.py -->\n"
END: Final = "<!-- end generated -->\n"

_HEAD: Final = "| Name | Unit | Meaning | Absent |\n| --- | --- | --- | --- |\n"


def page() -> str:
    """The whole document, with its generated part made anew."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks the marks of the generated part: {BEGIN}{END}")
    return f"{before}{BEGIN}\n{generated()}\n{END}{after}"


def generated() -> str:
    """The tables of figures."""
    parts = (
        ("### Of the newest window", WINDOW_FIGURES),
        ("### Of the run so far", STATE_FIGURES),
        ("### Metrics without a label", metric_figures()),
    )
    return "\n".join(f"{title}\n\n{_HEAD}{''.join(map(_row, figures))}" for title, figures in parts)


def _row(figure: object) -> str:
    cells = (f"`{figure.name}`", figure.unit, figure.help, figure.absent)  # type: ignore[attr-defined]
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
