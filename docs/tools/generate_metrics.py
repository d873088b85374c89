"""Writes the generated part of METRICS.md: ``python docs/tools/generate_metrics.py``.

The tables come from `telemetry.node.metrics`. The text around them is written by hand, in METRICS.md itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from telemetry.node.metrics import SECTIONS, metrics

if TYPE_CHECKING:
    from telemetry.node.metrics import Metric, MetricGroup

DOCUMENT = Path(__file__).resolve().parents[1] / "METRICS.md"
BEGIN = "<!-- begin generated: `make docs-reference` writes this part from telemetry/node/metrics.py -->\n"
END = "<!-- end generated -->\n"

METRICS_HEAD = "| Name | Type | Unit | Labels | Meaning | Absent |\n|---|---|---|---|---|---|\n"
LABELS_HEAD = """\
## Label values

All are closed sets except `source`: its values are the names of the agent's parts, at most a few dozen.

| Label | Of | Values |
|---|---|---|
"""


def text() -> str:
    """The whole document, with its generated part made anew."""
    before, begin, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT} lacks the marks of the generated part: {BEGIN}{END}")
    return f"{before}{BEGIN}\n{generated()}\n{END}{after}"


def generated() -> str:
    """The tables of metrics, and the table of label values."""
    return "\n".join([*(_section(title, groups) for title, groups in SECTIONS.items()), _label_values()])


def _section(title: str, groups: tuple[MetricGroup[Any], ...]) -> str:
    rows = (_row(group, metric) for group in groups for metric in group.metrics)
    return f"## {title}\n\n{METRICS_HEAD}{''.join(rows)}"


def _row(group: MetricGroup[Any], metric: Metric[Any]) -> str:
    labels = ["node", *group.labels] if group.of_node else [*group.labels]
    if metric.label is not None:
        labels.append(metric.label.name)
    if metric.type == "histogram":
        labels.append("le")
    cells = (
        f"`{metric.name}`",
        metric.type,
        metric.unit,
        ", ".join(f"`{label}`" for label in labels),
        f"{metric.help} {metric.details}".strip(),
        group.absent if metric.absent is None else metric.absent,
    )
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|\n"


def _label_values() -> str:
    """One row for each label with a closed set of values, and the metrics that have it."""
    users: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for _, metric in metrics():
        if metric.label is not None and metric.label.values:
            users.setdefault((metric.label.name, metric.label.values), []).append(metric.name)
    rows = (
        f"| `{label}` | {', '.join(f'`{name}`' for name in names)} | {', '.join(f'`{value}`' for value in values)} |\n"
        for (label, values), names in users.items()
    )
    return LABELS_HEAD + "".join(rows)


if __name__ == "__main__":
    DOCUMENT.write_text(text(), encoding="utf-8")
