"""A trial of ``telemetry tune``, in its process: other loader settings, no checkpoints, a measured time, and the end.

`TrialHooks` give DataLoaders other settings and skip checkpoints. They stay until the process ends. `TrialRun` leaves
out the warm-up, measures, and ends the process with `os._exit`. So nothing of the script runs after that: no last
checkpoint, no upload, no ``finally`` block and no exit handler. The training thread does it when it asks for its next
batch, so that no file stays half written. If it does not ask for one soon, the agent thread does it.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct, field

from telemetry.diagnosis.evidence import Evidence, aggregate
from telemetry.hooks.checkpoints import SAVING
from telemetry.hooks.device import HOST, device_in_use
from telemetry.hooks.loaders import asks_for_its_worker, is_random
from telemetry.hooks.patching import FAILED, ImportWatch, Patches, WeakMap, unseen
from telemetry.hooks.ring import S_EVALUATION
from telemetry.util.clock import NS, monotonic, now_ns
from telemetry.util.files import replace_file
from telemetry.util.stacks import is_library, own_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, ModuleType

    from telemetry.agent.accounting import Accounting
    from telemetry.hooks.tracker import StepTracker
    from telemetry.node.endpoint import NodeService
    from telemetry.totals import Tick
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity
    from telemetry.util.stacks import Stack

# -- what passes between `telemetry tune` and a trial ------------------------------------------------------------------

LOADER_SETTINGS: Final = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "multiprocessing_context",
    "in_order",
)
"""The arguments of DataLoader that a trial can override."""

ENDED_STEPS: Final = "measured"
ENDED_SCRIPT: Final = "script ended"
ENDED_LATE: Final = "time was over"


class TrialPlan(Struct, frozen=True):
    """What a trial shall do. ``telemetry tune`` writes it, and the training process reads it.

    Attributes:
        folder: for its outcome and its temporary files.
        seconds: training-loop seconds to measure. ``steps``: the trial also ends after so many measured steps.
        warm_up_seconds: time after the first step that is not measured.
        start_seconds: maximum time until the first step has ended. ``max_seconds``: maximum time after that.
        loaders: for each place of a DataLoader, the settings to change.
        saves: whether the script writes checkpoints.
    """

    folder: str
    seconds: float
    steps: int | None = None
    warm_up_seconds: float = 3.0
    start_seconds: float = 600.0
    max_seconds: float = 120.0
    loaders: dict[str, dict[str, Any]] = field(default_factory=dict)
    saves: bool = False


class LoaderFacts(Struct):
    """One place in the code where DataLoaders are made, and what they did in a trial.

    Attributes:
        place: file and line of the call, and of its callers if one line makes several loaders.
        file, line: where the call is.
        library: the package that made the loader; None if the script did.
        applied: its settings in this trial.
        refused: settings that must not be changed, with the reason.
        max_workers: how many workers it can have at most, if ``num_workers`` is refused.
        batches, evaluation_batches: batches given. ``wait_seconds``: waits for the training batches.
        batch_bytes: bytes of the tensors in the largest of the first batches.
    """

    place: str
    file: str
    line: int
    library: str | None = None
    applied: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    max_workers: int = 0
    batches: int = 0
    evaluation_batches: int = 0
    wait_seconds: float = 0.0
    batch_bytes: int = 0

    @property
    def trains(self) -> bool:
        """Whether most of its batches were for training."""
        return self.batches > self.evaluation_batches


class TrialOutcome(Struct, frozen=True):
    """What one rank of a trial has measured. The training process writes it, and ``telemetry tune`` reads it.

    Attributes:
        end: why the measurement ended, one of ``ENDED_…``.
        warm: whether the warm-up was left out.
        device: type of the device that trained; None for the CPU.
        saves: how many checkpoints were not written. ``hook_errors``: how many hooks failed.
        steps: whole steps that were measured. ``seconds``: their time in the training loop.
        evidence: that of the measured time; None without a step.
    """

    pid: int = 0
    end: str = ""
    warm: bool = False
    device: str | None = None
    loaders: list[LoaderFacts] = field(default_factory=list)
    saves: int = 0
    hook_errors: int = 0
    steps: int = 0
    seconds: float = 0.0
    evidence: Evidence | None = None


def outcome_path(folder: str, rank: int) -> Path:
    """Where a rank writes its outcome."""
    return Path(folder) / f"outcome-{rank}.json"


# -- the hooks ---------------------------------------------------------------------------------------------------------

_WORKERS_ONLY: Final = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout", "in_order")
"""Arguments that a DataLoader without workers does not take."""

_SAVES: Final = {**SAVING, "torch.jit": ("save",)}
"""Functions that write a checkpoint, by module."""

_STATEFUL: Final = "torchdata.stateful_dataloader.stateful_dataloader"
_TORCH: Final = ("torch.utils.data", "torchdata.stateful_dataloader")
"""A subclass's constructor may pass through these modules."""

_CALLERS: Final = 3
"""If one function makes several loaders on one line, this many of its callers belong to the place."""

_MEASURED_BATCHES: Final = 8
_MAX_PARTS: Final = 64
_MAX_DEPTH: Final = 3
_ON_A_DEVICE: Final = {
    "num_workers": "its batches are tensors on a device, which worker processes cannot make",
    "pin_memory": "its batches are on a device already, and only memory of the host can be pinned",
}


class TrialHooks:
    """The hooks of a trial. Making the object places them, without importing anything of torch.

    Args:
        plan: what the trial shall do.
        tracker: the state of the training thread.
        errors: gets failures to place a hook.

    Attributes:
        loaders: each place that makes DataLoaders, in the order in which they were first seen.
        saves: how many checkpoints were not written.
        over: set by the agent thread when the trial is over. The training thread's next fetch then ends the process.
    """

    def __init__(self, plan: TrialPlan, tracker: StepTracker, errors: ErrorLog) -> None:
        self.loaders: dict[str, LoaderFacts] = {}
        self.saves = 0
        self.over = False
        self._plan = plan
        self._tracker = tracker
        self._patches = Patches()
        self._of_loader: WeakMap[LoaderFacts] = WeakMap()
        self._of_iterator: WeakMap[LoaderFacts] = WeakMap()
        self._of_dataset: dict[int, tuple[weakref.ref[Any], LoaderFacts]] = {}
        watch = ImportWatch(functools.partial(errors.note, "trial"))
        watch.when_imported("torch", self._patch_torch)
        watch.when_imported(
            _STATEFUL, lambda module: self._patches.replace(module.StatefulDataLoader, "__init__", self._overridden)
        )
        if not plan.saves:
            for name in _SAVES.keys() - {"torch"}:
                watch.when_imported(name, self._patch_saves)

    def _patch_torch(self, torch: ModuleType) -> None:
        if not self._plan.saves:
            self._patch_saves(torch)
        dataloader: Any = sys.modules["torch.utils.data.dataloader"]
        iterator, on_error = dataloader._BaseDataLoaderIter, self._tracker.fault
        self._patches.replace(dataloader.DataLoader, "__init__", self._overridden)
        self._patches.around(iterator, "__init__", after=self._iterates, on_error=on_error)
        self._patches.around(iterator, "__next__", before=self._requested, after=self._came, on_error=on_error)

    def _patch_saves(self, module: ModuleType) -> None:
        for name in _SAVES[module.__name__]:
            if callable(vars(module).get(name)):
                self._patches.replace(module, name, self._not_saved)

    def _not_saved(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        @unseen
        def save(*args: Any, **kwargs: Any) -> Any:
            # An open file or a buffer gets what is saved: an empty one would replace a checkpoint, or be loaded again.
            if hasattr(args[1] if len(args) > 1 else kwargs.get("f"), "write"):
                return original(*args, **kwargs)
            self.saves += 1
            if original.__name__ != "async_save":
                return None
            complete: Future[None] = Future()
            complete.set_result(None)
            return complete

        return save

    def _overridden(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        @unseen
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            try:
                arguments = dict(signature.bind_partial(loader, *args, **kwargs).arguments)
            except TypeError:
                return original(loader, *args, **kwargs)  # raises as it does without us
            given = {name: arguments[name] for name in list(arguments)[1:]}  # without the loader itself
            facts = self._facts_of(sys._getframe(1), arguments.get("dataset"))
            wanted = self._plan.loaders.get(facts.place, {})
            original(loader, **with_settings(given, wanted, signature.parameters.keys()))
            try:
                self._made(loader, facts, given)
            except Exception as error:
                self._tracker.fault(error)
            return None

        return __init__

    def _facts_of(self, frame: FrameType | None, dataset: object) -> LoaderFacts:
        """The facts of the place where a loader is being made: the stack of ``frame``.

        A library such as accelerate makes a new loader from the script's. That one belongs to the script's place.
        """
        stack = own_stack(frame)
        library = _library(stack)
        known = self._of_dataset.get(id(dataset))
        if library is not None and known is not None and known[0]() is dataset:
            return known[1]
        users = [spot for spot in stack if not is_library(spot.file)][: 1 + _CALLERS] or list(stack[:1])
        place = " from ".join(f"{os.path.abspath(spot.file)}:{spot.line}" for spot in users)  # noqa: PTH100 - text
        facts = self.loaders.get(place)
        if facts is None:
            file, line = (users[0].file, users[0].line) if users else ("", 0)
            facts = self.loaders[place] = LoaderFacts(place, file, line, library)
        try:
            self._of_dataset[id(dataset)] = weakref.ref(dataset), facts
        except TypeError:  # a list, for example
            pass
        return facts

    def _made(self, loader: Any, facts: LoaderFacts, given: Mapping[str, Any]) -> None:
        first, facts.applied = not facts.applied, _settings_of(loader)
        if first:
            reasons, facts.max_workers = refused(given)
            facts.refused |= reasons
            if "in_order" not in facts.applied:
                facts.refused["in_order"] = "this version of torch does not have it"
        self._of_loader[loader] = facts

    def _iterates(self, _noted: None, result: object, iterator: Any, loader: Any, *_: Any, **__: Any) -> None:
        facts = self._of_loader.get(loader)
        if facts is not None and result is not FAILED:
            self._of_iterator[iterator] = facts

    def _requested(self, _iterator: Any) -> int:
        if self.over and get_ident() == self._tracker.thread:
            os._exit(0)  # between two steps, when a script does not write a file
        return now_ns()

    def _came(self, start: int | None, batch: object, iterator: Any) -> None:
        facts, now = self._of_iterator.get(iterator), now_ns()
        if facts is None or start is None or batch is FAILED:
            return
        if self._tracker.category == S_EVALUATION:
            facts.evaluation_batches += 1
            return
        facts.batches += 1
        facts.wait_seconds += (now - start) / NS
        if facts.batches <= _MEASURED_BATCHES:
            parts = list(_parts([batch]))
            facts.batch_bytes = max(facts.batch_bytes, sum(getattr(part, "nbytes", 0) for part in parts))
            devices = {getattr(getattr(part, "device", None), "type", "cpu") for part in parts}
            if not facts.applied.get("num_workers") and not devices <= HOST:
                facts.refused |= _ON_A_DEVICE
                facts.max_workers = 0


def with_settings(given: Mapping[str, Any], wanted: Mapping[str, Any], allowed: Iterable[str]) -> dict[str, Any]:
    """A DataLoader's arguments with changed settings, without arguments that contradict these."""
    if not wanted:
        return dict(given)
    arguments = {**given, **{name: wanted[name] for name in wanted.keys() & set(allowed)}}
    if not arguments.get("num_workers"):
        for name in _WORKERS_ONLY:
            arguments.pop(name, None)
    return arguments


def _settings_of(loader: Any) -> dict[str, Any]:
    """The loader's settings as plain values. Settings that this version of torch does not have are left out."""
    found = {name: getattr(loader, name) for name in LOADER_SETTINGS if hasattr(loader, name)}
    if found["multiprocessing_context"] is not None:
        found["multiprocessing_context"] = found["multiprocessing_context"].get_start_method()
    return found


def _library(stack: Stack) -> str | None:
    """The package that calls the constructor; None if it is the user's code."""
    caller = next((spot for spot in stack if not spot.module.startswith(_TORCH)), None)
    return caller.module.partition(".")[0] if caller is not None and is_library(caller.file) else None


# -- settings that must not be changed ---------------------------------------------------------------------------------
# Some settings change what a loader gives, or break it. The data set and the sampler show some of that here. The rest
# shows when a trial fails.


def refused(arguments: Mapping[str, Any]) -> tuple[dict[str, str], int]:
    """Settings that must not be changed, each with its reason, and the safe number of workers if that is limited.

    Args:
        arguments: arguments of the DataLoader call, by name.
    """
    found: dict[str, str] = {}
    max_workers = 0
    dataset = arguments.get("dataset")
    iterable: Any = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", ())
    if isinstance(dataset, iterable):
        several = int(arguments.get("num_workers") or 0) > 1  # then the script handles several workers
        if not several and not asks_for_its_worker(type(dataset)):
            max_workers = 1
            found["num_workers"] = (
                "the IterableDataset does not call get_worker_info(), so each of several workers would give all items"
            )
        found["in_order"] = "the order of an IterableDataset is its own"
    elif not _is_shuffled(arguments):
        found["in_order"] = "the loader does not shuffle, so the order may matter"
    if callable(getattr(type(dataset), "set_epoch", None)):
        found["persistent_workers"] = "the data set has set_epoch(), which workers that are kept would not see"
    return found, max_workers


def _parts(values: Iterable[object], depth: int = 0) -> Iterator[object]:
    for value, _ in zip(values, range(_MAX_PARTS)):  # noqa: B905 - the first few
        if not isinstance(value, (Mapping, list, tuple)):
            yield value
        elif depth < _MAX_DEPTH:
            yield from _parts(value.values() if isinstance(value, Mapping) else value, depth + 1)


def _is_shuffled(arguments: Mapping[str, Any]) -> bool:
    """Whether the batches come in random order."""
    if arguments.get("batch_sampler") is not None:
        return False
    sampler = arguments.get("sampler")
    return bool(arguments.get("shuffle")) if sampler is None else is_random(sampler)


# -- the measurement ---------------------------------------------------------------------------------------------------

_MIN_STEPS: Final = 3
_EXTRA_WARM_UP: Final = 2
"""Steps that are not measured, in addition to those whose batches may already be ready."""

_MAX_WARM_UP_SHARE: Final = 0.25
"""The warm-up takes at most this share of the maximum time."""

_OTHERS_SECONDS: Final = 20.0
"""How long to wait for the other ranks at the end."""

_NEXT_FETCH_SECONDS: Final = 5.0
"""How long to wait for the training thread's next fetch at the end."""


class TrialRun:
    """One rank of a trial. Making it places the hooks. After that the agent thread uses it.

    Args:
        path: the file of the plan.
        identity: rank and size of the job.
        tracker, accounting, errors: parts of this process's agent.

    Raises:
        OSError, msgspec.MsgspecError: the plan cannot be read.
    """

    def __init__(
        self, path: str, identity: Identity, tracker: StepTracker, accounting: Accounting, errors: ErrorLog
    ) -> None:
        self._plan = msgspec.json.decode(Path(path).read_bytes(), type=TrialPlan)
        self._identity = identity
        self._tracker = tracker
        self._accounting = accounting
        self._errors = errors
        self._hooks = TrialHooks(self._plan, tracker, errors)
        self._began = monotonic()
        self._first: float | None = None  # when the first step ended
        self._warm = False
        self._ticks: list[Tick] = []  # the measured ticks
        self._open_before = 0.0  # seconds of the open step at the first of them
        self._measured: float | None = None  # when the outcome was written
        self._asked: float | None = None  # when the training thread was asked to end the process

    def tick(self, tick: Tick, node: NodeService | None) -> None:
        """Follow the trial, and end the process when it is over. ``node``: this rank is then removed from it."""
        with self._errors.contained("trial"):
            if self._measured is None and (end := self._follow(tick)):
                self._finish(end)
            if self._measured is None:
                return
            # The script goes on while other ranks measure, because they may wait for this one.
            if not self._others_are_done() and monotonic() - self._measured < _OTHERS_SECONDS:
                return
            if self._asked is None:
                self._asked = monotonic()
                if node is not None:
                    node.leave()
                self._hooks.over = True
        if self._measured is not None:
            asked = self._measured + _OTHERS_SECONDS if self._asked is None else self._asked  # None: asking failed
            if self._first is None or monotonic() - asked >= _NEXT_FETCH_SECONDS:  # None: it never fetched a batch
                os._exit(0)

    def script_ended(self, tick: Tick) -> None:
        """Keep what was measured so far, because the script has ended before the trial."""
        if self._measured is None:
            if self._first is not None:
                self._ticks.append(tick)
            self._finish(ENDED_SCRIPT)

    def _follow(self, tick: Tick) -> str:
        """Why the measurement ends now; empty if it goes on."""
        now, plan = monotonic(), self._plan
        if self._first is None:
            if tick.totals.steps:
                self._first = now
                self._restart(tick)
                return ""
            return ENDED_LATE if now - self._began > plan.start_seconds else ""
        self._ticks.append(tick)
        if not self._warm:
            if self._is_warm(now - self._first, tick.totals.steps):
                self._warm = True
                self._restart(tick)
            return ""
        steps, seconds = self._passed()
        if (plan.steps is not None and steps >= plan.steps) or (seconds >= plan.seconds and steps >= _MIN_STEPS):
            return ENDED_STEPS
        return ENDED_LATE if now - self._first > plan.max_seconds else ""

    def _restart(self, tick: Tick) -> None:
        self._ticks = [tick]
        self._open_before = self._accounting.ledger.open_step_seconds

    def _is_warm(self, seconds: float, steps: int) -> bool:
        applied = [facts.applied for facts in list(self._hooks.loaders.values()) if facts.trains]
        ahead = sum(int(one.get("num_workers") or 0) * int(one.get("prefetch_factor") or 0) for one in applied)
        enough = seconds >= self._plan.warm_up_seconds and steps >= ahead + _EXTRA_WARM_UP
        return enough or seconds >= self._plan.max_seconds * _MAX_WARM_UP_SHARE

    def _passed(self) -> tuple[int, float]:
        first, last = self._ticks[0].totals, self._ticks[-1].totals
        seconds = last.loop_seconds - first.loop_seconds
        return last.steps - first.steps, seconds + self._open_before - self._accounting.ledger.open_step_seconds

    def _others_are_done(self) -> bool:
        ranks = range(self._identity.world_size)
        return all(outcome_path(self._plan.folder, rank).exists() for rank in ranks)

    def _finish(self, end: str) -> None:
        self._measured = monotonic()
        identity, tracker = self._identity, self._tracker
        measured = len(self._ticks) > 1
        steps, seconds = self._passed() if measured else (0, 0.0)
        outcome = TrialOutcome(
            pid=identity.pid,
            end=end,
            warm=self._warm,
            device=device_in_use(tracker.trained_on),
            loaders=list(self._hooks.loaders.values()),
            saves=self._hooks.saves,
            hook_errors=tracker.errors,
            steps=steps,
            seconds=seconds,
            evidence=aggregate(self._ticks, rank=identity.rank) if measured else None,
        )
        replace_file(outcome_path(self._plan.folder, identity.rank), msgspec.json.encode(outcome))
