"""Declares what a metric is. `telemetry.publish.metrics.table` has all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeAlias, TypeVar

from telemetry.records import Histogram

if TYPE_CHECKING:
    from telemetry.core.views import RunView

MetricType: TypeAlias = Literal["counter", "gauge", "histogram"]

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"

NEVER: Final = "never"
NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})

Record = TypeVar("Record")
"""The record from which a group of metrics is read: a sample of a collector, or the whole view."""

Reading: TypeAlias = float | Mapping[str, float] | tuple[str, ...] | Histogram | None
"""A metric's value at one moment.

- None: not measured. The metric is absent.
- a number: one sample.
- a mapping: one sample for each value of the metric's label.
- a tuple, where the label's values are a closed set: 1 for the label values in it, 0 for the others.
- a histogram: its buckets, sum and count.
"""


@dataclass(frozen=True, slots=True)
class MetricLabel:
    """A label. The metric has one sample for each of its values.

    Attributes:
        name: name of the label.
        values: all possible values; empty if the set is open.
    """

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Generic[Record]):
    """One metric.

    Attributes:
        name: name in the exposition, with its unit. A counter's name ends in ``_total``.
        type: counter, gauge or histogram.
        help: one short plain sentence, the HELP text. It is part of every scrape.
        read: gets the reading from the record of the metric's group. Called at each publication, so it must be cheap.
        unit: base unit; empty for a state or a number without a unit.
        label: the label that distinguishes its samples, in addition to the group's labels.
        details: more sentences for docs/METRICS.md, in Markdown.
        absent: when there is no sample, if that differs from the group's.
    """

    name: str
    type: MetricType
    help: str
    read: Callable[[Record], Reading]
    unit: str = ""
    label: MetricLabel | None = None
    details: str = ""
    absent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricGroup(Generic[Record]):
    """Metrics that are read from one record and carry the same labels.

    Attributes:
        record: gets the record from the view; None if nothing was measured. Then all metrics of the group are absent.
        metrics: the metrics, in the order of the document.
        labels: names of the labels that all of them carry, in addition to ``run`` and ``rank``.
        of_node: whether they are about the machine, which all ranks of a node share. Then they carry ``node`` instead
            of ``rank``, and one rank shows them.
        label_values: the values of ``labels``.
        absent: when there is no sample.
    """

    record: Callable[[RunView], Record | None]
    metrics: tuple[Metric[Record], ...]
    labels: tuple[str, ...] = ()
    label_values: Callable[[Record], Mapping[str, str]] = lambda _: NO_LABELS
    absent: str = NEVER
    of_node: bool = False


@dataclass(frozen=True, slots=True)
class MetricSection:
    """Groups under one heading of docs/METRICS.md."""

    title: str
    groups: tuple[MetricGroup[Any], ...]
