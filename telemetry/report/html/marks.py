"""What happened when: restarts, stalls, hangs, evaluations, checkpoints, snapshots and changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from telemetry.report.attempts import unix
from telemetry.report.html.chart_specs import Mark, MarkChart
from telemetry.util.text import duration, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from telemetry.report.html.run_recorder import RunRecorder
    from telemetry.report.process_log import ProcessLog

KINDS: Final = ("restart", "stall", "hang", "evaluation", "checkpoint", "snapshot", "change")
_MAX_OF_A_KIND: Final = 256


def mark_chart(
    summary: dict[str, Any], processes: Sequence[ProcessLog], recorder: RunRecorder, end: float
) -> MarkChart | None:
    """All marks; None without any.

    Args:
        summary: the report, as ``--json`` prints it.
        processes: of the run.
        recorder: has the evaluations and checkpoints.
        end: Unix time of the newest line.
    """
    found = [*_restarts(summary), *_stalls(summary, end), *_hang(summary, end), *_snapshots(processes)]
    found += _changes(summary)
    marks: list[Mark] = []
    notes: list[str] = []
    for kind in KINDS:
        own = [mark for mark in found if mark.kind == kind]
        if len(own) > _MAX_OF_A_KIND:
            own.sort(key=lambda mark: mark.begin - (mark.end or mark.begin))  # the longest
            notes.append(f"{_MAX_OF_A_KIND} of {len(own)} {kind} marks are shown.")
        marks += own[:_MAX_OF_A_KIND]
        for phase in recorder.phases.get(kind, ()):
            text = f"{phase.name}, {duration(phase.seconds)}"
            marks.append(Mark(kind, phase.begin, phase.begin + phase.seconds, text))
        seen = recorder.phases_seen.get(kind, 0)
        if seen > len(recorder.phases.get(kind, ())):
            notes.append(f"The newest {len(recorder.phases[kind])} of {seen} {kind}s are marked.")
    kinds = tuple(kind for kind in KINDS if any(mark.kind == kind for mark in marks))
    return MarkChart("marks", "Events", tuple(marks), kinds, tuple(notes)) if marks else None


def _restarts(summary: dict[str, Any]) -> Iterator[Mark]:
    before = None
    for attempt in summary["job"]["attempts"]:
        begin = unix(attempt["started"])
        if before is not None and begin is not None:
            text = f"attempt {attempt['attempt']} begins; attempt {before['attempt']} ended: {before['end']}"
            yield Mark("restart", begin, None, text)
        before = attempt


def _stalls(summary: dict[str, Any], end: float) -> Iterator[Mark]:
    for stall in summary["stalls"]:
        begin = unix(str(stall["opened"]))
        if begin is not None:
            closed = unix(str(stall["closed"])) if stall["closed"] else end
            open_still = "" if stall["closed"] else ", still open"
            text = f"rank {stall['rank']}: {stall['cause']}{open_still}"
            yield Mark("stall", begin, max(begin, closed or begin), text)


def _hang(summary: dict[str, Any], end: float) -> Iterator[Mark]:
    hang = summary["hang"]
    begin = unix(str(hang["since"])) if hang else None
    if begin is not None:
        yield Mark("hang", begin, max(begin, end), hang["verdict"])


def _snapshots(processes: Sequence[ProcessLog]) -> Iterator[Mark]:
    for process in processes:
        for line in process.snapshots:
            begin = unix(line.get("time", ""))
            if line.get("path") and begin is not None:
                steps = f"steps {line.get('first_step')} to {line.get('last_step')}"
                yield Mark("snapshot", begin, None, f"rank {process.rank}: {steps}")


def _changes(summary: dict[str, Any]) -> Iterator[Mark]:
    for change in summary["changes"]:
        begin = unix(change["at"])
        if begin is not None:
            word = "slower" if change["ratio"] > 1 else "faster"
            text = f"rank {change['rank']}: steps {percent(abs(change['ratio'] - 1), 0)} {word}"
            yield Mark("change", begin, None, text)
