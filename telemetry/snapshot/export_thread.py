"""The thread that exports a recording. An export takes seconds, and the agent thread must go on sampling meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.util.threads import OwnThread, Wake

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.snapshot.budget import BudgetWatch
    from telemetry.snapshot.snapshot_outcome import SnapshotOutcome

_LONG_SECONDS: Final = 3600.0


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
        self._submitted = Wake()
        self._outcome: SnapshotOutcome | None = None
        self._thread = OwnThread(self._main, name="telemetry-export")
        self._thread.start()

    def submit(self, outcome: SnapshotOutcome | None) -> None:
        """Export an outcome and end the thread; None ends it without an export. Called once."""
        self._watch.close()
        self._outcome = outcome
        self._submitted.set()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, at most this many seconds."""
        self._thread.join(seconds)

    def _main(self) -> None:
        self._watch.run()
        while not self._submitted.wait(_LONG_SECONDS):
            pass
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            self._export(outcome)
