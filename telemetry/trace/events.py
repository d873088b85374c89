"""The events of a trace that the figures need, as packed rows. They take a tenth of the memory of dicts.

Times are microseconds, as in the file. The Trace Event Format has no other unit, whatever ``displayTimeUnit`` is.
"""

from __future__ import annotations

import re
import struct
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from telemetry.trace.files import ReadLimits, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

NOTHING: Final = -1
"""Stands for an id or a figure that an event does not have."""

OTHER, KERNEL, MEMCPY, MEMSET, SYNC, RUNTIME, OPERATOR, ANNOTATION, GPU_ANNOTATION, FRAME, MEMORY = range(11)

_KINDS: Final = {
    "kernel": KERNEL, "mtia_ccp_events": KERNEL, "memcpy": MEMCPY, "gpu_memcpy": MEMCPY, "memset": MEMSET,
    "gpu_memset": MEMSET, "cuda_sync": SYNC, "runtime": RUNTIME, "operator": OPERATOR, "cpu_op": OPERATOR,
    "python": OPERATOR, "user_annotation": ANNOTATION, "gpu_user_annotation": GPU_ANNOTATION,
    "python_function": FRAME, "cpu_instant_event": MEMORY,
}  # fmt: skip
_RUNTIME: Final = re.compile(r".+_(runtime|driver)")  # cuda_runtime, cuda_driver, xpu_runtime, mtia_runtime ...
_LATEST_US: Final = 1e17
"""Valid timestamps are below this (the year 5138)."""

# -- traits of a name ----------------------------------------------------------------------------------------------

STEP, LOADER, COMMUNICATION, LIGHTNING, ZERO_GRAD, WAITS, ELIGIBLE, MATRIX = (1 << bit for bit in range(8))
"""Traits of a host event: a step's annotation; the wait for a batch; a collective; an annotation of Lightning; clearing
the gradients; an operator that may copy or wait for the device; one whose work tensor cores can do; one that
multiplies matrices, convolves or attends, or may do so."""

COLLECTIVE, COMPUTE, TENSOR_CORE, LAYOUT, BLOCKING = (1 << bit for bit in range(8, 13))
"""Traits of a device event or a runtime call: a collective's kernel; computation, as Holistic Trace Analysis defines
it; a kernel on tensor cores; one that only changes the memory layout; a call that waits until the device is done."""

_MARKS: Final = STEP | LOADER | COMMUNICATION | ZERO_GRAD
_STEP_MARK: Final = re.compile(r"ProfilerStep#(\d{1,18})")
_LOADER: Final = re.compile(r"enumerate\(DataLoader\)#.*\.__next__|enumerate\(DataPipe\)#.*", re.DOTALL)
_COLLECTIVE: Final = re.compile(r"(nccl|gloo|mpi|ucc|rccl|hccl|xccl):")
_WAITS: Final = {
    "aten::copy_", "aten::to", "aten::_to_copy", "aten::item", "aten::_local_scalar_dense", "aten::nonzero",
    "aten::is_nonzero", "aten::equal", "aten::masked_select", "aten::unique2", "aten::_unique2",
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
_COLLECTIVE_KERNEL: Final = re.compile(r"nccl.*Kernel")
_NO_COMPUTE: Final = re.compile(r"nccl.*Kernel|.*Memcpy|Memset|dma|.*Sync")
_BLOCKING: Final = re.compile(r"(cuda|hip|cu|xpu)\w*Synchronize|cudaMemcpy|hipMemcpy(WithStream)?")
_MEMCPY: Final = re.compile(r"Memcpy (\w+)(?: \((\w+) -> (\w+)\))?")
_USER_FRAME: Final = re.compile(r".+\.py\(\d+\): .+")
_LIBRARY_FRAME: Final = re.compile(
    r"(^|/)(torch|site-packages|dist-packages|python\d[\d.]*)/|^(threading|contextlib)\.py\("
)


def _traits(name: str) -> int:
    found = {
        STEP: _STEP_MARK.fullmatch(name),
        LOADER: _LOADER.fullmatch(name),
        COMMUNICATION: _COLLECTIVE.match(name),
        LIGHTNING: name.startswith("[pl]"),
        ZERO_GRAD: name.startswith("Optimizer.zero_grad"),
        WAITS: name in _WAITS,
        ELIGIBLE: _ELIGIBLE.match(name),
        MATRIX: _MATRIX.search(name) and not _NO_MATRIX.search(name),
        COLLECTIVE: _COLLECTIVE_KERNEL.match(name),
        COMPUTE: not _NO_COMPUTE.match(name),
        TENSOR_CORE: _TENSOR_CORE.search(name),
        LAYOUT: _LAYOUT.search(name),
        BLOCKING: _BLOCKING.fullmatch(name),
    }
    return sum(trait for trait, true in found.items() if true)


def step_number(name: str) -> int:
    """The number in the annotation of a step; 0 for any other name."""
    match = _STEP_MARK.fullmatch(name)
    return int(match[1]) if match else 0


def copy_kind(name: str) -> tuple[str, bool | None]:
    """The direction of a copy, and whether its host memory is pageable; None if the name does not show it."""
    match = _MEMCPY.match(name)
    if match is None:
        return ("other", None)
    ends = {match[2], match[3]}
    return match[1], True if "Pageable" in ends else False if "Pinned" in ends else None


def _user_frame(frame: str) -> bool:
    """Whether a frame, ``file.py(12): function``, is in the user's own code and not in a library."""
    return _USER_FRAME.fullmatch(frame) is not None and _LIBRARY_FRAME.search(frame) is None


# -- rows ----------------------------------------------------------------------------------------------------------


class DeviceWork(NamedTuple):
    """An event on a device. -1 if the trace does not contain a figure.

    Attributes:
        start, took: microseconds.
        correlation: id of the runtime call that launched it.
        external: id of the operator that launched it.
        first, second: blocks per SM and achieved occupancy (percent) of a kernel; bytes of a copy, and nothing.
        name: its number in `TraceEvents.names`.
        kind: KERNEL, MEMCPY, MEMSET, SYNC or OTHER.
    """

    start: float
    took: float
    correlation: int
    external: int
    first: float
    second: float
    name: int
    stream: int
    device: int
    kind: int

    @property
    def span(self) -> tuple[float, float]:
        """Start and end in microseconds."""
        return self.start, self.start + self.took


class HostEvent(NamedTuple):
    """A runtime call, operator, mark or frame of the user's Python code on the host; fields as in `DeviceWork`."""

    start: float
    took: float
    correlation: int
    external: int
    name: int
    thread: int

    @property
    def span(self) -> tuple[float, float]:
        """Start and end in microseconds."""
        return self.start, self.start + self.took


_Row = TypeVar("_Row", DeviceWork, HostEvent)


class Rows(Generic[_Row]):
    """Rows of one kind, in the order of the file. They are kept packed: `pack` a row into `packed`."""

    def __init__(self, kind: type[_Row], layout: str) -> None:
        self.packed = bytearray()
        self.pack = Struct(layout).pack
        self._unpack = Struct(layout).iter_unpack
        self._size = struct.calcsize(layout)
        self._named: Callable[[Any], _Row] = partial(tuple.__new__, kind)  # half the time of ``_make``

    def __iter__(self) -> Iterator[_Row]:
        return map(self._named, self._unpack(self.packed))

    def plain(self) -> Iterator[tuple[Any, ...]]:
        """The rows as tuples without names, for loops over all operators and calls: it takes a third of the time."""
        return self._unpack(self.packed)

    def __len__(self) -> int:
        return len(self.packed) // self._size


def _host_rows() -> Rows[HostEvent]:
    return Rows(HostEvent, "<ddqqii")


class Signature(NamedTuple):
    """The properties by which calls of matrix operators are grouped: name, and shapes, first type and values of inputs.

    The values come from the file as they are, and may be anything.
    """

    name: str
    shapes: Any
    kind: str
    values: Any


class TraceEvents:
    """The kept events of one trace.

    Attributes:
        names: the names of all events, each once. ``traits``: the traits of each name.
        fractional: whether device times have fractions of a microsecond.
        last_gpu_step: start of the last step's annotation on the device, microseconds; None without one.
        input_types: input types of copying operators, by external id.
        call_sites: the user's line that called a synchronising operator, by external id.
        reserved_bytes: the most memory that the allocator had reserved, by device.
        work: events on devices.
        calls: runtime calls on the host.
        operators: operators; in old traces annotations too, but not those of steps.
        marks: steps, waits for a batch, collectives and clearing of gradients, as operators or annotations.
        frames: Python functions of the user's own code.
        products: matrix operators. Here ``external`` is the number in ``signatures``.
        signatures: the distinct signatures of ``products``.
        malformed: number of events that were skipped because a field is invalid.
    """

    def __init__(self, limits: ReadLimits) -> None:
        self.names: list[str] = []
        self.traits: list[int] = []
        self.fractional = False
        self.last_gpu_step: float | None = None
        self.input_types: dict[int, str] = {}
        self.call_sites: dict[int, str] = {}
        self.reserved_bytes: dict[int, int] = {}
        self.signatures: list[Signature] = []
        self.malformed = 0
        self.work = Rows(DeviceWork, "<ddqqddiqqb")
        self.calls, self.operators, self.marks = _host_rows(), _host_rows(), _host_rows()
        self.frames, self.products = _host_rows(), _host_rows()
        self._limits = limits
        self._numbers: dict[str, int] = {}
        self._kinds: dict[Any, int] = {None: MEMORY}
        self._threads: dict[Any, int] = {}
        self._signature_numbers: dict[str, int] = {}
        self._keepers: dict[int, Callable[[dict[str, Any], float, float, int], None]] = {
            OPERATOR: self._host,
            ANNOTATION: self._host,
            RUNTIME: self._call,
            FRAME: self._frame,
            GPU_ANNOTATION: self._step_on_device,
            MEMORY: lambda *_: None,  # an event with a duration and no category is not from the profiler
        } | dict.fromkeys((KERNEL, MEMCPY, MEMSET, SYNC, OTHER), self._work)

    def add(self, batch: Iterable[Any]) -> None:
        """Keep the needed rows of some events. Invalid events are counted and skipped.

        Raises:
            TraceError: there are more events than the limits allow.
        """
        left = iter(batch)
        while True:
            try:
                self._add(left)
            except (KeyError, TypeError, ValueError, AttributeError, struct.error, OverflowError, RecursionError):
                self.malformed += 1  # no part of its row was packed; go on with the next event
            else:
                break
        kept = len(self.work) + len(self.calls) + len(self.operators) + len(self.marks) + len(self.frames)
        if kept > self._limits.max_events:
            raise TraceError(f"it holds more than {self._limits.max_events} events: record fewer steps")

    def named(self, trait: int) -> set[int]:
        """The numbers of the names that have a trait."""
        return {number for number, traits in enumerate(self.traits) if traits & trait}

    def name_of(self, number: int) -> str | None:
        """The name of a number; None for -1."""
        return self.names[number] if number >= 0 else None

    @property
    def is_amd(self) -> bool:
        """Whether the trace is of AMD's runtime. The names of AMD's kernels do not show the use of matrix cores."""
        return any(name.startswith("hip") for name in self.names)

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
        number = self._numbers.get(name)  # inlines `_name` and `_thread`, to save two calls for each operator
        if number is None:
            number = self._name(name)
        trait = self.traits[number]
        if kind == ANNOTATION and not trait & _MARKS:
            return
        args = event.get("args") or {}
        external = _external(args)
        thread = self._threads.get(tid)
        if thread is None:
            thread = self._thread(tid)
        row = self.operators.pack(start, duration, NOTHING, external, number, thread)
        if trait & _MARKS:
            self.marks.packed += row
        if kind == OPERATOR and not trait & (STEP | LIGHTNING):
            self.operators.packed += row
            if trait & WAITS:
                self._keep_details(external, args)
            elif trait & MATRIX:
                signature = self._signature(name, args)
                self.products.packed += self.products.pack(start, duration, NOTHING, signature, number, thread)

    def _call(self, event: dict[str, Any], start: float, duration: float, _kind: int) -> None:
        args = event.get("args") or {}
        number, thread = self._name(event["name"]), self._thread(event.get("tid"))
        correlation = args.get("correlation", NOTHING)
        self.calls.packed += self.calls.pack(start, duration, correlation, _external(args), number, thread)

    def _work(self, event: dict[str, Any], start: float, duration: float, kind: int) -> None:
        args = event.get("args") or {}
        if kind == OTHER and "stream" not in args:
            return
        if kind == KERNEL:
            first, second = args.get("blocks per SM"), args.get("est. achieved occupancy %")
        else:
            first, second = args.get("bytes"), None
        self.fractional = self.fractional or type(start) is float
        self.work.packed += self.work.pack(
            start,
            duration,
            args.get("correlation", NOTHING),
            _external(args),
            NOTHING if first is None else first,
            NOTHING if second is None else second,
            self._name(event["name"]),
            _number(args.get("stream")),
            _number(args.get("device")),
            kind,
        )

    def _step_on_device(self, event: dict[str, Any], start: float, _duration: float, _kind: int) -> None:
        if event["name"].startswith("ProfilerStep") and start > (self.last_gpu_step or -_LATEST_US):
            self.last_gpu_step = start

    def _frame(self, event: dict[str, Any], start: float, duration: float, _kind: int) -> None:
        if _user_frame(event["name"]):
            number, thread = self._name(event["name"]), self._thread(event.get("tid"))
            self.frames.packed += self.frames.pack(start, duration, NOTHING, NOTHING, number, thread)

    def _name(self, name: Any) -> int:
        """The number of a name. A new name is kept."""
        number = self._numbers.get(name)
        if number is not None:
            return number
        if not isinstance(name, str):
            raise TypeError
        number = self._numbers[name] = len(self.names)
        self.names.append(name if name.isascii() else name.encode("utf-8", "replace").decode())
        self.traits.append(_traits(name))
        return number

    def _kind(self, category: Any) -> int:
        lower = category.lower()
        kind = _KINDS.get(lower)
        if kind is None:
            kind = RUNTIME if _RUNTIME.fullmatch(lower) else OTHER
        self._kinds[category] = kind
        return kind

    def _thread(self, raw: Any) -> int:
        """A small number for a thread. It is the same for 17 and "17", because old traces write both."""
        number = self._threads.get(raw)
        if number is None:
            plain = _number(raw)
            key = raw if plain == NOTHING else plain
            number = self._threads.get(key, len(self._threads))
            self._threads[raw] = self._threads[key] = number
        return number

    def _signature(self, name: str, args: dict[str, Any]) -> int:
        shapes, types, values = args.get("Input Dims", args.get("Input dims")), args.get("Input type"), None
        if "conv" in name or "attention" in name:  # elsewhere values do not count, and may differ in each call
            values = args.get("Concrete Inputs")
        kind = types[0] if isinstance(types, list) and types and isinstance(types[0], str) else ""
        text = f"{name} {shapes} {kind} {values}"
        number = self._signature_numbers.get(text)
        if number is None:
            number = self._signature_numbers[text] = len(self.signatures)
            self.signatures.append(Signature(name, shapes, kind, values))
        return number

    def _keep_details(self, external: int, args: dict[str, Any]) -> None:
        types, stack = args.get("Input type"), args.get("Call stack")
        if types:
            self.input_types[external] = str(types)[:200]
        if isinstance(stack, str):
            frames = stack.split(";", 64)
            site = next(filter(_user_frame, frames), frames[-1])[:300]
            self.call_sites[external] = site.encode("utf-8", "replace").decode()

    def _memory(self, args: dict[str, Any]) -> None:
        reserved, device = args.get("Total Reserved"), args.get("Device Id", NOTHING)
        on_device = args.get("Device Type", 0) != 0
        if on_device and isinstance(reserved, int) and isinstance(device, int) and 0 <= device < 1024:
            self.reserved_bytes[device] = max(reserved, self.reserved_bytes.get(device, 0))


def _external(args: dict[str, Any]) -> Any:
    """The external id, which older traces spell in lower case."""
    external = args.get("External id")
    return args.get("external id", NOTHING) if external is None else external


def _number(value: Any) -> int:
    """A whole number, which may be text; -1 for anything else, such as the address of a stream."""
    if type(value) is int:
        return value
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return NOTHING
