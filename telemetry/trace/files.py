"""Reads a trace file as a stream of events: within limits, whatever is in the file.

The events are one JSON array. A batch is cut where the text looks like the border between two events, and then parsed.
If that succeeds, it was a border, because the parsed text begins at one and consists of complete values. If it fails,
the events of that stretch are read one by one.
"""

from __future__ import annotations

import codecs
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
_BORDER: Final = re.compile(r"\}\s*,\s*\{")
_BORDERS_TRIED: Final = 64
_BLANK: Final = re.compile(r"\s*")
_BARE_WORD: Final = re.compile(
    r'("[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z))|[-+]?(?:inf(?:inity)?|nan|N/A)(?=[\s,\]}])', re.DOTALL | re.IGNORECASE
)
"""A string, or a word that stands for a number that is none. Torch writes such words, which are no JSON."""

_BEHIND_A_VALUE: Final = frozenset(" \t\r\n,:]}")
_DECODER: Final = json.JSONDecoder(strict=False, parse_constant=lambda _: None)


class TraceError(Exception):
    """A file cannot be read as a trace; the text has the reason, the place, and what to do."""


class NoTraceError(TraceError):
    """The file is valid JSON, but not a trace."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits for one file. They bound the memory that it can take.

    Attributes:
        max_bytes: size of the file, uncompressed.
        max_ratio: uncompressed bytes per compressed byte. Real traces reach 30, a gzip bomb 1,000.
        max_event_bytes: size of one event, and of one value beside the events.
        max_events: number of kept events. A trace of 540,000 events took 130 MiB to analyse.
    """

    max_bytes: int = 4096 * _MIB
    max_ratio: float = 250.0
    max_event_bytes: int = 16 * _MIB
    max_events: int = 5_000_000


class FileStream:
    """The uncompressed bytes of a file. Its first bytes decide whether it is gzip, not its name.

    ``follow``: whether it may be a symbolic link. ``produced``: uncompressed bytes that were read so far.

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
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise broken(path, f"near byte {self._file.tell()} of the compressed file ({error})") from None
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
        repaired: whether there were bare words, such as ``nan``, which are no JSON. They are read as null.
    """

    def __init__(self, stream: FileStream, limits: ReadLimits) -> None:
        self.metadata: dict[str, Any] = {}
        self.repaired = False
        self._stream = stream
        self._limits = limits
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._text = ""
        self._at = 0
        self._one_by_one_to = 0  # the place in the file up to which no batch is tried again

    def batches(self) -> Iterator[list[Any]]:
        """The events of the trace in batches, in the order of the file. An event may be any JSON value.

        Raises:
            TraceError: the file is no JSON, cut off, damaged or beyond the limits.
            NoTraceError: it is JSON without events.
        """
        first, found = self._peek(), False
        if first == "[":  # the other form of the Trace Event Format, which has only the events
            yield from self._array()
            return
        if first != "{":
            raise TraceError(
                f"{self._stream.path} is no JSON: it begins with {first!r}; name a trace of torch.profiler"
            )
        self._at += 1
        while (mark := self._peek()) != "}":
            if mark == ",":
                self._at += 1
                continue
            key = self._value()
            if not isinstance(key, str) or self._peek() != ":":
                raise self._broken()
            self._at += 1
            if self._peek() == "[" and key == "traceEvents":
                found = True
                yield from self._array()
            else:
                value = self._value()
                if key in _WANTED:
                    self.metadata[key] = value
        if not found:
            raise NoTraceError(f"{self._stream.path} is no trace of torch.profiler: it has no traceEvents")

    def _array(self) -> Iterator[list[Any]]:
        self._at += 1
        while (mark := self._peek()) != "]":
            if mark == ",":
                self._at += 1
                continue
            while len(self._text) - self._at < CHUNK and self._more():
                pass
            yield self._batch() or [self._value()]
        self._at += 1

    def _batch(self) -> list[Any]:
        """All events up to the last border in the buffer; none if they have to be read one by one."""
        text, end = self._text, len(self._text)
        if self._offset() < self._one_by_one_to:
            return []
        self._one_by_one_to = self._stream.produced
        for _ in range(_BORDERS_TRIED):
            end = text.rfind("}", self._at, end)
            if end < 0:
                return []
            if _BORDER.match(text, end):
                break
        else:
            return []
        try:
            batch: list[Any] = msgspec.json.decode(f"[{text[self._at : end + 1]}]")
        except (msgspec.DecodeError, ValueError, RecursionError):
            return []
        self._at = end + 1
        self._one_by_one_to = 0
        return batch

    def _value(self) -> Any:
        """The value at the current place. The place moves behind it. More is read until the value is complete."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except RecursionError:
                raise self._broken() from None
            except ValueError:
                end = len(self._text)
            if self._text[end : end + 1] in _BEHIND_A_VALUE:  # else a number may go on
                self._at = end
                return value
            held = self._text[self._at :]
            repaired = _BARE_WORD.sub(lambda found: found[1] or "null", held)
            if repaired != held:
                self._text, self._at, self.repaired = repaired, 0, True
                continue
            if len(held) > self._limits.max_event_bytes or not self._more():
                raise self._broken()
            while len(self._text) < 2 * len(held) and self._more():
                pass  # twice as much each time: a long value would otherwise be read again and again

    def _peek(self) -> str:
        """The next character that is not whitespace. The place moves to it."""
        while True:
            match = _BLANK.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                raise self._broken()

    def _more(self) -> bool:
        chunk = self._stream.read()
        self._text = self._text[self._at :] + self._decoder.decode(chunk, final=not chunk)
        self._at = 0
        return bool(chunk)

    def _offset(self) -> int:
        """The current place in the uncompressed file. It is exact if all before it is ASCII."""
        return self._stream.produced - len(self._text) + self._at

    def _broken(self) -> TraceError:
        return broken(self._stream.path, f"near byte {self._offset()} of its JSON")


def broken(path: Path, where: str) -> TraceError:
    """The error of a file that is no complete trace."""
    return TraceError(f"{path} is cut off or damaged {where}: record the trace again, or copy it whole")
