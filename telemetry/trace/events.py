"""The events of a trace that the figures need, as packed rows. These take a tenth of the memory of dicts.

Times are microseconds, as in the file. The Trace Event Format has no other unit, whatever ``displayTimeUnit`` says.
"""

from __future__ import annotations

import re
import struct
from array import array
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.trace.files import ReadLimits, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

NOTHING: Final = -1
"""Stands for an id or a figure that an event does not have."""

OTHER, KERNEL, MEMCPY, MEMSET, SYNC, RUNTIME, OPERATOR, ANNOTATION, GPU_ANNOTATION, FRAME, MEMORY = range(11)

_KINDS: Final = {
    "kernel": KERNEL,
    "mtia_ccp_events": KERNEL,
    "memcpy": MEMCPY,
    "gpu_memcpy": MEMCPY,
    "memset": MEMSET,
    "gpu_memset": MEMSET,
    "cuda_sync": SYNC,
    "runtime": RUNTIME,
    "operator": OPERATOR,
    "cpu_op": OPERATOR,
    "python": OPERATOR,
    "user_annotation": ANNOTATION,
    "gpu_user_annotation": GPU_ANNOTATION,
    "python_function": FRAME,
    "cpu_instant_event": MEMORY,
}
_RUNTIME: Final = re.compile(r".+_(runtime|driver)")  # cuda_runtime, cuda_driver, xpu_runtime, mtia_runtime ...
_MAX_CATEGORIES: Final = 4096
_MAX_KEPT: Final = 100_000
_MAX_SIGNATURES: Final = 20_000
_MAX_SIGNATURE: Final = 4000
_LATEST_US: Final = 1e17
"""Valid timestamps are below this (the year 5138)."""

_NO_ARGS: Final[dict[str, Any]] = {}

_WORK: Final = Struct("<ddqqddqqqq")
_CALL: Final = Struct("<ddqqqq")
_SPAN: Final = Struct("<ddqqq")

STEP, LOADER, COMMUNICATION, LIGHTNING, ZERO_GRAD, COPY, SYNCHRONIZING, ELIGIBLE, MATRIX = (
    1 << bit for bit in range(9)
)
"""Traits of a host event: a step's annotation; the wait for a batch; a collective; an annotation of Lightning; clearing
the gradients; an operator that copies; one that waits for the device; one whose work tensor cores can do; one that
multiplies matrices, convolves or attends, or may do so."""

_MARKS: Final = STEP | LOADER | COMMUNICATION | ZERO_GRAD
_STEP_MARK: Final = re.compile(r"ProfilerStep#(\d{1,18})")
_LOADER: Final = re.compile(r"enumerate\(DataLoader\)#.*\.__next__|enumerate\(DataPipe\)#.*", re.DOTALL)
_COLLECTIVE: Final = re.compile(r"(nccl|gloo|mpi|ucc|rccl|hccl|xccl):")
_COPIES: Final = frozenset({"aten::copy_", "aten::to", "aten::_to_copy"})
_WAITS: Final = _COPIES | {
    "aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal",
    "aten::masked_select", "aten::unique2", "aten::_unique2",
}  # fmt: skip
_ELIGIBLE: Final = re.compile(
    r"aten::_?(cudnn_|miopen_|thnn_)?conv(olution|_tbc|_transpose|\d)|aten::(addmm|addmv|addr|addbmm|baddbmm|bmm|mm|mv|"
    r"matmul|linear|prelu|chain_matmul|linalg_multi_dot|gru_cell|lstm_cell|rnn_(tanh|relu)_cell|_thnn_fused_\w+|"
    r"_scaled_dot_product|_flash_attention|_efficient_attention|_addmm_activation|_scaled_mm|_cudnn_rnn)"
    r"|(Cudnn)?Convolution(Transpose)?Backward|(Bmm|Mm|Mv|Addmm|Addmv|Addbmm)Backward"
)
_MATRIX: Final = re.compile(
    r"conv(?!ert)|matmul|einsum|attention|attn|(?<!fb)gemm|rnn|lstm|(?<![a-z])(gru|linear|mv|addmv|dot|(b?add)?b?mm)(?![a-z])",
    re.IGNORECASE,
)
_NO_MATRIX: Final = re.compile(r"^autograd::|reorder|Backward\d*$")
_TENSOR_CORE: Final = re.compile(
    # The names that NVIDIA's PyProf and torch-tb-profiler go by, and those of Hopper and newer.
    r"h884|s884|h1688|s1688|c1688|hmma|i8816|16816|16832|dgrad_1x1_stride_2x2|first_layer_wgrad_kernel|conv1x1|"
    r"conv2d_c1_k1|direct_group|xmma_(implicit_gemm|sparse_conv|warp_specialized_implicit_gemm|gemm|sparse_gemm)|"
    r"tensorop|tensor\d+x\d+|wgmma|gmma|nvjet|flash_(fwd|bwd)|flash::|fmha"
)
_LAYOUT: Final = re.compile(
    r"nchwto|nhwcto|nchw_?2_?nhwc|nhwc_?2_?nchw|convert_?tensor|batched_transpose", re.IGNORECASE
)
_COMMUNICATION_KERNEL: Final = re.compile(r"nccl.*Kernel")
_NO_COMPUTE: Final = re.compile(r"(nccl.*Kernel)|(.*(Memcpy)|(Memset))|(.*Sync)")
_MEMORY_KERNEL: Final = re.compile(r"Memcpy|Memset|dma")
_BLOCKING: Final = re.compile(r"(cuda|hip|cu|xpu)\w*Synchronize|cudaMemcpy|hipMemcpy(WithStream)?")
_COPY: Final = re.compile(r"Memcpy (\w+)(?: \((\w+) -> (\w+)\))?")
_USER_FRAME: Final = re.compile(r".+\.py\(\d+\): .+")
_LIBRARY_FRAME: Final = re.compile(
    r"(^|/)(torch|site-packages|dist-packages|python\d[\d.]*)/|^(threading|contextlib)\.py\("
)


def step_number(name: str) -> int | None:
    """The number in the annotation of a step; None for any other name."""
    match = _STEP_MARK.fullmatch(name)
    return int(match[1]) if match else None


def is_communication(name: str) -> bool:
    """Whether a kernel is a collective's."""
    return _COMMUNICATION_KERNEL.match(name) is not None


def is_compute(name: str) -> bool:
    """Whether a device event is computation, by its name, as Holistic Trace Analysis defines it."""
    return not (is_communication(name) or _MEMORY_KERNEL.match(name) or _NO_COMPUTE.match(name))


def uses_tensor_cores(name: str) -> bool:
    """Whether a kernel runs on tensor cores, by its name."""
    return _TENSOR_CORE.search(name) is not None


def converts_layout(name: str) -> bool:
    """Whether a kernel only changes the memory layout of a tensor."""
    return _LAYOUT.search(name) is not None


def is_blocking(name: str) -> bool:
    """Whether a runtime call waits until the device has finished its work."""
    return _BLOCKING.fullmatch(name) is not None


def copy_kind(name: str) -> tuple[str, bool | None]:
    """The direction of a copy, and whether its host memory is pageable; None if the name does not tell."""
    match = _COPY.match(name)
    if match is None:
        return ("other", None)
    ends = {match[2], match[3]}
    return match[1], True if "Pageable" in ends else False if "Pinned" in ends else None


def user_frame(frame: str) -> bool:
    """Whether a frame, ``file.py(12): function``, is in the user's own code and not in a library."""
    return _USER_FRAME.fullmatch(frame) is not None and _LIBRARY_FRAME.search(frame) is None


def _traits(name: str) -> int:
    found = {
        STEP: _STEP_MARK.fullmatch(name),
        LOADER: _LOADER.fullmatch(name),
        COMMUNICATION: _COLLECTIVE.match(name),
        LIGHTNING: name.startswith("[pl]"),
        ZERO_GRAD: name.startswith("Optimizer.zero_grad"),
        COPY: name in _COPIES,
        SYNCHRONIZING: name in _WAITS,
        ELIGIBLE: _ELIGIBLE.match(name),
        MATRIX: _MATRIX.search(name) and not _NO_MATRIX.search(name),
    }
    return sum(trait for trait, true in found.items() if true)


class EventNames:
    """Gives each name a number, so that each is kept once, with the traits that follow from it.

    Attributes:
        ids: number by name. Look a name up there, and `add` it if it is missing.
        traits: traits by number.
    """

    def __init__(self, max_bytes: int) -> None:
        self.ids: dict[str, int] = {}
        self.traits: list[int] = []
        self._texts: list[str] = []
        self._bytes = 0
        self._max_bytes = max_bytes

    def __getitem__(self, number: int) -> str:
        return self._texts[number]

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[str]:
        """The names in the order of their numbers."""
        return iter(self._texts)

    def get(self, number: int) -> str | None:
        """The name of a number; None for -1."""
        return self._texts[number] if number >= 0 else None

    def add(self, name: str) -> int:
        """Number a new name.

        Raises:
            TypeError: it is not a text.
            TraceError: all names together are longer than the limit.
        """
        if not isinstance(name, str):
            raise TypeError
        self._bytes += len(name) + 100  # about what the objects for one name take
        if self._bytes > self._max_bytes:
            raise TraceError(
                f"its names are longer than {self._max_bytes} bytes together: that is no trace of a training"
            )
        number = self.ids[name] = len(self._texts)
        self._texts.append(name if name.isascii() else name.encode("utf-8", "replace").decode())
        self.traits.append(_traits(name))
        return number


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """What ran on devices: one column per field, in the order of the file. -1 if the trace does not tell.

    Attributes:
        start, duration: microseconds.
        correlation: id of the runtime call that launched it.
        external: id of the operator that launched it.
        first, second: blocks per SM and achieved occupancy (percent) of a kernel; bytes of a copy, and nothing.
        name: number in `EventNames`.
        stream, device: numbers of the stream and the device.
        kind: KERNEL, MEMCPY, MEMSET, SYNC or OTHER.
    """

    start: array[float]
    duration: array[float]
    correlation: array[int]
    external: array[int]
    first: array[float]
    second: array[float]
    name: array[int]
    stream: array[int]
    device: array[int]
    kind: array[int]


@dataclass(frozen=True, slots=True)
class RuntimeCalls:
    """Calls of the CUDA (or other) runtime or driver on the host; columns as those of `DeviceWork`."""

    start: array[float]
    duration: array[float]
    correlation: array[int]
    external: array[int]
    name: array[int]
    thread: array[int]


@dataclass(frozen=True, slots=True)
class Spans:
    """Operators, marks or frames of the user's Python code on the host; columns as those of `DeviceWork`."""

    start: array[float]
    duration: array[float]
    external: array[int]
    name: array[int]
    thread: array[int]


class Signature(NamedTuple):
    """What calls of a matrix operator have in common: its name, and the shapes, first type and values of its inputs.

    The values come from the file as they are, and may be anything.
    """

    name: str
    shapes: Any
    kind: str
    values: Any


class TraceEvents:
    """The kept events of one trace.

    Attributes:
        names: the names of all events.
        fractional: whether device times have fractions of a microsecond.
        last_gpu_step: start of the last step's annotation on the device, microseconds; None without one.
        input_types: input types of copying operators, by external id.
        call_sites: the user's line that called a synchronising operator, by external id.
        reserved_bytes: the most memory that the allocator had reserved, by device.
        work: what ran on devices.
        calls: runtime calls on the host.
        operators: operators; in old traces annotations too, but not those of steps.
        marks: steps, waits for a batch, collectives and clearing of gradients, as operators or annotations.
        frames: Python functions of the user's own code.
        products: matrix operators. Here ``external`` is the number in ``signatures``, or -1 if there were too many.
        signatures: the distinct signatures of ``products``.
        malformed: how many events were skipped because a field is invalid.
    """

    work: DeviceWork
    calls: RuntimeCalls
    operators: Spans
    marks: Spans
    frames: Spans
    products: Spans

    def __init__(self, limits: ReadLimits) -> None:
        self.names = EventNames(limits.max_name_bytes)
        self.fractional = False
        self.last_gpu_step: float | None = None
        self.input_types: dict[int, str] = {}
        self.call_sites: dict[int, str] = {}
        self.reserved_bytes: dict[int, int] = {}
        self.signatures: list[Signature] = []
        self.malformed = 0
        self._limits = limits
        self._kinds: dict[Any, int] = {None: MEMORY}
        self._threads: dict[Any, int] = {}
        self._signature_numbers: dict[str, int] = {}
        self._work_rows = bytearray()
        self._call_rows = bytearray()
        self._operator_rows = bytearray()
        self._mark_rows = bytearray()
        self._frame_rows = bytearray()
        self._product_rows = bytearray()
        self._keepers: dict[int, Callable[[dict[str, Any], float, float, int], None]] = {
            OPERATOR: self._host,
            ANNOTATION: self._host,
            RUNTIME: self._call,
            FRAME: self._frame,
            GPU_ANNOTATION: self._step_on_device,
            MEMORY: self._nothing,
        } | dict.fromkeys((KERNEL, MEMCPY, MEMSET, SYNC, OTHER), self._work)

    def add(self, batch: Iterable[Any]) -> None:
        """Keep what is needed of some events. Invalid events are counted and skipped.

        Raises:
            TraceError: there are more events, or longer names, than the limits allow.
        """
        left = iter(batch)
        while True:
            try:
                self._add(left)
            except (KeyError, TypeError, ValueError, AttributeError, struct.error, OverflowError, RecursionError):
                self.malformed += 1  # no part of its row was packed; go on with the next event
            else:
                break
        if len(self) > self._limits.max_events:
            raise TraceError(f"it holds more than {self._limits.max_events} events: record fewer steps")

    def close(self) -> None:
        """After the last event: turn the rows into columns, so that each pass reads only the columns that it needs."""
        self.work = DeviceWork(*_columns(_WORK, self._work_rows, "ddqqddiqqb"))
        self.calls = RuntimeCalls(*_columns(_CALL, self._call_rows, "ddqqii"))
        self.operators = Spans(*_columns(_SPAN, self._operator_rows, "ddqii"))
        self.marks = Spans(*_columns(_SPAN, self._mark_rows, "ddqii"))
        self.frames = Spans(*_columns(_SPAN, self._frame_rows, "ddqii"))
        self.products = Spans(*_columns(_SPAN, self._product_rows, "ddqii"))

    def __len__(self) -> int:
        host = len(self._operator_rows) + len(self._mark_rows) + len(self._frame_rows)
        return len(self._work_rows) // _WORK.size + len(self._call_rows) // _CALL.size + host // _SPAN.size

    def _add(self, events: Iterator[Any]) -> None:
        kinds, keep = self._kinds, self._keepers
        for event in events:
            category = event.get("cat")
            kind = kinds.get(category)
            if kind is None:
                kind = self._kind(category)
            duration = event.get("dur")
            if duration is None:
                if kind == MEMORY and event.get("name") == "[memory]":
                    self._memory(event["args"])
                continue
            start = event["ts"]
            if not (-_LATEST_US < start < _LATEST_US and 0 <= duration < _LATEST_US):
                raise ValueError
            keep[kind](event, start, duration, kind)

    def _host(self, event: dict[str, Any], start: float, duration: float, kind: int) -> None:
        name, tid = event["name"], event.get("tid")
        number = self.names.ids.get(name)  # not through `_name`, which would cost a call for each operator
        if number is None:
            number = self.names.add(name)
        trait = self.names.traits[number]
        if not trait and kind == ANNOTATION:
            return
        args = event.get("args") or _NO_ARGS
        external = args.get("External id")
        if external is None:
            external = args.get("external id", NOTHING)
        thread = self._threads.get(tid)
        if thread is None:
            thread = self._thread(tid)
        row = _SPAN.pack(start, duration, external, number, thread)
        if trait & _MARKS:
            self._mark_rows += row
        if kind == OPERATOR and not trait & (STEP | LIGHTNING):
            self._operator_rows += row
            if trait & (COPY | SYNCHRONIZING):
                self._keep_details(external, args)
            elif trait & MATRIX:
                self._product_rows += _SPAN.pack(start, duration, self._signature(name, args), number, thread)

    def _call(self, event: dict[str, Any], start: float, duration: float, _kind: int) -> None:
        args = event.get("args") or _NO_ARGS
        correlation = args.get("correlation", NOTHING)
        self._call_rows += _CALL.pack(
            start, duration, correlation, _external(args), self._name(event), self._thread(event.get("tid"))
        )

    def _work(self, event: dict[str, Any], start: float, duration: float, kind: int) -> None:
        args = event.get("args") or _NO_ARGS
        if kind == OTHER and "stream" not in args:
            return
        if kind == KERNEL:
            first = args.get("blocks per SM", NOTHING)
            second = args.get("est. achieved occupancy %", NOTHING)
        else:
            first, second = args.get("bytes", NOTHING), NOTHING
        self.fractional = self.fractional or type(start) is float
        self._work_rows += _WORK.pack(
            start,
            duration,
            args.get("correlation", NOTHING),
            _external(args),
            NOTHING if first is None else first,
            NOTHING if second is None else second,
            self._name(event),
            _number(args.get("stream")),
            _number(args.get("device")),
            kind,
        )

    def _step_on_device(self, event: dict[str, Any], start: float, _duration: float, _kind: int) -> None:
        if event["name"].startswith("ProfilerStep") and start > (self.last_gpu_step or -_LATEST_US):
            self.last_gpu_step = start

    def _frame(self, event: dict[str, Any], start: float, duration: float, _kind: int) -> None:
        if user_frame(event["name"]):
            number = self._name(event)
            self._frame_rows += _SPAN.pack(start, duration, NOTHING, number, self._thread(event.get("tid")))

    def _nothing(self, _event: dict[str, Any], _start: float, _duration: float, _kind: int) -> None:
        """An event with a duration and no category is not of the profiler: skip it."""

    def _name(self, event: dict[str, Any]) -> int:
        name = event["name"]
        number = self.names.ids.get(name)
        return self.names.add(name) if number is None else number

    def _kind(self, category: Any) -> int:
        lower = category.lower()
        kind = _KINDS.get(lower)
        if kind is None:
            kind = RUNTIME if _RUNTIME.fullmatch(lower) else OTHER
        if len(self._kinds) < _MAX_CATEGORIES:
            self._kinds[category] = kind
        return kind

    def _thread(self, raw: Any) -> int:
        """A small number for a thread. It is the same for 17 and "17", because old traces write both."""
        number = self._threads.get(raw)
        if number is not None:
            return number
        plain = _number(raw)
        number = self._threads.get(plain) if plain != NOTHING else None
        if number is None:
            number = len(self._threads)
        if len(self._threads) < _MAX_KEPT:
            self._threads[raw] = number
            if plain != NOTHING:
                self._threads[plain] = number
        return number

    def _signature(self, name: str, args: dict[str, Any]) -> int:
        shapes, types, values = args.get("Input Dims", args.get("Input dims")), args.get("Input type"), None
        if "conv" in name or "attention" in name:  # elsewhere values do not count, and may differ in each call
            values = args.get("Concrete Inputs")
        kind = types[0] if isinstance(types, list) and types and isinstance(types[0], str) else ""
        text = f"{name} {shapes} {kind} {values}"
        number = self._signature_numbers.get(text)
        if number is None:
            if len(text) > _MAX_SIGNATURE or len(self.signatures) >= _MAX_SIGNATURES:
                return NOTHING
            number = self._signature_numbers[text] = len(self.signatures)
            self.signatures.append(Signature(name, shapes, kind, values))
        return number

    def _keep_details(self, external: int, args: dict[str, Any]) -> None:
        types, stack = args.get("Input type"), args.get("Call stack")
        if types and len(self.input_types) < _MAX_KEPT:
            self.input_types[external] = str(types)[:200]
        if isinstance(stack, str) and len(self.call_sites) < _MAX_KEPT:
            frames = stack.split(";", 64)
            site = next(filter(user_frame, frames), frames[-1])[:300]
            self.call_sites[external] = site.encode("utf-8", "replace").decode()

    def _memory(self, args: dict[str, Any]) -> None:
        reserved, device = args.get("Total Reserved"), args.get("Device Id", NOTHING)
        on_device = args.get("Device Type", 0) != 0
        if on_device and isinstance(reserved, int) and isinstance(device, int) and 0 <= device < 1024:
            self.reserved_bytes[device] = max(reserved, self.reserved_bytes.get(device, 0))


def _columns(layout: Struct, rows: bytearray, types: str) -> list[array[Any]]:
    """The columns of packed rows, whose fields have eight bytes each. The rows are freed."""
    width = layout.size // 8
    reals, wholes = array("d"), array("q")
    reals.frombytes(rows)
    columns: dict[int, array[Any]] = {i: reals[i::width] for i, kind in enumerate(types) if kind == "d"}
    del reals
    wholes.frombytes(rows)
    rows.clear()
    for i, kind in enumerate(types):
        if kind != "d":
            column = wholes[i::width]
            columns[i] = column if kind == "q" else array(kind, column)
    return [columns[i] for i in range(width)]


def _external(args: dict[str, Any]) -> Any:
    """The external id, which older traces spell in lower case."""
    external = args.get("External id")
    return args.get("external id", NOTHING) if external is None else external


def _number(value: Any) -> int:
    """A whole number, which may be written as text; -1 for anything else, such as the address of a stream."""
    if type(value) is int:
        return value
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return NOTHING
