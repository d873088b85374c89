"""What ``telemetry tune`` and the training process of a trial tell each other, through small files.

A trial is a short run of a script with other DataLoader settings. The plan goes into the process, the outcome comes
back.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry.util.files import dump_object, parse_object, replace_file

if TYPE_CHECKING:
    import os

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
"""Of torch.multiprocessing. It is not an argument of DataLoader, and holds for all loaders of the process."""

ENDED_STEPS: Final = "measured"
ENDED_SCRIPT: Final = "script ended"
ENDED_LATE: Final = "time was over"


class TrialError(Exception):
    """A plan or an outcome cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """What a trial shall do.

    Attributes:
        folder: the folder of this trial, for its outcome and its temporary files.
        seconds: training-loop seconds to measure. ``steps``: the trial also ends after so many measured steps.
        warm_up_seconds: time after the first step that is not measured.
        start_seconds: maximum time until the first step has ended. ``max_seconds``: maximum time after that.
        loaders: for each place of a DataLoader, the settings to override.
        sharing_strategy: the sharing strategy to set; None to leave it.
        protect: whether existing files are protected. ``writable``: files and folders that the script may change.
    """

    folder: str
    seconds: float
    steps: int | None = None
    warm_up_seconds: float = 3.0
    start_seconds: float = 600.0
    max_seconds: float = 120.0
    loaders: dict[str, dict[str, Any]] = field(default_factory=dict)
    sharing_strategy: str | None = None
    protect: bool = True
    writable: tuple[str, ...] = ()

    def write(self) -> Path:
        """Write the plan into the trial's folder. Returns the path of the file.

        Raises:
            OSError: it cannot be written.
        """
        path = Path(self.folder) / "plan.json"
        replace_file(path, dump_object(asdict(self)))
        return path


def read_plan(path: str) -> TrialPlan:
    """Read a plan.

    Raises:
        TrialError: it cannot be read.
    """
    try:
        found = parse_object(Path(path).read_bytes())
        if found is None:
            raise TrialError(f"{path} has no plan of a trial")
        return TrialPlan(**(found | {"writable": tuple(found["writable"])}))
    except (OSError, KeyError, TypeError) as error:
        raise TrialError(f"the plan of this trial cannot be read: {error}") from None


@dataclass(slots=True)
class LoaderFacts:
    """One place in the code where DataLoaders are made, and what they did in a trial.

    Attributes:
        place: file and line of the call, and of its callers if several loaders are made by one line.
        file, line: of the call.
        library: the package that made the loader; None if the script did.
        settings: as the script gave them. ``applied``: as the trial ran.
        refused: settings that must not be changed, with the reason. ``max_workers``: if ``num_workers`` is one of them:
            the most workers that it can have.
        batches, evaluation_batches: batches given. ``wait_seconds``: of the former.
        batch_bytes: bytes of the tensors in the largest of the first batches.
        loaders: how many loaders were made here.
    """

    place: str
    file: str
    line: int
    library: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    applied: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    max_workers: int = 0
    batches: int = 0
    evaluation_batches: int = 0
    wait_seconds: float = 0.0
    batch_bytes: int = 0
    loaders: int = 0

    @property
    def trains(self) -> bool:
        """Whether most of its batches were for training."""
        return self.batches > self.evaluation_batches


def outcome_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """The file of one rank's outcome."""
    return Path(folder) / f"outcome-{rank}.json"
