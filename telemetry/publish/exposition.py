"""A rank's state in Prometheus's text format, one family at a time.

`telemetry.publish.metrics` declares the metrics. This module renders the text itself, because `prometheus_client` takes
ten times as long. A test compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.publish.metrics.table import SECTIONS
from telemetry.records import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from telemetry.core.views import RunView
    from telemetry.publish.metrics.metric import Metric, MetricGroup, Reading

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class RenderedFamily(NamedTuple):
    """The text of a family: its HELP and TYPE lines, which are the same for all ranks, and its samples."""

    header: bytes
    samples: bytes


class Exposition:
    """Renders the families of one rank, and those of the machine as this rank has measured it.

    Args:
        run: name of the run. It is on every sample.
        rank: global rank. It is on every sample of the rank.
        node: name of the node. It is on every sample of the machine.
    """

    def __init__(self, run: str, rank: int, node: str) -> None:
        of_rank, of_node = {"run": run, "rank": str(rank)}, {"run": run, "node": node}
        groups = [group for section in SECTIONS for group in section.groups]
        self._of_rank = [_GroupText(group, of_rank) for group in groups if not group.of_node]
        self._of_node = [_GroupText(group, of_node) for group in groups if group.of_node]

    def render(self, view: RunView) -> Iterator[RenderedFamily]:
        """Render the families of the rank. A metric that was not measured is absent.

        If the readings of a family have not changed since the last call, the same object is returned.
        """
        for group in self._of_rank:
            yield from group.render(view)

    def render_node(self, view: RunView) -> Iterator[RenderedFamily]:
        """Render the families of the machine, as `render` does."""
        for group in self._of_node:
            yield from group.render(view)


class _GroupText:
    """The families of one group of metrics."""

    def __init__(self, group: MetricGroup[Any], labels: Mapping[str, str]) -> None:
        self._group = group
        self._labels = labels
        self._group_labels: Mapping[str, str] | None = None
        self._families: list[_FamilyText] = []

    def render(self, view: RunView) -> Iterator[RenderedFamily]:
        record = self._group.record(view)
        if record is None:
            return
        labels = self._group.label_values(record)
        if labels != self._group_labels:
            self._group_labels = labels
            self._families = [_FamilyText(metric, {**self._labels, **labels}) for metric in self._group.metrics]
        for family in self._families:
            rendered = family.render(family.read(record))
            if rendered is not None:
                yield rendered


class _FamilyText:
    """One family. It keeps its newest text, because half of the families do not change within a second."""

    def __init__(self, metric: Metric[Any], labels: Mapping[str, str]) -> None:
        self.read = metric.read
        self._metric = metric
        self._labels = labels
        self._prefixes: dict[tuple[str, str], str] = {}
        self._newest: object = None
        self._rendered = RenderedFamily(_header(metric), b"")

    def render(self, reading: Reading) -> RenderedFamily | None:
        """The text of a reading; None if there is no reading."""
        if reading is None:
            return None
        # Copy the items: the owner of the mapping may change it later.
        newest = reading if isinstance(reading, (float, int, tuple, Histogram)) else tuple(reading.items())
        if newest != self._newest:
            self._rendered = RenderedFamily(self._rendered.header, self._text(reading).encode("utf-8", "replace"))
            self._newest = newest
        return self._rendered

    def _text(self, reading: float | Mapping[str, float] | tuple[str, ...] | Histogram) -> str:
        if isinstance(reading, (float, int)):
            return self._line(reading)
        if isinstance(reading, Histogram):
            return self._histogram(reading)
        if isinstance(reading, tuple):
            label = self._metric.label
            reading = {value: value in reading for value in label.values} if label is not None else {}
        return "".join([self._line(number, value) for value, number in reading.items()])

    def _histogram(self, histogram: Histogram) -> str:
        count, lines = 0, []
        for bound, more in zip((*map(repr, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            count += more
            lines.append(self._line(count, bound, "_bucket"))
        return "".join((*lines, self._line(count, suffix="_count"), self._line(histogram.total, suffix="_sum")))

    def _line(self, number: float, value: str = "", suffix: str = "") -> str:
        """One sample.

        Args:
            number: the value.
            value: value of the label that distinguishes it from the family's other samples.
            suffix: suffix of the name.
        """
        prefix = self._prefixes.get((value, suffix))
        if prefix is None:
            prefix = self._prefixes[value, suffix] = self._prefix(value, suffix)
        return f"{prefix}{float(number)!r}\n"

    def _prefix(self, value: str, suffix: str) -> str:
        labels = dict(self._labels)
        if suffix == "_bucket":
            labels["le"] = value
        elif self._metric.label is not None:
            labels[self._metric.label.name] = value
        pairs = ",".join(f'{name}="{_escaped(labels[name])}"' for name in sorted(labels))
        return f"{self._metric.name}{suffix}{{{pairs}}} "


def _header(metric: Metric[Any]) -> bytes:
    return f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.type}\n".encode()


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
