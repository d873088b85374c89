"""What NVIDIA's data sheets give as the peak of a GPU: dense floating-point operations per second.

Data sheets since Hopper give tensor cores with sparsity, which is twice the dense figure. Here are the dense ones. For
float32 there are two: that of the CUDA cores, and that of tensor cores, which round to TF32. docs/TRACE.md names the
sheets. A device that is not in the table, such as a part of a GPU (MIG), has no peak here.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

FLOAT64, FLOAT32, TF32, FLOAT16, BFLOAT16, FLOAT8 = "float64", "float32", "tf32", "float16", "bfloat16", "float8"

FORMATS: Final = MappingProxyType(
    {
        "double": FLOAT64,
        "float": FLOAT32,
        "c10::Half": FLOAT16,
        "c10::BFloat16": BFLOAT16,
        "c10::Float8_e4m3fn": FLOAT8,
        "c10::Float8_e5m2": FLOAT8,
    }
)
"""A number format by the type of an input, as a trace spells it."""

_TERA: Final = 1e12


def _teraflops(*figures: float | None) -> Mapping[str, float]:
    formats = (FLOAT64, FLOAT32, TF32, FLOAT16, BFLOAT16, FLOAT8)
    return MappingProxyType({f: x * _TERA for f, x in zip(formats, figures, strict=True) if x is not None})


_V100_SXM: Final = _teraflops(7.8, 15.7, None, 125, None, None)
_H100_SXM: Final = _teraflops(67, 67, 494.5, 989.5, 989.5, 1979)
_NVL: Final = _teraflops(60, 60, 417.5, 835.5, 835.5, 1670.5)

PEAKS: Final[tuple[tuple[str, Mapping[str, float]], ...]] = (
    # float64, float32, TF32, float16, bfloat16, float8
    (r"Tesla T4", _teraflops(None, 8.1, None, 65, None, None)),
    (r"Tesla V100-PCIE-\d+GB", _teraflops(7, 14, None, 112, None, None)),
    (r"Tesla V100S-PCIE-\d+GB", _teraflops(8.2, 16.4, None, 130, None, None)),
    (r"Tesla V100-(SXM2|DGXS)-\d+GB", _V100_SXM),
    (r"(NVIDIA )?A100-(SXM4|PCIE)-(40|80)GB|NVIDIA A100 80GB PCIe", _teraflops(19.5, 19.5, 156, 312, 312, None)),
    (r"NVIDIA A10G", _teraflops(None, 35, 35, 70, 70, None)),
    (r"NVIDIA L4", _teraflops(None, 30.3, 60, 121, 121, 242.5)),
    (r"NVIDIA L40S", _teraflops(None, 91.6, 183, 362.05, 362.05, 733)),
    (r"NVIDIA H100 80GB HBM3", _H100_SXM),
    (r"NVIDIA H100 PCIe", _teraflops(51, 51, 378, 756.5, 756.5, 1513)),
    (r"NVIDIA H100 NVL", _NVL),
    (r"NVIDIA H200", _H100_SXM),
    (r"NVIDIA H200 NVL", _NVL),
    (r"NVIDIA B200", _teraflops(37, 75, 1100, 2250, 2250, 4500)),
)
"""By the name of the device, as CUDA gives it. The four V100 of a DGX Station have 500 together: that of the SXM2."""


def peaks_of(device: str) -> Mapping[str, float]:
    """FLOP per second by number format; empty for a device that is not in the table."""
    return next((peaks for name, peaks in PEAKS if re.fullmatch(name, device)), MappingProxyType({}))
