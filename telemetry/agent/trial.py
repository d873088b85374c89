"""A trial of ``telemetry tune``, in its process: other loader settings, no checkpoints, a measured time, and the end.

Every DataLoader that the process makes gets the settings of the plan. When enough was measured, the training thread
ends the process with `os._exit` as it asks for its next batch, so that no file stays half written. Nothing of the
script runs after that: no last checkpoint, no upload, no ``finally`` block and no exit handler.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from concurrent.futures import Future
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import msgspec

from telemetry.model.records import LoaderSettings
from telemetry.model.totals import Conditions, Totals
from telemetry.safety.files import replace_file
from telemetry.seams.checkpoints import SAVING
from telemetry.seams.dataloader import before_each_batch
from telemetry.seams.patching import Patches, is_imported, unseen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from telemetry.model.totals import Tick
    from telemetry.node.endpoint import NodeService
    from telemetry.safety.errors import ErrorLog
    from telemetry.seams.tracker import StepTracker
    from telemetry.util.identity import Identity

# -- what passes between `telemetry tune` and a trial ------------------------------------------------------------------


class TrialPlan(msgspec.Struct, frozen=True):
    """What a trial shall do. ``telemetry tune`` puts it as JSON into the environment of a trial.

    Attributes:
        folder: for the results of its ranks.
        settings: arguments of DataLoader to change.
        warm_up_seconds: time after the first step that is not measured.
        seconds: training-loop seconds to measure. ``steps``: it also ends after so many measured steps.
        saves: whether the script writes checkpoints.
    """

    folder: str
    settings: LoaderSettings
    warm_up_seconds: float
    seconds: float
    steps: int | None = None
    saves: bool = False


_decode_plan: Final = msgspec.json.Decoder(TrialPlan).decode


class TrialResult(msgspec.Struct, frozen=True):
    """What one rank of a trial has measured.

    Attributes:
        steps: whole steps that were measured. ``seconds``: their time in the training loop.
        wait_ratio: share of the training loop that was exposed wait.
        settings: of the loader in use, as far as they are known; empty if no DataLoader gave the batches.
        iterated_at: file, line and function of the user's code that iterates it.
        one_worker_at_most: whether more workers would give the same items several times.
        on_gpu: whether an accelerator is in use.
        cores: cores that this rank may use.
        unsaved: how many checkpoints were not written.
        early: whether the script ended before enough was measured.
    """

    steps: int
    seconds: float
    wait_ratio: float
    settings: LoaderSettings
    iterated_at: tuple[str, int, str] | None
    one_worker_at_most: bool
    on_gpu: bool
    cores: float
    unsaved: int
    early: bool


def result_path(folder: str, rank: int) -> Path:
    """Where a rank writes its result."""
    return Path(folder) / f"rank-{rank}.json"


# -- one rank of a trial -----------------------------------------------------------------------------------------------

_MIN_STEPS: Final = 3
_EXTRA_WARM_UP: Final = 2
"""Steps that are not measured, in addition to those whose batches may already be ready."""

_WORKERS_ONLY: Final = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout", "in_order")
"""Arguments that a DataLoader without workers does not take."""

_SAVES: Final = {**SAVING, "torch.jit": ("save",)}
"""Functions that write a checkpoint, by module."""

_STATEFUL: Final = "torchdata.stateful_dataloader.stateful_dataloader"


class TrialRun:
    """One rank of a trial. Making it places the hooks, without importing anything of torch; they stay.

    Args:
        plan: a `TrialPlan` as JSON.
        identity: rank and size of the job.
        tracker, errors: parts of this process's agent.

    Raises:
        msgspec.MsgspecError: the plan cannot be read.
    """

    def __init__(self, plan: str, identity: Identity, tracker: StepTracker, errors: ErrorLog) -> None:
        self._plan = _decode_plan(plan)
        self._identity = identity
        self._tracker = tracker
        self._errors = errors
        self._first: Totals | None = None  # when the first step had ended
        self._start: Totals | None = None  # when the warm-up had ended
        self._newest = Totals()
        self._conditions = Conditions()  # the newest with a loader
        self._unsaved = 0
        self._written = False
        self._over = False  # then the training thread ends the process at its next fetch
        self._patches = Patches()
        watch = ImportWatch(functools.partial(errors.note, "trial"))
        watch.when_imported("torch.utils.data.dataloader", self._patch_loader)
        watch.when_imported(
            _STATEFUL, lambda module: self._patches.replace(module.StatefulDataLoader, "__init__", self._overridden)
        )
        for name in () if self._plan.saves else _SAVES:
            watch.when_imported(name, self._patch_saves)

    # -- the measurement, on the agent thread --

    def tick(self, tick: Tick, node: NodeService | None) -> None:
        """Follow the trial, and have it end when it is over. ``node``: this rank is then removed from it."""
        with self._errors.contained("trial"):
            if not self._written:
                self._follow(tick)
                if self._is_enough():
                    self._write(early=False)
            # The script goes on while other ranks measure, because they may wait for this one.
            ranks = range(self._identity.world_size)
            over = self._written and not self._over
            if over and all(result_path(self._plan.folder, rank).exists() for rank in ranks):
                if node is not None:
                    node.leave()
                self._over = True

    def script_ended(self, tick: Tick) -> None:
        """Keep what was measured so far, because the script has ended before the trial."""
        if not self._written:
            self._follow(tick)
            self._write(early=True)

    def _follow(self, tick: Tick) -> None:
        totals = self._newest = tick.totals
        if tick.conditions.settings:
            self._conditions = tick.conditions
        if self._first is None:
            self._first = totals if totals.steps else None
        elif self._start is None:
            settings = self._conditions.settings
            ahead = int(settings.get("num_workers") or 0) * int(settings.get("prefetch_factor") or 0)
            passed = totals.passed_since(self._first)
            if passed.seconds >= self._plan.warm_up_seconds and passed.steps >= ahead + _EXTRA_WARM_UP:
                self._start = totals

    def _is_enough(self) -> bool:
        if self._start is None:
            return False
        passed, steps = self._newest.passed_since(self._start), self._plan.steps
        in_time = passed.loop_seconds >= self._plan.seconds and passed.steps >= _MIN_STEPS
        return in_time or (steps is not None and passed.steps >= steps)

    def _write(self, *, early: bool) -> None:
        first = self._start or self._first or self._newest
        passed, conditions = self._newest.passed_since(first), self._conditions
        exposed = passed.exposed_after_first_seconds
        waited = passed.wait_seconds if exposed is None else exposed
        result = TrialResult(
            steps=passed.steps,
            seconds=passed.loop_seconds + first.open_step_seconds - self._newest.open_step_seconds,
            wait_ratio=waited / passed.loop_seconds if passed.loop_seconds > 0 else 0.0,
            settings=conditions.settings,
            iterated_at=conditions.iterated_at,
            one_worker_at_most=conditions.traits.asks_for_its_worker is False,  # None without an IterableDataset
            on_gpu=conditions.on_gpu,
            cores=conditions.cores,
            unsaved=self._unsaved,
            early=early,
        )
        replace_file(result_path(self._plan.folder, self._identity.rank), msgspec.json.encode(result))
        self._written = True

    # -- the hooks, on the training thread --

    def _patch_loader(self, module: Any) -> None:
        self._patches.replace(module.DataLoader, "__init__", self._overridden)
        before_each_batch(module, self._end_if_over, self._patches, self._tracker.fault)

    def _end_if_over(self, _iterator: object) -> None:
        if self._over and get_ident() == self._tracker.thread:
            os._exit(0)

    def _overridden(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        @unseen
        def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807
            arguments = {**signature.bind(*args, **kwargs).arguments, **self._plan.settings}
            if not arguments.get("num_workers"):
                for name in _WORKERS_ONLY:
                    arguments.pop(name, None)
            original(**arguments)

        return __init__

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
            self._unsaved += 1
            if original.__name__ != "async_save":
                return None
            complete: Future[None] = Future()
            complete.set_result(None)
            return complete

        return save


# -- calls a function when a module has been imported, without importing it --------------------------------------------
# The settings must be there before the first loader is made. So a trial, and no other run, has an import hook.


class ImportWatch(MetaPathFinder):
    """Calls back once for each watched module: now if it is already imported, else when it has been imported.

    It is in ``sys.meta_path`` only while it waits for a module.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._waiting: dict[str, Callable[[ModuleType], None]] = {}
        self._on_error = on_error
        self._searching: set[str] = set()

    def when_imported(self, name: str, then: Callable[[ModuleType], None]) -> None:
        """Call ``then(module)``. An exception in it goes to ``on_error`` and does not fail the import."""
        if is_imported(name):
            self._call(then, sys.modules[name])
            return
        self._waiting[name] = then
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def close(self) -> None:
        """Stop watching."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec for a watched module, with a loader that calls back; else None."""
        del path, target
        if fullname not in self._waiting or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        except (ImportError, AttributeError, ValueError):
            return None  # the other finders will raise the reason
        finally:
            self._searching.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        # It stays watched: a caller that asks for a spec may not import the module.
        spec.loader = _Announcing(spec.loader, lambda module: self._imported(fullname, module))
        return spec

    def _imported(self, name: str, module: ModuleType) -> None:
        then = self._waiting.pop(name, None)
        if then is not None:
            self._call(then, module)
        if not self._waiting:
            self.close()

    def _call(self, then: Callable[[ModuleType], None], module: ModuleType) -> None:
        try:
            then(module)
        except Exception as error:
            self._on_error(error)


class _Announcing(Loader):
    """The real loader, with a call after the import. It removes itself before the module's code runs."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)
