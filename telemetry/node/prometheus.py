"""Answers scrapes of a node, and writes the target file by which Prometheus finds it.

Each rank puts numbers on the board. Only a scrape makes text of them, at most once a second: `prometheus_client`
renders it, from families that are built one sample after another.
"""

from __future__ import annotations

import json
import zlib
from _thread import allocate_lock
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import structs

from telemetry.model.records import Histogram
from telemetry.node.board import Numbers
from telemetry.node.metrics import GPU_GROUPS, GROUPS, metrics
from telemetry.safety.files import read_small, replace_file
from telemetry.safety.gil import let_others_run
from telemetry.safety.imports import private
from telemetry.util.clock import NS, now_ns, sleep
from telemetry.util.identity import slug

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from prometheus_client.core import Metric, Sample

    from telemetry.node.board import Board, RankState
    from telemetry.node.metrics import MetricGroup, RunView

_KEPT_NS: Final = NS * 9 // 10
"""A page is rendered at most once in this time, and kept for scrapes in between. One scrape a second gets a new one."""

_TURN_NS: Final = NS // 10_000
"""After so much work the training thread gets its turn."""

_PATIENCE_NS: Final = NS
"""A page that takes longer is finished without such turns: a scraper waits for it."""

_GZIP_LEVEL: Final = 1
_GZIP_WINDOW: Final = 31  # makes zlib write gzip's header and end


# -- what a rank publishes -----------------------------------------------------------------------------------------


def numbers_of(view: RunView, *, of_node: bool = False) -> Numbers:
    """The readings of all metrics of a rank, or of its machine. What was not measured is absent."""
    others = [replace(view, gpu=gpu, energy=energy) for gpu, energy in view.other_gpus]
    return structs.replace(
        _numbers(view, (group for group in GROUPS if group.of_node == of_node)),
        others=() if of_node else tuple(_numbers(other, GPU_GROUPS) for other in others),
    )


def _numbers(view: RunView, groups: Iterable[MetricGroup[Any]]) -> Numbers:
    values: dict[str, float | dict[str, float]] = {}
    histograms: dict[str, Histogram] = {}
    labels: dict[str, dict[str, str]] = {}
    for group in groups:
        record = group.record(view)
        if record is None:
            continue
        if group.labels:
            labels[group.name] = {name: _valid(value) for name, value in group.label_values(record).items()}
        for metric in group.metrics:
            reading = metric.read(record)
            if reading is None:
                continue
            if isinstance(reading, Histogram):
                histograms[metric.name] = reading
            elif isinstance(reading, Mapping):
                values[metric.name] = {_valid(value): float(number) for value, number in reading.items()}
            elif isinstance(reading, tuple):
                closed = metric.label.values if metric.label is not None else ()
                values[metric.name] = {value: float(value in reading) for value in closed}
            else:
                values[metric.name] = float(reading)
    return Numbers(values=values, histograms=histograms, labels=labels, started=view.started_unix_seconds)


def _valid(text: str) -> str:
    """A label's value without lone surrogates, which a variable or a file's name may have."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


# -- a scrape ------------------------------------------------------------------------------------------------------


class Page(NamedTuple):
    """The body of an answer. ``encoding``: ``gzip``, or empty if the body is plain text."""

    content_type: str
    encoding: str
    body: bytes


class Exposition:
    """All metrics of a node: what each rank has published, and the machine as the serving rank sees it.

    Args:
        board: has the states of the ranks.
        run: name of the run. It is on every sample.
        node: this machine's name. It is on every sample of the machine.

    Attributes:
        machine: the readings of the machine. Only the serving rank shows its own. So each is there once, and is never
            from a rank that has stopped reading.
    """

    def __init__(self, board: Board, run: str, node: str) -> None:
        self._board = board
        self._run = run
        self._node = node
        self._last_states: list[RankState] | None = None
        self._rendering = allocate_lock()
        self._kept: dict[tuple[bool, bool], tuple[int, bytes]] = {}
        self.machine = Numbers()

    def keep(self) -> None:
        """Read the states for the last time, because the board may be removed before the next scrape."""
        self._last_states = self._board.states()
        self._kept.clear()

    def page(self, accept: str, accept_encoding: str) -> Page:
        """The answer to a scrape with these headers: OpenMetrics or Prometheus's older text, and gzip if accepted."""
        library = _LIBRARY
        content_type = library.choose_encoder(accept)[1]
        openmetrics, zipped = content_type.startswith("application/"), library.gzip_accepted(accept_encoding)
        with self._rendering:
            made_ns, body = self._kept.get((openmetrics, zipped), (-_KEPT_NS, b""))
            if (now := now_ns()) - made_ns >= _KEPT_NS:
                states = self._board.states() if self._last_states is None else self._last_states
                body = rendered(states, self.machine, self._run, self._node, openmetrics=openmetrics)
                if zipped:
                    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
                    body = packer.compress(body) + packer.flush()
                self._kept[openmetrics, zipped] = now, body
        return Page(content_type, "gzip" if zipped else "", body)


def rendered(states: Iterable[RankState], machine: Numbers, run: str, node: str, *, openmetrics: bool = False) -> bytes:
    """Render the metrics of a node as OpenMetrics, or as Prometheus's older text."""
    library = _LIBRARY
    ranks = [
        ({"run": run, "rank": str(state.head.rank)}, numbers)
        for state in states
        for numbers in (state.numbers, *state.numbers.others)
    ]
    families = _Families(library, ranks, [({"run": run, "node": node}, machine)], with_created=openmetrics)
    return library.openmetrics(families) if openmetrics else library.text(families)


class _Families:
    """Stands in for a registry of the library, so that nothing of ours is in a registry of the script.

    The families and their samples are made while the library goes through them, and the training thread gets its turn
    after each 0.1 ms. Rendering takes 5 us a sample: 3,000 samples at once made a step 5 ms longer.

    Args:
        ranks: the labels and the readings of each rank.
        machine: the labels and the readings of the machine.
        with_created: whether to show since when a counter counts. Only OpenMetrics has a form for it. Each family shows
            only one, because Prometheus stores each as another series.
    """

    def __init__(
        self,
        library: _Library,
        ranks: Sequence[tuple[dict[str, str], Numbers]],
        machine: Sequence[tuple[dict[str, str], Numbers]],
        *,
        with_created: bool,
    ) -> None:
        self._library = library
        self._ranks = ranks
        self._machine = machine
        self._with_created = with_created
        self._began_ns = self._turn_ns = now_ns()

    def collect(self) -> Iterator[Metric]:
        """All families that have a sample, in the order of the table. The machine's come last."""
        for group, metric in sorted(metrics(), key=lambda each: each[0].of_node):
            sources = self._machine if group.of_node else self._ranks
            name, label = metric.name, metric.label
            found = [
                ({**labels, **numbers.labels.get(group.name, {})}, numbers)
                for labels, numbers in sources
                if name in numbers.values or name in numbers.histograms
            ]
            if not found:
                continue
            base = name.removesuffix("_total")
            # If the unit is not the end of the name, as in bytes per second, it would be added to the name.
            unit = metric.unit if metric.unit and base.endswith(f"_{metric.unit}") else ""
            family = self._library.metric(base, metric.help, metric.type, unit)
            created = self._with_created and metric.from_zero and metric.type != "gauge" and label is None
            samples = self._samples(name, base, label.name if label else "", found, created=created)
            family.samples = self._in_turns(samples)
            yield family

    def _samples(
        self, name: str, base: str, label: str, found: list[tuple[dict[str, str], Numbers]], *, created: bool
    ) -> Iterator[Sample]:
        sample = self._library.sample
        for labels, numbers in found:
            value = numbers.values.get(name)
            if value is None:
                yield from self._histogram(base, labels, numbers.histograms[name])
            elif isinstance(value, dict):
                for each, number in value.items():
                    yield sample(name, {**labels, label: each}, number)
            else:
                yield sample(name, labels, value)
            if created:
                yield sample(f"{base}_created", labels, numbers.started)

    def _histogram(self, name: str, labels: dict[str, str], histogram: Histogram) -> Iterator[Sample]:
        sample, count = self._library.sample, 0
        for bound, more in zip((*map(repr, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            count += more
            yield sample(f"{name}_bucket", {**labels, "le": bound}, count)
        yield sample(f"{name}_count", labels, count)
        yield sample(f"{name}_sum", labels, histogram.total)

    def _in_turns(self, samples: Iterator[Sample]) -> Any:
        for sample in samples:
            yield sample
            now = now_ns()
            if now - self._turn_ns >= _TURN_NS:
                # Beside a loop that often gives up the GIL, this thread may wait for it for 5 ms and more each time.
                let_others_run() if now - self._began_ns < _PATIENCE_NS else sleep(0)
                self._turn_ns = now_ns()


class _Library(NamedTuple):
    metric: type[Metric]
    sample: type[Sample]
    choose_encoder: Callable[[str], tuple[Any, str]]
    gzip_accepted: Callable[[str], bool]
    text: Callable[[Any], bytes]
    openmetrics: Callable[[Any], bytes]


def _import_library() -> _Library:
    """Import it for us alone: a script may set ``PROMETHEUS_MULTIPROC_DIR`` before it imports its own."""
    client = private("prometheus_client", "prometheus_client.exposition", "prometheus_client.openmetrics.exposition")
    exposition, openmetrics = client.exposition, client.openmetrics.exposition
    render = openmetrics.generate_latest
    if "escaping" in signature(render).parameters:
        # Our names are valid in any scheme, so none of them changes the text. The default scheme goes through each
        # character in Python, which takes twice the time (0.26).
        render = partial(render, escaping=openmetrics.ALLOWUTF8)
    return _Library(
        client.Metric, client.samples.Sample, exposition.choose_encoder, exposition.gzip_accepted,
        exposition.generate_latest, render,
    )  # fmt: skip


_LIBRARY: Final = _import_library()


# -- discovery -----------------------------------------------------------------------------------------------------


class TargetFile:
    """A file for Prometheus's ``file_sd_configs``, with the address of this node's metrics for this run.

    There is one file for each run and node. A serving rank writes it, and the last rank that leaves removes it.

    Args:
        folder: the folder. Many runs and nodes may share it: the file's name distinguishes them. Prometheus watches
            ``folder/*.json``.
        run: identifies the run. It is the board's name, because two runs may have the same name.
        node: this machine's name.
    """

    def __init__(self, folder: Path, run: str, node: str) -> None:
        self.path = folder / f"{slug(run)}.{slug(node)}.json"
        self._labels = {"node": node}

    def write(self, host: str, port: int) -> None:
        """Write the address of the endpoint, unless the file has it.

        Raises:
            OSError: the folder cannot be written.
        """
        content = json.dumps([{"targets": [at_port(host, port)], "labels": self._labels}], indent=2).encode() + b"\n"
        try:
            if read_small(self.path) == content:
                return
        except OSError:
            pass
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, content, for_everyone=True)  # Prometheus runs as another user

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def at_port(host: str, port: int) -> str:
    """A host, perhaps an IPv6 address, with a port, as URLs have them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
