"""Every hook of a trial, placed before the script begins. They stay until the process ends, even if the agent stops."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from telemetry.attach.trial_files import SAVES, TrialFiles
from telemetry.attach.trial_guard import FileGuard
from telemetry.attach.trial_loaders import TrialLoaders
from telemetry.hooks.patching import ImportWatch, Patches

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from telemetry.core.trial_records import TrialPlan
    from telemetry.hooks.tracker import StepTracker


class TrialAttachment:
    """The hooks of a trial.

    Args:
        plan: what the trial shall do.
        tracker: state of the training thread.
        on_error: called if a hook in torch cannot be placed.

    Attributes:
        loaders: the DataLoaders of the trial. ``files``: the files that the script wrote to; None without protection.
    """

    def __init__(self, plan: TrialPlan, tracker: StepTracker, on_error: Callable[[BaseException], None]) -> None:
        self._plan = plan
        self._patches = Patches()
        self._watch = ImportWatch(on_error)
        self.loaders = TrialLoaders(plan, tracker)
        self.files: TrialFiles | None = None

    def attach(self) -> None:
        """Place the hooks. Imports nothing of torch.

        Raises:
            OSError: the trial's folder cannot be used.
        """
        if self._plan.protect:
            shadow = Path(self._plan.folder) / "files"
            shadow.mkdir(exist_ok=True)
            guard = FileGuard((self._plan.folder, *self._plan.writable))
            self.files = TrialFiles(guard, str(shadow))
            self.files.patch_python(self._patches)
            guard.install()
        self._watch.when_imported("torch", self._torch)
        stateful = "torchdata.stateful_dataloader.stateful_dataloader"
        self._watch.when_imported(stateful, lambda m: self.loaders.patch_class(m.StatefulDataLoader, self._patches))
        for name in SAVES:
            if not name.startswith("torch") or name.startswith("torch.distributed"):
                self._watch.when_imported(name, self._saving)

    def _torch(self, torch: ModuleType) -> None:
        for module in (torch, sys.modules["torch.serialization"], sys.modules.get("torch.jit")):
            if module is not None:
                self._saving(module)
        self.loaders.patch_torch(sys.modules["torch.utils.data.dataloader"], self._patches)

    def _saving(self, module: ModuleType) -> None:
        if self.files is not None:
            self.files.patch_saving(module, self._patches)
