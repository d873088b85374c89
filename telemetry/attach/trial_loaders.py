"""Overrides the settings of DataLoaders in a trial, and counts what each loader gives.

Nothing of this is loaded in a run that is no trial.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.loader_places import LoaderPlaces
from telemetry.attach.loader_safety import refused, refused_batch, tensor_bytes
from telemetry.core.trial_records import LOADER_SETTINGS
from telemetry.hooks.patching import WeakMap, unseen
from telemetry.hooks.ring import S_EVALUATION
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from telemetry.core.trial_records import LoaderFacts, TrialPlan
    from telemetry.hooks.patching import Patches
    from telemetry.hooks.tracker import StepTracker

_WORKERS_ONLY: Final = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout", "in_order")
"""Arguments that a DataLoader without workers does not take."""

_MEASURED_BATCHES: Final = 8


class TrialLoaders:
    """The DataLoaders of a trial.

    Args:
        plan: the settings to override.
        tracker: knows whether a batch is for an evaluation.

    Attributes:
        places: where loaders were made.
        over: set by the agent thread when the trial is over. The training thread's next fetch then ends the process.
    """

    def __init__(self, plan: TrialPlan, tracker: StepTracker) -> None:
        self._plan = plan
        self._tracker = tracker
        self.places = LoaderPlaces()
        self.over = False
        self._of_loader: WeakMap[LoaderFacts] = WeakMap()
        self._of_iterator: WeakMap[LoaderFacts] = WeakMap()

    def patch_torch(self, dataloader: ModuleType, patches: Patches) -> None:
        """Patch ``torch.utils.data.dataloader``."""
        base: Any = dataloader._BaseDataLoaderIter
        self.patch_class(dataloader.DataLoader, patches)
        patches.replace(base, "__init__", self._noted)
        patches.replace(base, "__next__", self._counted)
        if self._plan.sharing_strategy is not None:
            multiprocessing: Any = sys.modules["torch.multiprocessing"]
            multiprocessing.set_sharing_strategy(self._plan.sharing_strategy)

    def patch_class(self, kind: type, patches: Patches) -> None:
        """Patch a class of loaders with a constructor of its own."""
        patches.replace(kind, "__init__", self._overridden)

    def _overridden(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        @unseen
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            try:
                arguments = dict(signature.bind_partial(loader, *args, **kwargs).arguments)
            except TypeError:
                return original(loader, *args, **kwargs)  # raises as without us
            named = list(arguments)[1:]  # without the loader itself
            facts = self.places.facts_of(sys._getframe(1), arguments.get("dataset"))
            given = {name: arguments[name] for name in named}
            arguments = with_settings(given, self._plan.loaders.get(facts.place, {}), set(signature.parameters))
            original(loader, **arguments)
            try:
                self._made(loader, facts, given)
            except Exception as error:
                self._tracker.fault(error)
            return None

        return __init__

    def _made(self, loader: Any, facts: LoaderFacts, given: Mapping[str, Any]) -> None:
        facts.loaders += 1
        facts.applied = settings_of(loader)
        if not facts.settings:
            facts.settings = facts.applied | _plain(given)
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
                os._exit(0)  # between two steps, where a script is not writing a file
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
            facts.batch_bytes = max(facts.batch_bytes, tensor_bytes(batch))
            if not facts.applied.get("num_workers") and (reasons := refused_batch(batch)):
                facts.refused |= reasons
                facts.max_workers = 0


def with_settings(given: Mapping[str, Any], wanted: Mapping[str, Any], allowed: set[str]) -> dict[str, Any]:
    """The arguments of a DataLoader with other settings, without those that do not go with them."""
    if not wanted:
        return dict(given)
    arguments = dict(given) | {name: value for name, value in wanted.items() if name in allowed}
    if not arguments.get("num_workers"):
        for name in _WORKERS_ONLY:
            arguments.pop(name, None)
    return arguments


def settings_of(loader: Any) -> dict[str, Any]:
    """The settings of a loader, as plain values. Those that this version of torch does not have are left out."""
    values = {name: getattr(loader, name) for name in LOADER_SETTINGS if hasattr(loader, name)}
    return _plain(values)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in values.items() if name in LOADER_SETTINGS}
    context = plain.get("multiprocessing_context")
    if context is not None and not isinstance(context, str):
        plain["multiprocessing_context"] = context.get_start_method()
    return plain
