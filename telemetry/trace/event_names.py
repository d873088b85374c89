"""Names of events. Each is kept once, with the traits of an event that follow from its name."""

from __future__ import annotations

import re
from typing import Final

from telemetry.trace.read_limits import TraceError

STEP, LOADER, COMMUNICATION, LIGHTNING, ZERO_GRAD, COPY, SYNCHRONIZING, ELIGIBLE, MATRIX = (
    1 << bit for bit in range(9)
)
"""Traits of a host event: a step's annotation; the wait for a batch; a collective; an annotation of Lightning; clearing
the gradients; an operator that copies; one that waits for the device; one whose work tensor cores can do; one that
multiplies matrices, convolves or attends, or may do so."""

MARKS: Final = STEP | LOADER | COMMUNICATION | ZERO_GRAD
"""The traits of events that are kept as marks."""

_STEP_MARK: Final = re.compile(r"ProfilerStep#(\d{1,18})")
_COLLECTIVE: Final = re.compile(r"(nccl|gloo|mpi|ucc|rccl|hccl|xccl):")
_COPIES: Final = frozenset({"aten::copy_", "aten::to", "aten::_to_copy"})
_WAITS: Final = frozenset({
    "aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal",
    "aten::masked_select", "aten::copy_", "aten::to", "aten::_to_copy", "aten::unique2", "aten::_unique2",
})  # fmt: skip
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
_MATRIX_KERNEL: Final = re.compile(
    r"(?<!fb)gemm|conv(?!ert)|wgrad|dgrad|bgrad|cudnn_\w*\d+x\d+|winograd|cutlass|nvjet|wgmma|gmma|xmma|fmha|flash",
    re.IGNORECASE,
)
_CUDA_CORE: Final = re.compile(
    r"sgemm|scudnn|simt|ffma|winograd|<float, float|dgrad_engine<float|wgrad_alg0_engine<float"
)
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


class EventNames:
    """Gives each name a number.

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


def step_number(name: str) -> int | None:
    """The number in the annotation of a step; None for any other name."""
    match = _STEP_MARK.fullmatch(name)
    return int(match[1]) if match else None


def is_communication(name: str) -> bool:
    """Whether a kernel is a collective's."""
    return _COMMUNICATION_KERNEL.match(name) is not None


def is_compute(name: str) -> bool:
    """Whether a device event is computation, by its name, as Holistic Trace Analysis defines it."""
    return not (_COMMUNICATION_KERNEL.match(name) or _MEMORY_KERNEL.match(name) or _NO_COMPUTE.match(name))


def uses_tensor_cores(name: str) -> bool:
    """Whether a kernel runs on tensor cores, by its name."""
    return _TENSOR_CORE.search(name) is not None


def multiplies_matrices(name: str) -> bool:
    """Whether a kernel multiplies matrices, convolves or attends, by its name. It knows many names, not all."""
    return _MATRIX_KERNEL.search(name) is not None and not converts_layout(name)


def uses_cuda_cores(name: str) -> bool:
    """Whether a kernel that multiplies float32 does so on CUDA cores, by its name."""
    return _CUDA_CORE.search(name) is not None and not uses_tensor_cores(name)


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
    traits = 0
    if step_number(name) is not None:
        traits |= STEP
    if (name.startswith("enumerate(DataLoader)#") and name.endswith(".__next__")) or name.startswith(
        "enumerate(DataPipe)#"
    ):
        traits |= LOADER
    if _COLLECTIVE.match(name):
        traits |= COMMUNICATION
    if name.startswith("[pl]"):
        traits |= LIGHTNING
    if name.startswith("Optimizer.zero_grad"):
        traits |= ZERO_GRAD
    if name in _COPIES:
        traits |= COPY
    if name in _WAITS:
        traits |= SYNCHRONIZING
    if _ELIGIBLE.match(name):
        traits |= ELIGIBLE
    if _MATRIX.search(name) and not _NO_MATRIX.search(name):
        traits |= MATRIX
    return traits
