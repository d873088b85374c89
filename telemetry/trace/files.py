"""Reads a trace file as a stream of events: within limits, whatever is in the file.

The events are one JSON array. A batch is cut where the text looks like the border between two events, and then parsed.
If that succeeds, it was a border, because the parsed text begins at one and consists of complete values. If it fails,
the events of that stretch are found one by one, by a scanner that knows strings and brackets.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import stat
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHUNK: Final = 1 << 16
"""Bytes read at a time. Batches of this size are parsed 3.5 times faster than a whole file: they stay in the cache."""

_MIB: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"
_RATIO_COUNTS_FROM: Final = 16 * _MIB
"""Uncompressed bytes from which `ReadLimits.max_ratio` applies. Short files may compress better."""

_WANTED: Final = frozenset({"deviceProperties", "distributedInfo"})
_BORDER: Final = re.compile(rb"\}\s*,\s*\{")
_BORDERS_TRIED: Final = 64
_BLANK: Final = re.compile(rb"\s*")
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STRUCTURE: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]]', re.DOTALL)
_SCALAR: Final = re.compile(rb'[^\s,:"{}\[\]]+')
_NO_NUMBER: Final = re.compile(
    rb'("[^"\\]*(?:\\.[^"\\]*)*")|[-+]?(?:inf(?:inity)?|nan|N/A)\b', re.DOTALL | re.IGNORECASE
)
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_NO_JSON: Final = (msgspec.DecodeError, ValueError, RecursionError)


class TraceError(Exception):
    """A file cannot be read as a trace; the text has the reason, the place, and what to do."""


class NoTraceError(TraceError):
    """The file is valid JSON, but not a trace."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits for one file. They bound the memory that a hostile file can take.

    Attributes:
        max_bytes: size of the file, uncompressed.
        max_ratio: uncompressed bytes per compressed byte. Real traces reach 30, a gzip bomb 1,000.
        max_depth: nesting of brackets, when events are read one by one. Otherwise the parser's own limit holds.
        max_event_bytes: size of one event, and of one value beside the events.
        max_events: number of kept events. A trace of 540,000 events took 130 MiB to analyse.
        max_name_bytes: size of all distinct names together.
    """

    max_bytes: int = 4096 * _MIB
    max_ratio: float = 250.0
    max_depth: int = 64
    max_event_bytes: int = 16 * _MIB
    max_events: int = 5_000_000
    max_name_bytes: int = 64 * _MIB


class FileStream:
    """The uncompressed bytes of a file. Its first bytes decide whether it is gzip, not its name.

    Args:
        path: the file.
        limits: the limits for reading it.
        follow: whether it may be a symbolic link.

    Attributes:
        produced: uncompressed bytes that were read so far.

    Raises:
        TraceError: it cannot be opened, or is not a regular file.
    """

    def __init__(self, path: Path, limits: ReadLimits, *, follow: bool = True) -> None:
        self.path = path
        self.produced = 0
        self._limits = limits
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)  # no wait for a FIFO
        try:
            number = os.open(path, flags)
        except OSError as error:
            raise TraceError(f"{path} cannot be opened: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise TraceError(f"{path} is no regular file: name a trace, or a folder with traces")
        self._file = os.fdopen(number, "rb")
        self._plain: IO[bytes] | gzip.GzipFile | None = None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self) -> bytes:
        """The next uncompressed bytes, at most `CHUNK` of them; empty at the end.

        Raises:
            TraceError: the file is empty, damaged, cut off or beyond the limits.
        """
        path, limits = self.path, self._limits
        try:
            if self._plain is None:
                packed = self._file.peek(len(_GZIP)).startswith(_GZIP)
                self._plain = gzip.GzipFile(fileobj=self._file, mode="rb") if packed else self._file
            chunk = self._plain.read(CHUNK)
        except EOFError:
            raise TraceError(
                f"{path} is cut off after {self._file.tell()} compressed bytes: it was not written to its end, or not "
                "copied whole"
            ) from None
        except (zlib.error, gzip.BadGzipFile) as error:
            where = f"near byte {self._file.tell()} of the compressed file"
            raise TraceError(f"{path} is damaged {where} ({error}): record the trace again") from None
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror}") from None
        if not chunk and not self.produced:
            raise TraceError(f"{path} is empty: the trace was not written, or not yet")
        self.produced += len(chunk)
        if self.produced > limits.max_bytes:
            raise TraceError(
                f"{path} is larger than {limits.max_bytes} bytes uncompressed: raise the limit with --max-bytes, or "
                "record fewer steps"
            )
        if self.produced > _RATIO_COUNTS_FROM and self.produced > limits.max_ratio * self._file.tell():
            raise TraceError(
                f"{path} grows more than {limits.max_ratio:g}-fold when it is uncompressed: that is no trace; "
                "uncompress it by hand if you trust it"
            )
        return chunk


class Scanner:
    """Reads one file, once.

    Attributes:
        metadata: the values in `_WANTED`, complete after the last batch.
        repaired: number of events that were no valid JSON (a bare ``nan``, bytes that are not UTF-8) but could be read.
    """

    def __init__(self, source: FileStream, limits: ReadLimits) -> None:
        self.metadata: dict[str, Any] = {}
        self.repaired = 0
        self._source = source
        self._limits = limits
        self._buffer = b""
        self._at = 0
        self._one_by_one_to = 0  # the place in the file up to which no batch is tried again

    def batches(self) -> Iterator[list[Any]]:
        """The events of the trace in batches, in the order of the file. An event may be any JSON value.

        Raises:
            TraceError: the file is no JSON, cut off, damaged or beyond the limits.
            NoTraceError: it is JSON without events.
        """
        if self._peek() == _BYTE_ORDER_MARK[:1] and self._buffer.startswith(_BYTE_ORDER_MARK, self._at):
            self._at += len(_BYTE_ORDER_MARK)
        first = self._peek()
        if first == b"[":  # the other form of the Trace Event Format, which has only the events
            yield from self._array()
        elif first == b"{":
            yield from self._object()
        else:
            raise TraceError(
                f"{self._source.path} is no JSON: it begins with {first!r}; name a trace of torch.profiler"
            )

    def _object(self) -> Iterator[list[Any]]:
        self._at += 1
        found = False
        while (mark := self._peek()) != b"}":
            if mark == b",":
                self._at += 1
                continue
            if mark != b'"':
                raise self._damaged("a name is expected")
            key = self._parse(self._value())
            if self._peek() != b":":
                raise self._damaged("a colon is expected")
            self._at += 1
            mark = self._peek()
            if key == "traceEvents":
                if mark != b"[":
                    raise self._damaged("traceEvents is no list")
                found = True
                yield from self._array()
            else:
                value = self._value()
                if key in _WANTED:
                    self.metadata[key] = self._parse(value)
        if not found:
            raise NoTraceError(f"{self._source.path} is no trace of torch.profiler: it has no traceEvents")

    def _array(self) -> Iterator[list[Any]]:
        self._at += 1
        while (mark := self._peek()) != b"]":
            if mark == b",":
                self._at += 1
                continue
            while len(self._buffer) - self._at < CHUNK and self._more():
                pass
            yield self._batch() or [self._parse(self._value())]
        self._at += 1

    def _batch(self) -> list[Any]:
        """All events up to the last border in the buffer; none if they have to be found one by one."""
        buffer, end = self._buffer, len(self._buffer)
        if self._offset() < self._one_by_one_to:
            return []
        self._one_by_one_to = self._source.produced
        for _ in range(_BORDERS_TRIED):
            end = buffer.rfind(b"}", self._at, end)
            if end < 0:
                return []
            if _BORDER.match(buffer, end):
                break
        else:
            return []
        try:
            batch: list[Any] = msgspec.json.decode(b"[" + memoryview(buffer)[self._at : end + 1] + b"]")
        except _NO_JSON:
            return []
        self._at = end + 1
        self._one_by_one_to = 0
        return batch

    def _value(self) -> bytes:
        """The bytes of the value at the current place. The place moves behind it."""
        while (end := self._end_of_value()) < 0:
            held = len(self._buffer) - self._at
            if held > self._limits.max_event_bytes:
                raise self._damaged(f"one event or value is longer than {self._limits.max_event_bytes} bytes")
            while len(self._buffer) - self._at < 2 * held and self._more():
                pass  # read twice as much each time: a long value would otherwise be scanned again and again
            if len(self._buffer) - self._at == held:
                raise self._cut_off()
        value = self._buffer[self._at : end]
        self._at = end
        return value

    def _end_of_value(self) -> int:
        """The end of the value at the current place in the buffer; -1 if it does not end there."""
        buffer, at = self._buffer, self._at
        first = buffer[at : at + 1]
        if first not in (b"{", b"["):
            match = (_STRING if first == b'"' else _SCALAR).match(buffer, at)
            if match is None:
                if first == b'"':
                    return -1
                raise self._damaged(f"{first!r} is not expected")
            return -1 if first != b'"' and match.end() == len(buffer) else match.end()
        depth = 0
        for match in _STRUCTURE.finditer(buffer, at):
            mark = buffer[match.start()]
            if mark in b"{[":
                depth += 1
                if depth > self._limits.max_depth:
                    raise self._damaged(f"brackets are nested more than {self._limits.max_depth} deep")
            elif mark != 0x22:
                depth -= 1
                if not depth:
                    return match.end()
            elif match.end() - match.start() == 1:  # a string that does not end in the buffer
                return -1
        return -1

    def _parse(self, value: bytes) -> Any:
        with contextlib.suppress(*_NO_JSON):
            return msgspec.json.decode(value)
        try:
            text = _NO_NUMBER.sub(lambda found: found[1] or b"null", value).decode("utf-8", "replace")
            parsed = json.loads(text, strict=False)
        except _NO_JSON:
            raise self._damaged("an event is no JSON", len(value)) from None
        self.repaired += 1
        return parsed

    def _peek(self) -> bytes:
        """The next byte that is not whitespace. The place moves to it."""
        while True:
            match = _BLANK.match(self._buffer, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at : self._at + 1]
            if not self._more():
                raise self._cut_off()

    def _more(self) -> bool:
        chunk = self._source.read()
        self._buffer = self._buffer[self._at :] + chunk
        self._at = 0
        return bool(chunk)

    def _offset(self, back: int = 0) -> int:
        return self._source.produced - len(self._buffer) + self._at - back

    def _damaged(self, what: str, back: int = 0) -> TraceError:
        where = f"at byte {self._offset(back)} of its JSON"
        return TraceError(f"{self._source.path} is no sound trace: {what} {where}; record the trace again")

    def _cut_off(self) -> TraceError:
        return TraceError(
            f"{self._source.path} is cut off after {self._source.produced} bytes of JSON: it was not written to its "
            "end, or not copied whole"
        )
