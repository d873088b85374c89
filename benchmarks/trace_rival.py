"""Holistic Trace Analysis, the closest rival in reading traces: its environment, and the same figures taken with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks import child
from benchmarks.rival import RivalError

VERSION: Final = "0.5.0"
HTA: Final = "Holistic Trace Analysis"
PYTHON_VARIABLE: Final = "HTA_PYTHON"

SCRIPT: Final = """
import logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
print(analysis.get_temporal_breakdown(visualize=False).to_json())
print(analysis.get_comm_comp_overlap(visualize=False).to_json())
print(analysis.get_idle_time_breakdown(visualize=False)[0].to_json())
"""
"""What its documentation says to write for the temporal breakdown, the overlap and the idle time of one rank."""

_VENV: Final = child.ROOT / ".venv-hta"
_PACKAGES: Final = (f"HolisticTraceAnalysis=={VERSION}", "pandas==2.2.3", "numpy<2.3")
_INSTALL_SECONDS: Final = 900.0


def python(*, install: bool) -> Path:
    """The interpreter of an environment with the rival in it, made if need be.

    Args:
        install: whether to make it where it is missing.

    Raises:
        RivalError: there is none, and none can be made.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    interpreter = Path(named) if named else _VENV / "bin" / "python"
    if not named and install and _version(interpreter) is None:
        _install(interpreter)
    found = _version(interpreter)
    if found != VERSION:
        raise RivalError(f"no environment with {HTA} {VERSION}" + (f" ({found} is there)" if found else ""))
    return interpreter


def _version(interpreter: Path) -> str | None:
    code = "import importlib.metadata as m; print(m.version('HolisticTraceAnalysis'))"
    try:
        done = subprocess.run([interpreter, "-c", code], capture_output=True, timeout=60, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _install(interpreter: Path) -> None:
    print(f"making {_VENV.name} with {HTA} {VERSION} (minutes; once)", flush=True)
    for command in (
        [sys.executable, "-m", "venv", str(_VENV)],
        [str(interpreter), "-m", "pip", "install", "-q", "--disable-pip-version-check", *_PACKAGES],
    ):
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_INSTALL_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            raise RivalError(f"its environment cannot be made ({type(error).__name__})") from None
