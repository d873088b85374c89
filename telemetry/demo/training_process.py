"""The training that the demo starts: a process in its own session that never outlives the demo."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

_EXIT_SECONDS: Final = 5.0
"""How long an interrupted training may take to end by itself."""

_MAX_STDERR_LINES: Final = 100


@contextlib.contextmanager
def training_process(arguments: list[str], run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``telemetry ARGUMENTS`` with its output in files. It is ended when the context is left.

    It gets a session of its own. So Ctrl-C reaches the demo alone, and the demo ends the training with its workers.

    Args:
        arguments: arguments of the command line.
        run: the run folder; it gets ``train.out`` and ``train.err``.
    """
    command = [sys.executable, "-m", "telemetry", *arguments]
    quiet = os.environ | {"TELEMETRY_END_LINE": "off"}
    with (run / "train.out").open("wb") as output, (run / "train.err").open("wb") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=quiet, start_new_session=True
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Interrupt the training, so that the agent can write its last line; kill it if that times out."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """The context in which SIGTERM raises KeyboardInterrupt. By default it would kill us and leave the training."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise KeyboardInterrupt


def report_failure(status: int, errors: Path) -> None:
    """Print how a training ended that failed, and the end of its stderr.

    Args:
        status: its exit status; negative for a signal.
        errors: the file with its stderr.
    """
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    written = errors.read_text(errors="replace").splitlines()[-_MAX_STDERR_LINES:]
    sys.stdout.flush()
    sys.stderr.write("\n".join(["", f"telemetry demo: the training {how}; its stderr:", *written, ""]))
