"""Runs one trial: starts the script's process, watches its memory, and ends everything that it has started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry.config import ENV_PREFIX, TRIAL_VARIABLE
from telemetry.core.trial_records import outcome_path
from telemetry.tune.memory_room import proportional_bytes
from telemetry.util.files import parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.core.trial_records import TrialPlan
    from telemetry.tune.memory_room import MemoryRoom

MEMORY_SHORT: Final = "memory was short"

_POLL_SECONDS: Final = 0.05
_MEMORY_SECONDS: Final = 2.0
"""Time between two readings of every process's memory. One takes some milliseconds for each."""

_RESERVE: Final = 0.08
"""A trial is ended when less than this share of the memory is left ..."""

_AHEAD_READINGS: Final = 3.0
"""... or when it would be used up within so many readings, if it goes on as since the last one."""

_PATIENCE_SECONDS: Final = 60.0
"""How much longer than its own limits a trial may take before it is ended from outside."""

_LAST_LINES: Final = 15
_FIRST_VICTIM: Final = "800"
"""If memory is short nevertheless, the kernel ends a trial before anything else."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How the script is started.

    Attributes:
        script: its path, or the name of a module if ``module``. ``arguments``: its own.
        ranks: processes of this node, under torchrun if more than one; None without torchrun.
        scratch: whether it runs in an empty working folder.
    """

    script: str
    arguments: tuple[str, ...]
    module: bool = False
    ranks: int | None = None
    scratch: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """How a trial ended.

    Attributes:
        outcomes: of its ranks, as far as they were written.
        status: exit status; negative for a signal.
        wanting: why the trial was ended from outside; empty if it was not.
        output: the last lines that it printed.
        seconds: from start to end. ``memory_bytes``: the most that all its processes had together; 0 if unknown.
        main_bytes: of that, the training processes.
    """

    outcomes: tuple[dict[str, Any], ...]
    status: int
    wanting: str
    output: tuple[str, ...]
    seconds: float
    memory_bytes: int
    main_bytes: int


def run_trial(launch: Launch, plan: TrialPlan, room: MemoryRoom, tell: Callable[[], None]) -> Ended:
    """Run one trial to its end.

    Args:
        launch: how the script is started.
        plan: what the trial shall do. Its folder exists.
        room: the memory that is left.
        tell: called some times a second while the trial runs.

    Raises:
        OSError: the trial cannot be started.
        KeyboardInterrupt: the user wants no more. All processes of the trial have ended.
    """
    folder = Path(plan.folder)
    path = plan.write()
    began = time.monotonic()
    watched = TrialMemory(str(path), room)
    try:
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                _command(launch, folder),
                cwd=_working_folder(launch, folder),
                env=_environment(path, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        with suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text(_FIRST_VICTIM, encoding="ascii")
        wanting = _wait(process, plan, watched, launch.ranks or 1, tell)
    finally:
        end_all(str(path))
    status = process.wait()
    outcomes = _outcomes(plan.folder, launch.ranks or 1)
    return Ended(
        outcomes=outcomes,
        status=status,
        wanting=wanting,
        output=_last_lines(folder / "output.txt"),
        seconds=time.monotonic() - began,
        memory_bytes=watched.most,
        main_bytes=sum(watched.sizes.get(outcome["pid"], 0) for outcome in outcomes),
    )


def _wait(
    process: subprocess.Popen[bytes], plan: TrialPlan, memory: TrialMemory, ranks: int, tell: Callable[[], None]
) -> str:
    """Wait for the end. Returns why it was brought about from here; empty if it was not."""
    until = time.monotonic() + plan.start_seconds + plan.max_seconds + _PATIENCE_SECONDS
    while process.poll() is None:
        short = memory.short()
        if short:
            return short
        if time.monotonic() > until:
            return "it did not end in time"
        if ranks > 1 and len(_outcomes(plan.folder, ranks)) == ranks:
            return ""  # they end one by one, and torchrun would take the first for a failure
        tell()
        time.sleep(_POLL_SECONDS)
    return ""


class TrialMemory:
    """The memory of a trial.

    Args:
        token: the path of the plan, which its processes have in their environment.
        room: tells what is left.

    Attributes:
        most: of all processes together, the most seen. ``sizes``: of each at that time, by pid.
    """

    def __init__(self, token: str, room: MemoryRoom) -> None:
        self._token = token
        self._room = room
        self._due = time.monotonic() + _MEMORY_SECONDS / 2
        self._before: int | None = None
        self._grown = 0
        self.most = self._newest = 0
        self.sizes: dict[int, int] = {}

    def short(self) -> str:
        """Why the trial must end now, because memory is short; empty if it need not."""
        now = time.monotonic()
        if now >= self._due:
            self._measure()
            self._due = now + _MEMORY_SECONDS
        room = self._room.now(self._newest)
        before, self._before = self._before, room.left
        last, self._grown = self._grown, 0 if before is None else before - room.left
        lasting = min(last, self._grown)  # loading torch fills 100 MB within one reading, and then stops
        if room.left < _RESERVE * room.limit or _AHEAD_READINGS * lasting > room.left:
            return f"{MEMORY_SHORT}: {room.left >> 20} of {room.limit >> 20} MiB were left"
        return ""

    def _measure(self) -> None:
        sizes = {pid: size for pid in processes_of(self._token) if (size := proportional_bytes(pid)) is not None}
        self._newest = sum(sizes.values())
        if self._newest > self.most:
            self.most, self.sizes = self._newest, sizes


def processes_of(token: str) -> list[int]:
    """The processes of a trial, and all that they have started: they inherit the variable that has the plan's path."""
    wanted = f"{TRIAL_VARIABLE}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def end_all(token: str) -> None:
    """End every process of a trial at once. A signal that a script can handle would let it write a checkpoint."""
    for _ in range(100):
        left = [pid for pid in processes_of(token) if not _is_dead(pid)]
        if not left:
            return
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1] == [b"Z"]
    except OSError:
        return True


def _command(launch: Launch, folder: Path) -> Sequence[str]:
    agent = ["-m", "telemetry", "run", "--run-dir", str(folder / "run"), *(["-m"] if launch.module else [])]
    script = launch.script
    if launch.scratch and not launch.module:
        script = str(Path(script).absolute())
    launcher = [sys.executable]
    if launch.ranks is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(launch.ranks)]
    return [*launcher, *agent, script, *launch.arguments]


def _working_folder(launch: Launch, folder: Path) -> Path | None:
    if not launch.scratch:
        return None
    empty = folder / "work"
    empty.mkdir()
    return empty


def _environment(plan: Path, folder: Path) -> dict[str, str]:
    """The variables of a trial: this process's, without settings of the agent, and with the outside world kept away."""
    temporary = folder / "tmp"
    temporary.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.environ.get('USER', os.getuid())}"
    return kept | {
        TRIAL_VARIABLE: str(plan),
        "TELEMETRY_PORT": "off",
        "TELEMETRY_INTERVAL_SECONDS": "0.25",
        "TELEMETRY_MAX_SNAPSHOTS": "0",
        "TELEMETRY_START_LINE": "off",
        "TELEMETRY_END_LINE": "off",
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": kept.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
        "WANDB_MODE": "disabled",
        "MLFLOW_TRACKING_URI": f"file:{folder / 'mlflow'}",
        "COMET_MODE": "disabled",
    }


def _outcomes(folder: str, ranks: int) -> tuple[dict[str, Any], ...]:
    found = []
    for rank in range(ranks):
        with suppress(OSError):
            outcome = parse_object(outcome_path(folder, rank).read_bytes())
            if outcome is not None:
                found.append(outcome)
    return tuple(found)


def _last_lines(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_bytes()[-20000:].decode("utf-8", "replace").splitlines()
    except OSError:
        return ()
    return tuple(lines[-_LAST_LINES:])


def remove_folder(folder: Path) -> None:
    """Remove a trial's files. What cannot be removed stays."""
    shutil.rmtree(folder, ignore_errors=True)
