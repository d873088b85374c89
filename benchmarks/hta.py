"""Holistic Trace Analysis, which also reads traces: its environment, and a script that computes the same figures."""

from __future__ import annotations

from typing import Final

from benchmarks.tool_environment import ToolEnvironment

VERSION: Final = "0.5.0"
HTA: Final = "Holistic Trace Analysis"

SCRIPT: Final = """
import logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
print(analysis.get_temporal_breakdown(visualize=False).to_json())
print(analysis.get_comm_comp_overlap(visualize=False).to_json())
print(analysis.get_idle_time_breakdown(visualize=False)[0].to_json())
"""
"""Its documentation recommends this for the temporal breakdown, the overlap and the idle time of one rank."""

ENVIRONMENT: Final = ToolEnvironment(
    tool=HTA,
    package="HolisticTraceAnalysis",
    version=VERSION,
    variable="HTA_PYTHON",
    folder=".venv-hta",
    packages=lambda: (f"HolisticTraceAnalysis=={VERSION}", "pandas==2.2.3", "numpy<2.3"),
)
