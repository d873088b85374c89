"""TensorBoard: writes an event file for each process, with TensorBoard's own records."""

from __future__ import annotations

import io
import os
import socket
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from telemetry.sinks.thread import NAMESPACE, Sink
from telemetry.util.clock import unix_time
from telemetry.util.files import Descriptor, opened

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from telemetry.sinks.thread import SinkItem

_VERSION: Final = "brain.Event:2"
_MAX_FOLDERS: Final = 10_000
_TEXT: Final = summary_pb2.SummaryMetadata(plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text"))


class TensorBoardSink(Sink):
    """Writes into ``folder/rank-R``. If another process has used that folder, into ``rank-R.2`` and so on.

    So the attempts of a run that is restarted are separate curves. The file is opened at the first write.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rank: int | None = None
        self._path = folder
        self._file: Descriptor | None = None

    def write(self, items: Sequence[SinkItem]) -> None:
        """Write the items. The file never ends in half a record.

        Raises:
            OSError: the file cannot be written.
        """
        for rank, of_rank in groupby(items, key=lambda item: item.rank):
            if rank != self._rank:
                self.close()
                self._rank, self._path = rank, self._new_path(rank)
            if self._file is None or not self._file.is_in_place():  # other code may have closed or deleted it
                self._open()
            self._append([_event(item) for item in of_rank])

    def close(self) -> None:
        """Close the file."""
        self.forget()
        self._rank = None

    def forget(self) -> None:
        """Close the descriptor. Nothing is buffered."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> None:
        """Open the file. An earlier try may have left it, because a full disk fails the first record."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = Descriptor(opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
        if os.fstat(self._file.number).st_size:
            return
        try:
            self._append([event_pb2.Event(wall_time=unix_time(), file_version=_VERSION)])
        except OSError:
            self.forget()
            raise

    def _new_path(self, rank: int) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, _MAX_FOLDERS):
            folder = self._folder / (f"rank-{rank}" if number == 1 else f"rank-{rank}.{number}")
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            name = f"events.out.tfevents.{int(unix_time())}.{socket.gethostname()}.{os.getpid()}.{NAMESPACE}"
            return folder / name
        raise OSError(f"{self._folder} has {_MAX_FOLDERS} folders of rank {rank}")

    def _append(self, events: list[Any]) -> None:
        file = self._file
        if file is None:
            raise OSError("the event file is closed")
        buffer = io.BytesIO()
        writer = RecordWriter(buffer)
        for event in events:
            writer.write(event.SerializeToString())
        content = buffer.getvalue()
        before = os.fstat(file.number).st_size
        written = 0
        try:
            while written < len(content):
                written += os.write(file.number, content[written:])
        except OSError:
            if written:  # the disk is full: a reader would stop at half a record
                os.ftruncate(file.number, before)
            raise


def _event(item: SinkItem) -> Any:
    event = event_pb2.Event(wall_time=item.unix_seconds, step=item.step)
    for name, value in item.figures.items():
        event.summary.value.add(tag=f"{NAMESPACE}/{name}", simple_value=value)
    if item.stall:
        event.summary.value.add(tag=f"{NAMESPACE}/stalls", metadata=_TEXT, tensor=_tensor(item.stall))
    return event


def _tensor(text: str) -> Any:
    return tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING,
        tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)]),
        string_val=[text.encode("utf-8", "replace")],
    )
