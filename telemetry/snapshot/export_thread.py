"""The thread that exports a recording. An export takes seconds, and the agent thread must go on sampling meanwhile."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from telemetry.core.signal_mask import signals_blocked

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.snapshot.budget import BudgetWatch
    from telemetry.snapshot.snapshot_outcome import SnapshotOutcome


class ExportThread:
    """A thread that watches what the recording of one plan takes, waits for its outcome, and exports the trace.

    It is started before the recording, because Python 3.12 and later start no thread while the process exits.

    Args:
        export: saves an outcome that has a trace. Called on this thread.
        watch: holds the recording to its budget.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, export: Callable[[SnapshotOutcome], None], watch: BudgetWatch) -> None:
        self._export, self._watch = export, watch
        self._submitted: SimpleQueue[SnapshotOutcome | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="telemetry-export", daemon=True)
        with signals_blocked():
            self._thread.start()

    def submit(self, outcome: SnapshotOutcome | None) -> None:
        """Export an outcome and end the thread; None ends it without an export. Called once."""
        self._watch.close()
        self._submitted.put(outcome)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, at most this many seconds."""
        self._thread.join(seconds)

    def _main(self) -> None:
        self._watch.run()
        outcome = self._submitted.get()
        if outcome is not None:
            self._export(outcome)
