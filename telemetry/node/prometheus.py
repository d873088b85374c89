"""Answers scrapes of a node, and writes the target file by which Prometheus finds it.

Each rank puts numbers on the board. Only a scrape makes text of them: `prometheus_client` renders it, from families
that are built one sample after another.
"""

from __future__ import annotations

import json
import os
import zlib
from _thread import allocate_lock
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import structs

from telemetry.node.board import Numbers
from telemetry.node.metrics import GPU_GROUPS, GROUPS, metrics
from telemetry.records import Histogram
from telemetry.util.clock import sleep
from telemetry.util.files import read_small, replace_file
from telemetry.util.processes import slug

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from prometheus_client.core import Metric, Sample

    from telemetry.node.board import Board, RankState
    from telemetry.node.metrics import MetricGroup, RunView

_SAMPLES_AT_A_TIME: Final = 32
"""After so many samples, in 0.3 ms, the training thread gets its turn."""

_GZIP_LEVEL: Final = 1
_GZIP_WINDOW: Final = 31  # makes zlib write gzip's header and end

_FORK_SECONDS: Final = 1.0


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
        self._kept: list[RankState] | None = None
        self.machine = Numbers()

    def keep(self) -> None:
        """Read the states for the last time, because the board may be removed before the next scrape."""
        self._kept = self._board.states()

    def page(self, accept: str, accept_encoding: str) -> Page:
        """The answer to a scrape with these headers, see `rendered`."""
        states = self._board.states() if self._kept is None else self._kept
        return rendered(states, self.machine, self._run, self._node, accept, accept_encoding)


def rendered(  # noqa: PLR0917 - what is shown, its two names, and two headers
    states: Iterable[RankState], machine: Numbers, run: str, node: str, accept: str = "", accept_encoding: str = ""
) -> Page:
    """Render the metrics of a node as OpenMetrics or as Prometheus's older text, whichever a scraper accepts."""
    library = _library()
    render, content_type = library.encoder(accept)
    ranks = [
        ({"run": run, "rank": str(state.head.rank)}, numbers)
        for state in states
        for numbers in (state.numbers, *state.numbers.others)
    ]
    openmetrics = content_type.startswith("application/")
    body = render(_Families(library, ranks, [({"run": run, "node": node}, machine)], with_created=openmetrics))
    if not library.gzip_accepted(accept_encoding):
        return Page(content_type, "", body)
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
    return Page(content_type, "gzip", packer.compress(body) + packer.flush())


class _Families:
    """Stands in for a registry of the library, so that nothing of ours is in a registry of the script.

    The families and their samples are made while the library goes through them, and every few samples the training
    thread gets its turn. Rendering holds the GIL for 5 us a sample: 3,000 samples at once made a step 5 ms longer.

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
        self._made = 0

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
            family.samples = self._samples(name, base, label.name if label else "", found, created=created)
            yield family

    def _samples(
        self, name: str, base: str, label: str, found: list[tuple[dict[str, str], Numbers]], *, created: bool
    ) -> Any:
        sample = self._library.sample
        for labels, numbers in found:
            value = numbers.values.get(name)
            if value is None:
                yield from self._histogram(base, labels, numbers.histograms[name])
            elif isinstance(value, dict):
                for each, number in value.items():
                    yield self._counted(sample(name, {**labels, label: each}, number))
            else:
                yield self._counted(sample(name, labels, value))
            if created:
                yield self._counted(sample(f"{base}_created", labels, numbers.started))

    def _histogram(self, name: str, labels: dict[str, str], histogram: Histogram) -> Iterator[Sample]:
        sample, count = self._library.sample, 0
        for bound, more in zip((*map(repr, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            count += more
            yield self._counted(sample(f"{name}_bucket", {**labels, "le": bound}, count))
        yield self._counted(sample(f"{name}_count", labels, count))
        yield self._counted(sample(f"{name}_sum", labels, histogram.total))

    def _counted(self, sample: Sample) -> Sample:
        self._made += 1
        if self._made % _SAMPLES_AT_A_TIME == 0:
            sleep(0)
        return sample


class _Library(NamedTuple):
    metric: type[Metric]
    sample: type[Sample]
    choose_encoder: Callable[[str], tuple[Callable[[Any], bytes], str]]
    gzip_accepted: Callable[[str], bool]
    openmetrics: Callable[[Any], bytes]

    def encoder(self, accept: str) -> tuple[Callable[[Any], bytes], str]:
        """The function that renders the format that a scraper accepts, and its content type."""
        render, content_type = self.choose_encoder(accept)
        return (self.openmetrics if content_type.startswith("application/") else render), content_type


_importing = allocate_lock()
_fork_waited = False


def _library() -> _Library:
    """Import the library at the first scrape, because most ranks are never scraped, and it takes 11 ms.

    A process that is forked while another thread imports a module can never import that module. So a fork waits.
    """
    global _loaded  # noqa: PLW0603
    if _loaded is None:
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
        with _importing:
            from prometheus_client.core import Metric, Sample
            from prometheus_client.exposition import choose_encoder, gzip_accepted
            from prometheus_client.openmetrics import exposition as openmetrics
        render = openmetrics.generate_latest
        if "escaping" in signature(render).parameters:
            # Our names are valid in any scheme, so none of them changes the text. The default scheme goes through each
            # character in Python, which takes twice the time (0.26).
            render = partial(render, escaping=openmetrics.ALLOWUTF8)
        _loaded = _Library(Metric, Sample, choose_encoder, gzip_accepted, render)
    return _loaded


_loaded: _Library | None = None


def _before_fork() -> None:
    global _fork_waited  # noqa: PLW0603
    _fork_waited = _importing.acquire(timeout=_FORK_SECONDS)


def _after_fork() -> None:
    global _fork_waited
    waited, _fork_waited = _fork_waited, False
    if waited:
        _importing.release()


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
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        content = json.dumps([{"targets": [target], "labels": self._labels}], indent=2).encode() + b"\n"
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
