"""The events of a trace: read from its file piece by piece, and kept as far as the figures need them.

Times are microseconds, as in the file. The Trace Event Format has no other unit, whatever ``displayTimeUnit`` is.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import sys
import zlib
from functools import cache
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct, field

from telemetry.safety.files import open_regular
from telemetry.trace import names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_BYTES: Final = 2 << 30
"""The largest file that is read, uncompressed. Real traces take up to 1.3 times as much memory."""

NOTHING: Final = -1
"""Stands for an id that an event does not have."""


class TraceError(Exception):
    """A file cannot be read as a trace; the text has the reason, and what to do."""


class NoTraceError(TraceError):
    """The file is valid JSON, but not a trace."""


# -- the kept events -----------------------------------------------------------------------------------------------

KERNEL, MEMCPY, MEMSET, OTHER = "kernel", "memcpy", "memset", "other"
ON_STREAM: Final = (KERNEL, MEMCPY, MEMSET)
_RUNTIME, _OPERATOR, _ANNOTATION, _GPU_ANNOTATION, _FRAME = "runtime", "operator", "annotation", "on gpu", "frame"

_KINDS: Final = {
    "kernel": KERNEL, "mtia_ccp_events": KERNEL, "memcpy": MEMCPY, "gpu_memcpy": MEMCPY, "memset": MEMSET,
    "gpu_memset": MEMSET, "runtime": _RUNTIME, "operator": _OPERATOR, "cpu_op": _OPERATOR, "python": _OPERATOR,
    "user_annotation": _ANNOTATION, "gpu_user_annotation": _GPU_ANNOTATION, "python_function": _FRAME,
}  # fmt: skip


@cache
def _kind(category: str) -> str:
    """What events of a category are."""
    lower = category.lower()
    runtime = lower.endswith(("_runtime", "_driver"))  # cuda_runtime, cuda_driver, xpu_runtime, mtia_runtime ...
    return _KINDS.get(lower, _RUNTIME if runtime else OTHER)


Moment: TypeAlias = tuple[int, float]
"""A thread and a time on it."""


class Event(Struct, gc=False):
    """What lasts from ``start`` on for ``took``, both in microseconds."""

    start: float
    took: float
    name: str

    @property
    def end(self) -> float:
        """Microseconds."""
        return self.start + self.took

    @property
    def span(self) -> tuple[float, float]:
        """Start and end in microseconds."""
        return self.start, self.start + self.took


class HostEvent(Event, gc=False):
    """A runtime call, operator, mark or frame of the user's Python code on the host. Ids: see `DeviceEvent`."""

    thread: int
    external: int = NOTHING
    correlation: int = NOTHING

    @property
    def moment(self) -> Moment:
        """Its thread, and its start there."""
        return self.thread, self.start


class DeviceEvent(Event, gc=False):
    """An event on a device. None if the trace does not contain a figure.

    Attributes:
        kind: KERNEL, MEMCPY, MEMSET or OTHER.
        correlation, external: ids of the runtime call and of the operator that launched it.
        blocks, occupancy: blocks per SM, and achieved occupancy in percent.
        call, operator: the runtime call that launched it, and the name of the innermost operator around that.
    """

    kind: str
    stream: int
    device: int
    correlation: int
    external: int
    blocks: float | None
    occupancy: float | None
    bytes: float | None
    call: HostEvent | None = None
    operator: str | None = None


class TraceEvents:
    """The kept events of one trace. Each list is in the order of their start, outer events before inner ones.

    Attributes:
        work: events on devices.
        calls: runtime calls on the host.
        operators: operators; in old traces annotations too, but not those of steps.
        marks: steps, waits for a batch, collectives and clearing of gradients, as operators or annotations.
        frames: Python functions of the user's own code.
        last_gpu_step: start of the last step's annotation on the device, microseconds; None without one.
        float_copies: external ids of copying operators whose input is of floats.
        call_sites: the user's line that called a copying or waiting operator, by external id.
        reserved_bytes: the most memory that the allocator had reserved, by device.
        document: what is beside the events: the devices and the rank.
        malformed: number of events that were skipped because a field is invalid.
        repaired: whether there were bare words, such as ``nan``, which are not JSON.
    """

    def __init__(self) -> None:
        self.work: list[DeviceEvent] = []
        self.calls: list[HostEvent] = []
        self.operators: list[HostEvent] = []
        self.marks: list[HostEvent] = []
        self.frames: list[HostEvent] = []
        self.last_gpu_step: float | None = None
        self.float_copies: set[int] = set()
        self.call_sites: dict[int, str] = {}
        self.reserved_bytes: dict[int, int] = {}
        self.document = Document(Raw())
        self.malformed = 0
        self.repaired = False
        self._figures: dict[float | None, float | None] = {}

    @property
    def is_amd(self) -> bool:
        """Whether the trace is of AMD's runtime. The names of AMD's kernels do not show the use of matrix cores."""
        return any(call.name.startswith("hip") for call in self.calls)

    @property
    def gpu(self) -> DeviceProperties:
        """The device that most work ran on, as the trace describes it."""
        busy = {NOTHING: 0.0}
        for work in self.work:
            busy[work.device] = busy.get(work.device, 0.0) + work.took
        number = max(busy, key=lambda number: busy[number])
        return next((each for each in self.document.devices if each.id == number), DeviceProperties(number))

    def add(self, event: _Event) -> None:
        """Keep what the figures need of an event."""
        once = self._figures.setdefault  # equal figures, of which there are many, are one object
        kind, start, took, args = _kind(event.cat), event.ts, once(event.dur, event.dur), event.args
        name, thread, external = sys.intern(event.name), _number(event.tid), args.external_id
        if took is None:
            self._add_memory(name, args)
        elif start is None:
            self.malformed += 1
        elif kind in (_OPERATOR, _ANNOTATION):
            self._add_host(HostEvent(start, took, name, thread, external), kind, args)
        elif kind == _RUNTIME:
            self.calls.append(HostEvent(start, took, name, thread, external, args.correlation))
        elif kind == _FRAME and names.is_user_frame(name):
            self.frames.append(HostEvent(start, took, name, thread))
        elif kind == _GPU_ANNOTATION and name.startswith("ProfilerStep"):
            self.last_gpu_step = start if self.last_gpu_step is None else max(start, self.last_gpu_step)
        elif kind in ON_STREAM or (kind == OTHER and args.stream is not None):
            work = DeviceEvent(
                start,
                took,
                name,
                kind,
                stream=_number(args.stream),
                device=_number(args.device),
                correlation=args.correlation,
                external=external,
                blocks=once(args.blocks, args.blocks),
                occupancy=once(args.occupancy, args.occupancy),
                bytes=args.bytes,
            )
            self.work.append(work)

    def finish(self) -> None:
        """Bring the events into their order, and find what launched those on devices, after the last was added."""
        lists: list[list[HostEvent] | list[DeviceEvent]]
        lists = [self.work, self.calls, self.operators, self.marks, self.frames]
        for events in lists:
            events.sort(key=attrgetter("took"), reverse=True)
            events.sort(key=attrgetter("start"))  # a stable sort: outer events stay before inner ones
        calls = {call.correlation: call for call in self.calls if call.correlation >= 0}
        wanted = {work.external for work in self.work if work.external != NOTHING}
        operators = {each.external: each.name for each in self.operators if each.external in wanted}
        for work in self.work:
            work.call, work.operator = calls.get(work.correlation), operators.get(work.external)
        lost = [(work, work.call.moment) for work in self.work if work.operator is None and work.call is not None]
        around = enclosing(self.operators, {moment for _, moment in lost})
        for work, moment in lost:
            if moment in around:
                work.operator = around[moment][0]

    def _add_host(self, event: HostEvent, kind: str, args: _Args) -> None:
        name, is_step = event.name, names.step_number(event.name) is not None
        if is_step or names.is_loader(name) or names.is_collective(name) or names.clears_gradients(name):
            self.marks.append(event)
        if kind == _OPERATOR and not is_step and not name.startswith("[pl]"):  # those are annotations of Lightning
            self.operators.append(event)
            if names.may_copy(name):
                if bytes(args.input_types).startswith((b'["float"', b'["double"')):
                    self.float_copies.add(event.external)
                if args.call_stack:
                    frames = args.call_stack.split(";", 64)
                    self.call_sites[event.external] = next(filter(names.is_user_frame, frames), frames[-1])[:300]

    def _add_memory(self, name: str, args: _Args) -> None:
        if name == "[memory]" and args.device_type and args.reserved is not None:
            known = self.reserved_bytes.get(args.device_id, 0)
            self.reserved_bytes[args.device_id] = max(args.reserved, known)


@cache
def _number(value: int | str | None) -> int:
    """A whole number, which may be text; -1 for anything else, such as the address of a stream.

    Old traces write a thread as 17 and as "17".
    """
    try:
        return NOTHING if value is None else int(value)
    except ValueError:
        return NOTHING


def enclosing(events: list[HostEvent], moments: set[Moment]) -> dict[Moment, tuple[str, str]]:
    """The names of the innermost and the outermost event around each moment on its thread."""
    found: dict[Moment, tuple[str, str]] = {}
    open_on: dict[int, list[HostEvent]] = {thread: [] for thread, _ in moments}
    left = iter(events)
    event = next(left, None)
    for thread, time in sorted(moments, key=lambda moment: moment[1]):
        while event is not None and event.start <= time:
            if event.thread in open_on:
                around = open_on[event.thread]
                while around and around[-1].end < event.start:
                    around.pop()
                around.append(event)
            event = next(left, None)
        around = open_on[thread]
        while around and around[-1].end < time:
            around.pop()
        if around:
            found[thread, time] = around[-1].name, around[0].name
    return found


# -- the file ------------------------------------------------------------------------------------------------------


class _Args(Struct, gc=False, frozen=True):
    """What the profiler notes about an event. Older traces spell some of it differently."""

    correlation: int = NOTHING
    external: int | None = field(name="External id", default=None)
    old_external: int = field(name="external id", default=NOTHING)
    stream: int | str | None = None
    device: int | str | None = None
    bytes: float | None = None
    blocks: float | None = field(name="blocks per SM", default=None)
    occupancy: float | None = field(name="est. achieved occupancy %", default=None)
    input_types: Raw = field(name="Input type", default=Raw())
    call_stack: str | None = field(name="Call stack", default=None)
    reserved: int | None = field(name="Total Reserved", default=None)
    device_type: int = field(name="Device Type", default=0)
    device_id: int = field(name="Device Id", default=NOTHING)

    @property
    def external_id(self) -> int:
        return self.old_external if self.external is None else self.external


class _Event(Struct, gc=False):
    name: str = ""
    cat: str = ""
    ts: float | None = None
    dur: Annotated[float, Meta(ge=0)] | None = None
    tid: int | str = NOTHING
    args: _Args = _Args()


class DeviceProperties(Struct, gc=False):
    """A device, as the trace describes it."""

    id: int
    name: str | None = None
    memory_bytes: int | None = field(name="totalGlobalMem", default=None)
    compute_major: int | None = field(name="computeMajor", default=None)


class Distributed(Struct, gc=False):
    """The process that recorded the trace."""

    rank: int | None = None
    world_size: int | None = None


class Document(Struct, gc=False):
    """A trace file, with its events as they are in it."""

    events: Raw = field(name="traceEvents")
    devices: list[DeviceProperties] = field(name="deviceProperties", default_factory=list)
    distributed: Distributed = field(name="distributedInfo", default_factory=Distributed)


_DOCUMENT: Final = msgspec.json.Decoder(Document)
_EVENTS: Final = msgspec.json.Decoder(list[_Event])
_EVENT: Final = msgspec.json.Decoder(_Event)
_RAW_EVENTS: Final = msgspec.json.Decoder(list[Raw])
_NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_CHUNK: Final = 1 << 16
"""Bytes read at a time. Batches of this size are parsed faster than a whole file: they stay in the cache."""

_MAX_EVENT_BYTES: Final = 1 << 24
"""If so much of a file has no event that can be read, it is damaged."""

_GZIP: Final = b"\x1f\x8b"
_HEAD: Final = re.compile(rb'\A\s*\[|"traceEvents"\s*:\s*\[')  # the Trace Event Format may also have only the events
_BORDER: Final = re.compile(rb"\}(\s*,\s*)\{")
_BORDERS_TRIED: Final = 4
_BARE_WORD: Final = re.compile(
    rb'("[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z))|[-+]?(?:inf(?:inity)?|nan|N/A)(?=[\s,\]}])', re.DOTALL | re.IGNORECASE
)
"""A string, or a word that stands for a number that is none. Torch writes such words, which are not JSON."""

_SPACED: Final = bytes(max(32, code) for code in range(256))
"""Turns control characters, which are not JSON within a string, into spaces."""


def read_events(path: Path, max_bytes: int = MAX_BYTES) -> TraceEvents:
    """Read the events of a trace file, ``.json`` or gzip. ``max_bytes``: limit of its size, uncompressed.

    The events are one JSON array. A batch is cut where the text looks like the border between two events. If it can be
    parsed, that was a border, because the batch begins at one and consists of complete values.

    Raises:
        NoTraceError: it is JSON, but not a trace.
        TraceError: it cannot be read, is too large, damaged or cut off.
    """
    events = TraceEvents()
    head, held = b"", bytearray()  # what is before the events, and what was read and not yet parsed
    parsed = wanted = 0
    try:
        for chunk in _chunks(path, max_bytes):
            held += chunk
            if len(held) < wanted:
                continue
            if not head and (found := _HEAD.search(held)):
                parsed = found.end()
                head = bytes(held[:parsed])
                del held[:parsed]
            done = _parse_batch(held, events) if head else 0
            if not done and len(held) > _MAX_EVENT_BYTES:
                raise _broken(path, parsed)
            wanted = 0 if done else 2 * len(held)  # a long value would otherwise be parsed again and again
            parsed += done
            del held[:done]
        try:
            _parse_rest(head + held, events)
        except _NOT_JSON:
            _parse_rest(_repaired(head + held), events)
            events.repaired = True
    except msgspec.ValidationError as error:
        raise NoTraceError(f"{path} is not a trace of torch.profiler: {error}") from None
    except _NOT_JSON:
        raise _broken(path, parsed) from None
    events.finish()
    return events


def _broken(path: Path, parsed: int) -> TraceError:
    return TraceError(
        f"{path} is damaged, cut off or not JSON after byte {parsed}: record the trace again, or copy it whole"
    )


def _chunks(path: Path, max_bytes: int) -> Iterator[bytes]:
    """The uncompressed bytes of a file. Its first bytes decide whether it is gzip, not its name."""
    try:
        file = open_regular(path)
        if file is None:
            raise TraceError(f"{path} is not a regular file: name a trace, or a folder with traces")
        with file:
            packed = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            plain = gzip.GzipFile(fileobj=file, mode="rb") if packed else file
            left = max_bytes
            while chunk := plain.read(_CHUNK):
                left -= len(chunk)
                if left < 0:
                    raise TraceError(
                        f"{path} is larger than {max_bytes} bytes uncompressed: raise the limit with --max-bytes, or "
                        "record fewer steps"
                    )
                yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is cut off or damaged ({error}): record the trace again, or copy it whole") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None


def _parse_batch(text: bytearray, events: TraceEvents) -> int:
    """Parse all events up to the last border. Returns where the next event begins; 0 if there is no border."""
    borders = list(islice(_borders(text), _BORDERS_TRIED))
    for end, following in borders:
        with contextlib.suppress(*_NOT_JSON):  # if it was within a string, or another array
            _parse(b"[" + text[:end] + b"]", events)
            return following
    if borders:
        end, following = borders[0]
        with contextlib.suppress(*_NOT_JSON):
            _parse(_repaired(b"[" + text[:end] + b"]"), events)
            events.repaired = True
            return following
    return 0


def _borders(text: bytearray) -> Iterator[tuple[int, int]]:
    """The end of an event and the beginning of the next, wherever it looks like that, the last first."""
    at = len(text)
    while (at := text.rfind(b"}", 0, at)) >= 0:
        if border := _BORDER.match(text, at):
            yield border.span(1)


def _parse_rest(text: bytes, events: TraceEvents) -> None:
    """Parse the last events, and what is before and behind them all."""
    events.document = Document(Raw(text)) if text.lstrip().startswith(b"[") else _DOCUMENT.decode(text)
    _parse(bytes(events.document.events), events)


def _parse(text: bytes, events: TraceEvents) -> None:
    """Keep the events of a JSON array. If a field is invalid, its event is counted and skipped."""
    try:
        batch = _EVENTS.decode(text)
    except msgspec.ValidationError:
        batch = []
        for each in _RAW_EVENTS.decode(text):
            try:
                batch.append(_EVENT.decode(each))
            except _NOT_JSON:
                events.malformed += 1
    for event in batch:
        events.add(event)


def _repaired(text: bytes) -> bytes:
    """JSON without what is not JSON but occurs: words such as nan, control characters, and what is not UTF-8."""
    plain = text.decode("utf-8", "replace").encode().translate(_SPACED)
    return _BARE_WORD.sub(lambda found: found[1] or b"null", plain)
