"""The events of a trace: read from its file, and kept as far as the figures need them.

Times are microseconds, as in the file. The Trace Event Format has no other unit, whatever ``displayTimeUnit`` is.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from functools import cache
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct, field

from telemetry.safety.files import open_regular
from telemetry.trace import names

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES: Final = 2 << 30
"""The largest file that is read, uncompressed. Reading takes up to three times as much memory."""

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
        process: the process that recorded the trace.
        malformed: number of events that were skipped because a field is invalid.
        repaired: whether there was text that is not JSON, such as ``nan``.
    """

    def __init__(self, document: _Document) -> None:
        self.work: list[DeviceEvent] = []
        self.calls: list[HostEvent] = []
        self.operators: list[HostEvent] = []
        self.marks: list[HostEvent] = []
        self.frames: list[HostEvent] = []
        self.last_gpu_step: float | None = None
        self.float_copies: set[int] = set()
        self.call_sites: dict[int, str] = {}
        self.reserved_bytes: dict[int, int] = {}
        self.process = document.process
        self.malformed = 0
        self.repaired = False
        self._devices = document.devices
        for raw in document.events:
            try:
                self._add(_EVENT.decode(raw))
            except msgspec.ValidationError:
                self.malformed += 1
        for events in (self.work, self.calls, self.operators, self.marks, self.frames):
            events.sort(key=_order)
        calls = {call.correlation: call for call in self.calls if call.correlation >= 0}
        for work in self.work:
            work.call = calls.get(work.correlation)
        launched = [(work, work.call.moment) for work in self.work if work.call is not None]
        around = enclosing(self.operators, {moment for _, moment in launched})
        for work, moment in launched:
            if moment in around:
                work.operator = around[moment][0]

    @property
    def is_amd(self) -> bool:
        """Whether the trace is of AMD's runtime. The names of AMD's kernels do not show the use of matrix cores."""
        return any(call.name.startswith("hip") for call in self.calls)

    @property
    def gpu(self) -> Device:
        """The device that most work ran on, as the trace describes it."""
        busy = {NOTHING: 0.0}
        for work in self.work:
            busy[work.device] = busy.get(work.device, 0.0) + work.took
        number = max(busy, key=lambda number: busy[number])
        return next((each for each in self._devices if each.id == number), Device(number))

    def _add(self, event: _Event) -> None:
        """Keep what the figures need of an event."""
        kind, start, took, args = _kind(event.cat), event.ts, event.dur, event.args
        name, thread = sys.intern(event.name), _number(event.tid)
        external = args.old_external if args.external is None else args.external
        if took is None:
            if name == "[memory]" and args.device_type and args.reserved is not None:
                known = self.reserved_bytes.get(args.device_id, 0)
                self.reserved_bytes[args.device_id] = max(args.reserved, known)
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
            stream, device, correlation = _number(args.stream), _number(args.device), args.correlation
            size, blocks, occupancy = args.bytes, args.blocks, args.occupancy
            self.work.append(
                DeviceEvent(start, took, name, kind, stream, device, correlation, external, blocks, occupancy, size)
            )

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


def _order(event: Event) -> tuple[float, float]:
    """Earlier ones first, and outer ones before inner ones."""
    return event.start, -event.took


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


class _Event(Struct, gc=False):
    name: str = ""
    cat: str = ""
    ts: float | None = None
    dur: Annotated[float, Meta(ge=0)] | None = None
    tid: int | str = NOTHING
    args: _Args = _Args()


class Device(Struct, gc=False):
    """A device, as the trace describes it."""

    id: int
    name: str | None = None
    memory_bytes: int | None = field(name="totalGlobalMem", default=None)
    compute_major: int | None = field(name="computeMajor", default=None)


class Process(Struct, gc=False):
    """The process that recorded the trace."""

    rank: int | None = None
    world_size: int | None = None


class _Document(Struct, gc=False):
    events: list[Raw] = field(name="traceEvents")
    devices: list[Device] = field(name="deviceProperties", default_factory=list)
    process: Process = field(name="distributedInfo", default_factory=Process)


_DOCUMENT: Final = msgspec.json.Decoder(_Document)
_EVENTS: Final = msgspec.json.Decoder(list[Raw])
_EVENT: Final = msgspec.json.Decoder(_Event)

_CHUNK: Final = 1 << 20
_LIST: Final = re.compile(rb"\s*\[")
_GZIP: Final = b"\x1f\x8b"
_BARE_WORD: Final = re.compile(
    rb'("[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z))|[-+]?(?:inf(?:inity)?|nan|N/A)(?=[\s,\]}])', re.DOTALL | re.IGNORECASE
)
"""A string, or a word that stands for a number that is none. Torch writes such words, which are not JSON."""

_SPACED: Final = bytes(max(32, code) for code in range(256))
"""Turns control characters, which are not JSON within a string, into spaces."""


def read_events(path: Path, max_bytes: int = MAX_BYTES) -> TraceEvents:
    """Read the events of a trace file, ``.json`` or gzip. ``max_bytes``: limit of its size, uncompressed.

    Raises:
        NoTraceError: it is JSON, but not a trace.
        TraceError: it cannot be read, is too large, damaged or cut off.
    """
    text = _content(path, max_bytes)
    try:
        try:
            return TraceEvents(_decoded(text))
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError):
            events = TraceEvents(_decoded(_repaired(text)))
            events.repaired = True
            return events
    except msgspec.ValidationError as error:
        raise NoTraceError(f"{path} is not a trace of torch.profiler: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(
            f"{path} is damaged, cut off or not JSON ({error}): record the trace again, or copy it whole"
        ) from None


def _content(path: Path, max_bytes: int) -> bytes:
    """The uncompressed bytes of a file. Its first bytes decide whether it is gzip, not its name."""
    content = io.BytesIO()
    try:
        file = open_regular(path)
        if file is None:
            raise TraceError(f"{path} is not a regular file: name a trace, or a folder with traces")
        with file:
            packed = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            plain = gzip.GzipFile(fileobj=file, mode="rb") if packed else file
            while content.write(plain.read(_CHUNK)):
                if content.tell() > max_bytes:
                    raise TraceError(
                        f"{path} is larger than {max_bytes} bytes uncompressed: raise the limit with --max-bytes, or "
                        "record fewer steps"
                    )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is cut off or damaged ({error}): record the trace again, or copy it whole") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    return content.getvalue()


def _decoded(text: bytes) -> _Document:
    """The Trace Event Format may also have only the events."""
    return _Document(_EVENTS.decode(text)) if _LIST.match(text) else _DOCUMENT.decode(text)


def _repaired(text: bytes) -> bytes:
    """JSON without what is not JSON but occurs: words such as nan, control characters, and what is not UTF-8."""
    plain = text.decode("utf-8", "replace").encode().translate(_SPACED)
    return _BARE_WORD.sub(lambda found: found[1] or b"null", plain)
