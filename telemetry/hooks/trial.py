"""Hooks for a trial of ``telemetry tune``: they change the settings of DataLoaders, and skip checkpoints.

Only a trial loads them. They stay until the process ends, even if the agent stops before.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from threading import get_ident
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, field

from telemetry.hooks.checkpoints import SAVING
from telemetry.hooks.patching import ImportWatch, Patches, WeakMap, unseen
from telemetry.hooks.ring import S_EVALUATION
from telemetry.util.clock import NS, now_ns
from telemetry.util.stacks import is_library, own_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, ModuleType

    from telemetry.hooks.tracker import StepTracker
    from telemetry.util.errors import ErrorLog
    from telemetry.util.stacks import Stack

LOADER_SETTINGS: Final = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "multiprocessing_context",
    "in_order",
)
"""The arguments of DataLoader that a trial can override."""

SHARING: Final = "sharing_strategy"
"""A setting of torch.multiprocessing, not an argument of DataLoader. It holds for all loaders of the process."""

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
_HOST: Final = frozenset({"cpu", "meta"})
_ON_A_DEVICE: Final = {
    "num_workers": "its batches are tensors on a device, which worker processes cannot make",
    "pin_memory": "its batches are on a device already, and only memory of the host can be pinned",
}


class TrialPlan(Struct, frozen=True):
    """What a trial shall do. ``telemetry tune`` writes it, and the training process reads it.

    Attributes:
        folder: the folder of this trial, for its outcome and its temporary files.
        seconds: training-loop seconds to measure. ``steps``: the trial also ends after so many measured steps.
        warm_up_seconds: time after the first step that is not measured.
        start_seconds: maximum time until the first step has ended. ``max_seconds``: maximum time after that.
        loaders: for each place of a DataLoader, the settings to change.
        sharing_strategy: the sharing strategy to set; None to leave it.
    """

    folder: str
    seconds: float
    steps: int | None = None
    warm_up_seconds: float = 3.0
    start_seconds: float = 600.0
    max_seconds: float = 120.0
    loaders: dict[str, dict[str, Any]] = field(default_factory=dict)
    sharing_strategy: str | None = None
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
        watch.when_imported(_STATEFUL, lambda module: self._patch_constructor(module.StatefulDataLoader))
        if not plan.saves:
            for name in _SAVES.keys() - {"torch"}:
                watch.when_imported(name, self._patch_saves)

    def _patch_torch(self, torch: ModuleType) -> None:
        if not self._plan.saves:
            self._patch_saves(torch)
        dataloader: Any = sys.modules["torch.utils.data.dataloader"]
        self._patch_constructor(dataloader.DataLoader)
        self._patches.replace(dataloader._BaseDataLoaderIter, "__init__", self._noted)
        self._patches.replace(dataloader._BaseDataLoaderIter, "__next__", self._counted)
        if self._plan.sharing_strategy is not None:
            multiprocessing: Any = sys.modules["torch.multiprocessing"]
            multiprocessing.set_sharing_strategy(self._plan.sharing_strategy)

    def _patch_constructor(self, kind: type) -> None:
        self._patches.replace(kind, "__init__", self._overridden)

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
        """The facts of the place where a loader is being made.

        A library such as accelerate makes a new loader from the script's. That one belongs to the script's place.

        Args:
            frame: the frame that calls the constructor.
            dataset: the loader's data set.
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

    def _noted(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        @unseen
        def __init__(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(iterator, loader, *args, **kwargs)
            facts = self._of_loader.get(loader)
            if facts is not None:
                self._of_iterator[iterator] = facts

        return __init__

    def _counted(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        @unseen
        def __next__(iterator: Any) -> Any:  # noqa: N807
            if self.over and get_ident() == self._tracker.thread:
                os._exit(0)  # between two steps, when a script does not write a file
            start = now_ns()
            batch = original(iterator)
            facts = self._of_iterator.get(iterator)
            if facts is not None:
                self._count(facts, (now_ns() - start) / NS, batch)
            return batch

        return __next__

    def _count(self, facts: LoaderFacts, seconds: float, batch: object) -> None:
        if self._tracker.category == S_EVALUATION:
            facts.evaluation_batches += 1
            return
        facts.batches += 1
        facts.wait_seconds += seconds
        if facts.batches <= _MEASURED_BATCHES:
            parts = list(_parts([batch]))
            facts.batch_bytes = max(facts.batch_bytes, sum(getattr(part, "nbytes", 0) for part in parts))
            devices = {getattr(getattr(part, "device", None), "type", "cpu") for part in parts}
            if not facts.applied.get("num_workers") and not devices <= _HOST:
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
        if not several and not _asks_for_its_worker(type(dataset)):
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
    """Whether the batches come in random order. A sampler of the user's own may have a reason for its order."""
    if arguments.get("batch_sampler") is not None:
        return False
    sampler = arguments.get("sampler")
    if sampler is None:
        return bool(arguments.get("shuffle"))
    name = type(sampler).__name__
    return "Random" in name or (name == "DistributedSampler" and bool(getattr(sampler, "shuffle", False)))


def _asks_for_its_worker(kind: type) -> bool:
    """Whether a data set divides its items among the workers: one of its functions uses the name get_worker_info."""
    values = [value for base in kind.__mro__ for value in vars(base).values()]
    return any("get_worker_info" in names for value in values for names in _names(getattr(value, "__code__", None)))


def _names(code: object) -> Iterator[tuple[str, ...]]:
    if isinstance(code, CodeType):
        yield code.co_names
        for constant in code.co_consts:
            yield from _names(constant)
