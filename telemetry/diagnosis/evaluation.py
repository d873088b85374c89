"""Judges how the evaluations of a run are fed: the waits for their own loader, and what another setting would bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from telemetry.diagnosis.causes import advise
from telemetry.diagnosis.evidence import Evidence
from telemetry.diagnosis.findings import Finding
from telemetry.diagnosis.hot_lines import LineShare, verdict_part
from telemetry.model.records import EVALUATION, Advice, RankPace
from telemetry.util.profiles import WAIT
from telemetry.util.words import duration, rounded_percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.model.totals import Totals

_MIN_GAIN: Final = 1.1
"""Least factor on the steps of the run. A small validation, or one that computes, is no finding."""

_MIN_SHARE: Final = 0.1
"""Least share of the time that evaluations wait, where the gain is not known."""

_MIN_BATCHES: Final = 10

_FIRST_FETCH: Final = 0.3
"""The wait for a first batch is the start of workers if the fetch of that batch is less than this part of it."""

_CAUSE_OF: Final = {"training_thread": "loader_on_training_thread", "watched": "source_slow"}


@dataclass(frozen=True, slots=True)
class EvaluationTimes:
    """The evaluations of a run so far, with the loader that they wait for most.

    Attributes:
        kind: where their batches come from, see `BatchSource`. ``settings``: of that loader.
        evaluations: how many there were. ``batches``: of all of them. ``seconds``: all their time.
        wait_seconds: waits for batches. ``start_seconds``: with workers, their starts and ends, and the waits for first
            batches.
        cpu_ratio: CPU time of the training process in a second of evaluation; None if unknown.
        cores: cores that this rank may use.
        place: the line of the user's code that reads the loader, such as ``train.py:42``; empty if unknown.
        batch_size: samples in a batch of evaluations. ``trained_size``: in a batch of the training. None if unknown.
    """

    kind: str
    settings: dict[str, Any]
    evaluations: int
    batches: int
    seconds: float
    wait_seconds: float
    start_seconds: float = 0.0
    cpu_ratio: float | None = None
    cores: float = 1.0
    place: str = ""
    batch_size: int | None = None
    trained_size: int | None = None

    @property
    def workers(self) -> int:
        """Its workers."""
        return int(self.settings.get("num_workers") or 0)

    @property
    def compute_seconds(self) -> float:
        """All that is no wait for the loader."""
        return max(0.0, self.seconds - self.wait_seconds - self.start_seconds)


def evaluation_finding(times: EvaluationTimes, totals: Totals, lines: Sequence[LineShare] = ()) -> Finding | None:
    """What the evaluations lose to their own loader; None if it is not worth a change.

    Args:
        times: the evaluations.
        totals: the run so far.
        lines: the lines of code in which the waits are spent, the largest share first.
    """
    run = totals.loop_seconds + totals.ledger_seconds.get(EVALUATION, 0.0)
    waited = times.wait_seconds + times.start_seconds
    if times.batches < _MIN_BATCHES or run <= 0 or waited < _MIN_SHARE / 2 * run:
        return None
    advice, then = _with_workers(times) if not times.workers else _of_workers(times)
    gain = None if then is None else run / (run - (times.seconds - then))
    lost = waited / run if gain is None else 1 - 1 / gain
    if (gain is None and lost < _MIN_SHARE) or (gain is not None and gain < _MIN_GAIN) or not advice:
        return None
    each, counted = times.seconds / times.evaluations, "an evaluation" if times.evaluations > 1 else "the evaluation"
    read = f", read at {times.place}" if times.place else ""
    text = (
        f"Of the {duration(each)} of {counted}, {duration(waited / times.evaluations)} are waits for its own loader "
        f"({_named(times)}{read}) and {duration(times.compute_seconds / times.evaluations)} compute; evaluations take "
        f"{rounded_percent(times.seconds / run)} of the time"
    )
    if lines and not times.workers:
        text += f"; {verdict_part(lines[0], WAIT)} is {lines[0].named}"
    first = structs.replace(advice[0], predicted_speedup=None if gain is None else round(gain, 2), predicted_low=None)
    if then is not None:
        takes = f"an evaluation is predicted to take {duration(then / times.evaluations)}"
        first = structs.replace(first, because=f"{first.because}; {takes}")
    return Finding(
        kind="evaluation_loader",
        share_ratio=round(min(1.0, max(0.0, lost)), 4),
        text=text,
        lines=tuple(line.told() for line in lines),
        advice=(first,),
    )


def small_batches(times: EvaluationTimes, totals: Totals, lines: Sequence[LineShare] = ()) -> Finding | None:
    """What the evaluations lose because their batches are smaller than those of the training; None if they do not.

    Evaluations only go forward. If each of their samples nevertheless takes longer than one of a training step, most of
    that time hardly depends on the size of a batch, or they do other work for each sample. There is no prediction,
    because these two cannot be told apart.

    Args:
        times: the evaluations.
        totals: the run so far.
        lines: the lines of code in which the evaluations compute, the largest share first.
    """
    size, trained = times.batch_size, times.trained_size
    if size is None or trained is None or size >= trained or times.batches < _MIN_BATCHES or not totals.steps:
        return None
    run = totals.loop_seconds + totals.ledger_seconds.get(EVALUATION, 0.0)
    step, each = totals.compute_seconds / totals.steps, times.compute_seconds / times.batches
    lost = (times.compute_seconds - times.batches * size / trained * step) / run
    if lost < _MIN_SHARE:
        return None
    samples = f"{size} sample{'s' * (size > 1)}"
    text = (
        f"Evaluations take {rounded_percent(times.seconds / run)} of the time. Their batches have {samples} and "
        f"compute for {duration(each)}; those of the training have {trained} and compute for {duration(step)}"
    )
    if lines:
        text += f"; {rounded_percent(lines[0].share)} of an evaluation's compute is {lines[0].named}"
    because = (
        f"a sample takes {duration(each / size)} in an evaluation and {duration(step / trained)} in a training step, "
        "with its backward pass"
    )
    action = "give the evaluation's loader batches as large as the training's"
    return Finding(
        kind="evaluation_loader",
        share_ratio=round(lost, 4),
        text=text,
        lines=tuple(line.told() for line in lines),
        advice=(Advice(action, "batch_size", str(trained), because=because),),
    )


def _named(times: EvaluationTimes) -> str:
    if times.kind == "watched":
        return "a watched iterable"
    persistent = times.settings.get("persistent_workers")
    return f"num_workers={times.workers}" + (f", persistent_workers={persistent}" if times.workers else "")


def _with_workers(times: EvaluationTimes) -> tuple[list[Advice], float | None]:
    """The advice to fetch in workers, by the model of a training step, and the seconds of all evaluations then."""
    cpu = None if times.cpu_ratio is None else times.cpu_ratio * times.seconds / times.batches
    evidence = Evidence(
        window_seconds=times.seconds,
        steps=times.batches,
        wait_seconds=times.wait_seconds + times.start_seconds,
        exposed_seconds=None,
        compute_seconds=times.compute_seconds,
        pace=RankPace(0, times.seconds, times.batches, times.compute_seconds, None, 0.0),
        source=times.kind,
        settings=times.settings,
        edges=times.evaluations,
        cores=times.cores,
        process_cpu_per_step_seconds=cpu,
    )
    found = [each for each in advise(_CAUSE_OF.get(times.kind, ""), evidence) if each.setting == "num_workers"]
    if not found:
        return [], None
    fetch, whole = (duration(seconds / times.batches) for seconds in (times.wait_seconds, times.seconds))
    because = f"the training thread fetches each of its batches: {fetch} of every {whole}"
    action = "load the evaluation's batches in workers of their own, and keep these (persistent_workers=True)"
    gain = found[0].predicted_speedup
    then = None if gain is None or cpu is None else times.seconds / gain
    return [structs.replace(found[0], action=action, because=because)], then


def _of_workers(times: EvaluationTimes) -> tuple[list[Advice], float | None]:
    """The advice for a loader that has workers: to keep them if they start anew, or to have more of them."""
    if not times.settings.get("persistent_workers") and times.start_seconds >= times.wait_seconds:
        started = duration(times.start_seconds / times.evaluations)
        action = "keep the workers of the evaluation's loader from one evaluation to the next"
        because = f"its {times.workers} workers start and end in each evaluation, which takes {started}"
        # A first batch is fetched then, too. A worker has fetched it at the latest when all have given one.
        interval = (times.seconds - times.start_seconds) / times.batches
        fetch = min(times.start_seconds, times.evaluations * times.workers * interval)
        known = fetch <= _FIRST_FETCH * times.start_seconds
        then = times.seconds - times.start_seconds + fetch / 2 if known else None
        return [Advice(action, "persistent_workers", "True", None, because)], then
    because = f"its {times.workers} workers give a batch every {duration(times.seconds / times.batches)}"
    more = str(2 * times.workers)
    return [Advice("use more workers for the evaluation's loader", "num_workers", more, None, because)], None
