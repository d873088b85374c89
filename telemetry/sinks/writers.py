"""The writers of TensorBoard, W&B and MLflow, and what they have in common."""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import socket
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Final

from telemetry.safety.files import opened
from telemetry.util.clock import unix_time

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAMESPACE: Final = "telemetry"
"""Every key begins with it, so that it cannot be one of the user's."""


class SinkWaits(Exception):  # noqa: N818 - no error: the sink has nothing to write into yet
    """There is nothing to write into, such as no active run. The text names what is missing."""


@dataclass(frozen=True, slots=True)
class SinkItem:
    """The figures of a rank at the end of one window, or a stall that has opened, in words.

    Attributes:
        step: number of training steps so far, over all attempts of the run.
        prefix: of its keys. It contains the rank if several ranks may write into the same run.
    """

    step: int
    unix_seconds: float
    rank: int
    prefix: str
    figures: dict[str, float]
    stall: str


class Sink(ABC):
    """One library.

    Attributes:
        name: its name in the setting ``sinks``.
        gather_seconds: the shortest time between two writes. Meanwhile items are gathered.
    """

    name: ClassVar[str]
    gather_seconds = 0.0

    @abstractmethod
    def write(self, items: Sequence[SinkItem]) -> None:
        """Write some items, oldest first, on the sinks' thread. If it raises, all are written again later.

        Raises:
            SinkWaits: there is nothing to write into. The items are dropped.
        """


def make_sink(name: str, run_dir: Path) -> Sink:
    """Make a sink, and import what it needs.

    Raises:
        SinkWaits: its package is not installed.
        Exception: its package is broken.
    """
    # A folder of its name is no package: W&B makes one in the working folder.
    if name not in sys.modules and getattr(importlib.util.find_spec(name), "origin", None) is None:
        raise SinkWaits("the package is not installed")
    if name == TensorBoardSink.name:
        return TensorBoardSink(run_dir / name)
    return WandbSink() if name == WandbSink.name else MlflowSink()


# -- TensorBoard: an event file for each process -----------------------------------------------------------------------
# Its own writer of events would start a thread that the script sees. The file is opened for each write, so that there
# is no descriptor that a forked child could use, or that a script that closes all descriptors could give to another
# file.


class TensorBoardSink(Sink):
    """Writes into ``folder/rank-R``. If another process has used that folder, into ``rank-R.2`` and so on.

    So the attempts of a run that is restarted are separate curves.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder = folder
        self._files: dict[int, Path] = {}  # by rank, which a process may not know from the start
        self._event, self._record_writer = event_pb2.Event, RecordWriter
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        self._text = summary_pb2.SummaryMetadata(plugin_data=plugin)

    def write(self, items: Sequence[SinkItem]) -> None:
        """Append the items. The file never ends in half a record, at which a reader would stop.

        Raises:
            OSError: the file cannot be written.
        """
        path = self._files.get(items[-1].rank)
        if path is None:
            path = self._files[items[-1].rank] = self._new_file(items[-1].rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            before = os.fstat(file).st_size
            head = [] if before else [self._event(wall_time=unix_time(), file_version="brain.Event:2")]
            content = io.BytesIO()
            writer = self._record_writer(content)
            for event in (*head, *map(self._event_of, items)):
                writer.write(event.SerializeToString())
            if os.write(file, content.getbuffer()) < len(content.getbuffer()):
                os.ftruncate(file, before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)

    def _new_file(self, rank: int) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            folder = self._folder / (f"rank-{rank}" if number == 1 else f"rank-{rank}.{number}")
            try:
                folder.mkdir()
                break
            except FileExistsError:
                continue
        return folder / f"events.out.tfevents.{int(unix_time())}.{socket.gethostname()}.{os.getpid()}.{NAMESPACE}"

    def _event_of(self, item: SinkItem) -> Any:
        event = self._event(wall_time=item.unix_seconds, step=item.step)
        for name, value in item.figures.items():
            event.summary.value.add(tag=f"{NAMESPACE}/{name}", simple_value=value)
        if item.stall:
            text = event.summary.value.add(tag=f"{NAMESPACE}/stalls", metadata=self._text).tensor
            text.dtype = _STRING
            text.tensor_shape.dim.add(size=1)
            text.string_val.append(item.stall.encode("utf-8", "replace"))
        return event


_STRING: Final = 7
"""TensorFlow's number of the type string."""


# -- Weights & Biases: the figures join the row that the script logs next, in its own active run -----------------------
# The script numbers its rows. A row of ours would take a number, and W&B drops rows whose number is smaller than the
# newest. So ours are logged with ``commit=False`` and without a step: W&B stores them with the script's next row. The
# charts have an axis of their own, ``telemetry/step``.

_STEP: Final = f"{NAMESPACE}/step"


class WandbSink(Sink):
    """Writes into ``wandb.run``. Never imports wandb: without the script's import there is no run."""

    name = "wandb"

    def __init__(self) -> None:
        self._defined: str | None = None  # id of the run that has our axis

    def write(self, items: Sequence[SinkItem]) -> None:
        """Give the newest figures to the active run.

        Raises:
            SinkWaits: there is no active run.
        """
        run: Any = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            raise SinkWaits("there is no active W&B run; figures are written after the script's wandb.init()")
        if run.id != self._defined:
            run.define_metric(_STEP, hidden=True)
            run.define_metric(f"{NAMESPACE}/*", step_metric=_STEP)
            self._defined = run.id
        values: dict[str, float] = {}
        for item in items:
            if item.figures:
                values |= {f"{item.prefix}/{name}": value for name, value in item.figures.items()} | {_STEP: item.step}
            if item.stall:
                run.summary.update({f"{item.prefix}/last_stall": item.stall})
        if values:
            run.log(values, commit=False)


# -- MLflow: the figures become metrics of the script's active run -----------------------------------------------------

_METRICS_AT_ONCE: Final = 1000
"""A server takes at most this many metrics in one request."""

_TAG_LENGTH: Final = 500


class MlflowSink(Sink):
    """Writes into the newest active run of the process. Never imports MLflow: the script has to start the run.

    The run's end is not noticed: the rest is written into the run that was active last.
    """

    name = "mlflow"
    gather_seconds = 25.0  # three windows written together cost half as much as three alone

    def __init__(self) -> None:
        self._run_id: str | None = None

    def write(self, items: Sequence[SinkItem]) -> None:
        """Write all items into the run.

        Raises:
            SinkWaits: there has been no active run yet.
        """
        mlflow: Any = sys.modules.get("mlflow")
        self._run_id = _active_run_id(mlflow) or self._run_id
        if self._run_id is None:
            raise SinkWaits("there is no active MLflow run yet; figures are written after the script's start_run()")
        client = mlflow.MlflowClient()
        metrics = [
            mlflow.entities.Metric(f"{item.prefix}/{name}", value, int(item.unix_seconds * 1000), item.step)
            for item in items
            for name, value in item.figures.items()
        ]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            client.log_batch(self._run_id, metrics=metrics[start : start + _METRICS_AT_ONCE], synchronous=True)
        for item in items:
            if item.stall:
                client.set_tag(self._run_id, f"{item.prefix}/last_stall", item.stall[:_TAG_LENGTH])


def _active_run_id(mlflow: Any) -> str | None:
    """The run that any thread has started last. MLflow's public functions give only that of the calling thread."""
    fluent = getattr(getattr(mlflow, "tracking", None), "fluent", None)
    newest = getattr(fluent, "_get_latest_active_run", None)
    run = newest() if newest is not None else None
    return None if run is None else str(run.info.run_id)
