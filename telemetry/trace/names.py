"""What the name of an event tells about it. Each name is looked at once."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable


def _matches(pattern: str) -> Callable[[str], bool]:
    """Whether a name matches a pattern somewhere. It is computed once for each name."""
    found = re.compile(pattern).search
    return cache(lambda name: found(name) is not None)


is_loader = _matches(r"^enumerate\(DataLoader\)#.*\.__next__$|^enumerate\(DataPipe\)#")
"""The wait for a batch."""

is_collective = _matches(r"^(nccl|gloo|mpi|ucc|rccl|hccl|xccl):")
"""A collective on the host; on the device: `is_collective_kernel`."""

clears_gradients = _matches(r"^Optimizer\.zero_grad")
may_copy = _matches(
    r"^aten::(copy_|to|_to_copy|item|_local_scalar_dense|nonzero|is_nonzero|equal|masked_select|_?unique2)$"
)
"""An operator that may copy between host and device, or wait for the device."""

is_eligible = _matches(
    r"^(aten::_?(cudnn_|miopen_|thnn_)?conv(olution|_tbc|_transpose|\d)|aten::(addmm|addmv|addr|addbmm|baddbmm|bmm|mm|mv|"
    r"matmul|linear|prelu|chain_matmul|linalg_multi_dot|gru_cell|lstm_cell|rnn_(tanh|relu)_cell|_thnn_fused_\w+|"
    r"_scaled_dot_product|_flash_attention|_efficient_attention|_addmm_activation|_scaled_mm|_cudnn_rnn)"
    r"|(Cudnn)?Convolution(Transpose)?Backward|(Bmm|Mm|Mv|Addmm|Addmv|Addbmm)Backward)"
)
"""An operator whose work tensor cores can do."""

is_tensor_core = _matches(
    # The names that NVIDIA's PyProf and torch-tb-profiler go by, and those of Hopper and newer.
    r"h884|s884|h1688|s1688|c1688|hmma|i8816|16816|16832|dgrad_1x1_stride_2x2|first_layer_wgrad_kernel|conv1x1|"
    r"conv2d_c1_k1|direct_group|xmma_(implicit_gemm|sparse_conv|warp_specialized_implicit_gemm|gemm|sparse_gemm)|"
    r"tensorop|tensor\d+x\d+|wgmma|gmma|nvjet|flash_(fwd|bwd)|flash::|fmha"
)
"""A kernel that uses tensor cores."""

converts_layout = _matches(r"(?i)nchwto|nhwcto|nchw_?2_?nhwc|nhwc_?2_?nchw|convert_?tensor|batched_transpose")
"""A kernel that only changes the memory layout."""

is_collective_kernel = _matches(r"^nccl.*Kernel")
is_no_compute = _matches(r"^(nccl.*Kernel|.*Memcpy|Memset|dma|.*Sync)")
"""Work of the device that is not computation, as Holistic Trace Analysis defines it."""

is_blocking = _matches(r"^((cuda|hip|cu|xpu)\w*Synchronize|cudaMemcpy|hipMemcpy(WithStream)?)$")
"""A runtime call that waits until the device is done."""

_is_frame = _matches(r"^.+\.py\(\d+\): .")
_is_library = _matches(r"(^|/)(torch|site-packages|dist-packages|python\d[\d.]*)/|^(threading|contextlib)\.py\(")
_STEP_MARK: Final = re.compile(r"ProfilerStep#(\d{1,18})")
_MEMCPY: Final = re.compile(r"Memcpy (\w+)(?: \((\w+) -> (\w+)\))?")


@cache
def step_number(name: str) -> int | None:
    """The number in the annotation of a step; None for any other name."""
    match = _STEP_MARK.fullmatch(name)
    return int(match[1]) if match else None


@cache
def copy_kind(name: str) -> tuple[str, bool | None]:
    """The direction of a copy, and whether its host memory is pageable; None if the name does not show it."""
    match = _MEMCPY.match(name)
    if match is None:
        return "other", None
    ends = match.group(2, 3)
    return match[1], True if "Pageable" in ends else False if "Pinned" in ends else None


def is_user_frame(frame: str) -> bool:
    """Whether a frame, ``file.py(12): function``, is in the user's own code and not in a library."""
    return _is_frame(frame) and not _is_library(frame)
