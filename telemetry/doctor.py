"""``telemetry doctor``: what would work here, and why not.

A list of small checks, each of which finds one thing out and is contained: a check that fails is itself a finding.
Nothing that a check makes is left behind.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
import textwrap
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry._version import __version__
from telemetry.config import DISABLED_VARIABLE, ENV_PREFIX, Config, SettingError, disabled, unknown_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

OK: Final = "ok"
ABSENT: Final = "--"
PROBLEM: Final = "!!"

WIDTH: Final = 100
HEIGHT: Final = 24
"""A screen: whatever is found fits into it."""

_NAME_WIDTH: Final = 11
_CUDA_SECONDS: Final = 60.0
"""A wedged driver hangs; a slow disk may well take half a minute to import torch from."""

_PYTHONS: Final = ((3, 10), (3, 13))
_OLDEST_TORCH: Final = (2, 4)
_NEEDED: Final = ("structlog", "prometheus-client", "psutil", "orjson", "nvidia-ml-py")
_BOARD_BYTES: Final = 16 << 20
_MOST_GPU_LINES: Final = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found. ``status`` is ``ok``, ``--`` (absent, but harmless) or ``!!`` (a problem)."""

    status: str
    name: str
    text: str


@dataclass(slots=True)
class Place:
    """What the checks are told, and tell each other.

    Attributes:
        config: the settings; the defaults where they are not valid.
        error: why they are not.
        gpus: whether NVML has found any.
    """

    config: Config
    error: SettingError | None = None
    gpus: bool = False


def doctor(run_dir: str | None) -> int:
    """Print the findings. Returns 1 where something is a problem, else 0."""
    findings = examine(run_dir)
    print(render(findings), flush=True)
    return int(any(finding.status == PROBLEM for finding in findings))


def examine(run_dir: str | None) -> list[Finding]:
    """Make every check.

    Args:
        run_dir: the folder one means to use; that of the settings by default.
    """
    given = {} if run_dir is None else {"run_dir": run_dir}
    try:
        place = Place(Config.load(given))
    except SettingError as error:
        folder = given if _valid(given) else {}
        place = Place(Config.load(folder, environ={}), error)
    return [finding for check in CHECKS for finding in _contained(check, place)]


def render(findings: Sequence[Finding]) -> str:
    """The findings as lines that fit a screen: problems in two lines at most, or one where there are many."""
    problems = sum(finding.status == PROBLEM for finding in findings)
    verdict = (
        "everything that is needed works" if not problems else f"{problems} problem{'s' * (problems != 1)}, see !!"
    )
    last = f"{verdict}; -- is absent and does no harm"
    for most in (2, 1):
        lines = [line for finding in findings for line in _lines(finding, most)]
        if len(lines) < HEIGHT:
            break
    return "\n".join([*lines[: HEIGHT - 1], last])


def _lines(finding: Finding, most: int) -> list[str]:
    text = " ".join(finding.text.split())  # an error of others may have several lines
    first = f"{finding.status} {finding.name:<{_NAME_WIDTH}} "
    width = WIDTH - len(first)
    wrapped = textwrap.wrap(text, width, max_lines=most, placeholder=" ...") or [""]
    return [(" " * len(first) if number else first) + line for number, line in enumerate(wrapped)]


def _valid(given: dict[str, str]) -> bool:
    try:
        Config.load(given, environ={})
    except SettingError:
        return False
    return True


def _contained(check: Callable[[Place], Iterable[Finding]], place: Place) -> list[Finding]:
    """Run a check; whatever it raises becomes its finding."""
    try:
        return list(check(place))
    except Exception as error:
        name = check.__name__.removeprefix("_check_").replace("_", " ")
        return [Finding(PROBLEM, name, f"the check itself failed: {type(error).__name__}: {error}")]


# -- what is installed -----------------------------------------------------------------------------------------


def _check_versions(place: Place) -> Iterable[Finding]:
    del place
    python, torch = sys.version_info[:2], _version("torch")
    text = f"python {platform.python_version()}, torch {torch or 'missing'}, telemetry {__version__}"
    if not _PYTHONS[0] <= python <= _PYTHONS[1]:
        yield Finding(PROBLEM, "versions", f"{text}: use Python 3.10 to 3.13")
    elif torch is None:
        yield Finding(PROBLEM, "versions", f"{text}: pip install torch")
    elif _release(torch) < _OLDEST_TORCH:
        yield Finding(PROBLEM, "versions", f"{text}: use torch 2.4 or newer")
    else:
        yield Finding(OK, "versions", text)


def _check_packages(place: Place) -> Iterable[Finding]:
    del place
    found = {package: _version(package) for package in _NEEDED}
    missing = [package for package, version in found.items() if version is None]
    if missing:
        yield Finding(PROBLEM, "packages", f"missing: {', '.join(missing)}; pip install {' '.join(missing)}")
    else:
        yield Finding(OK, "packages", ", ".join(f"{package} {version}" for package, version in found.items()))
    deprecated = _version("pynvml")
    if deprecated is not None and _release(deprecated) < (12, 0):  # it has a module of the same name in it
        text = f"pynvml {deprecated} overwrites nvidia-ml-py: pip uninstall pynvml, and reinstall nvidia-ml-py"
        yield Finding(PROBLEM, "packages", text)


def _version(package: str) -> str | None:
    """The version of an installed package; importing it would take seconds."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # Some distributions ship torch without its metadata.
        return "of unknown version" if importlib.util.find_spec(package.replace("-", "_")) else None


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version. What has none is new enough."""
    numbers = [part for part in version.split(".")[:2] if part.isdecimal()]
    return tuple(int(number) for number in numbers) if len(numbers) == 2 else (sys.maxsize,)


# -- the settings ----------------------------------------------------------------------------------------------


def _check_enabled(place: Place) -> Iterable[Finding]:
    del place
    if disabled():
        text = f"{DISABLED_VARIABLE}={os.environ[DISABLED_VARIABLE]} turns everything off: unset it"
        yield Finding(PROBLEM, "enabled", text)
    else:
        yield Finding(OK, "enabled", f"not turned off by {DISABLED_VARIABLE}")


def _check_settings(place: Place) -> Iterable[Finding]:
    ignored = unknown_variables()
    used = [name for name in sorted(os.environ) if name.startswith(ENV_PREFIX) and name not in ignored]
    used = [name for name in used if name != DISABLED_VARIABLE]
    if place.error is not None:
        yield Finding(PROBLEM, "settings", f"{place.error}; no run would start; what follows is for the defaults")
    else:
        yield Finding(OK, "settings", f"valid; set by the environment: {', '.join(used) or 'none'}")
    if ignored:
        yield Finding(ABSENT, "settings", f"no settings of ours, and ignored: {', '.join(ignored)}")


# -- the GPU ---------------------------------------------------------------------------------------------------


def _check_gpu(place: Place) -> Iterable[Finding]:
    """What NVML says, alike GPUs in one line."""
    from telemetry.collect.nvml import device_summary
    from telemetry.collect.nvml_device import NoGpuError
    from telemetry.collect.source import SourceError

    try:
        devices = device_summary()
    except SourceError as error:
        harmless = isinstance(error.__cause__, NoGpuError)
        text = f"{error}: no GPU metrics" if harmless else f"{error}; try nvidia-smi, it should fail alike"
        yield Finding(ABSENT if harmless else PROBLEM, "gpu", text)
        return
    place.gpus = bool(devices)
    alike: dict[tuple[str, str], list[int]] = {}
    for device in devices:
        alike.setdefault(_about(device), []).append(device["index"])
    for (status, text), indexes in list(alike.items())[:_MOST_GPU_LINES]:
        yield Finding(status, "gpu", f"{_ranges(indexes)}: {text}")
    if not devices:
        yield Finding(ABSENT, "gpu", "the NVIDIA driver is there, but no GPU is: no GPU metrics")
    if len(alike) > _MOST_GPU_LINES:
        yield Finding(ABSENT, "gpu", f"and {len(alike) - _MOST_GPU_LINES} more kinds of GPU")


_SM_SOURCES: Final = {
    "gpm": "SM activity from its hardware counters",
    "process": "SM activity from the driver's process statistics (a Hopper or newer has counters)",
    None: "no SM activity, only utilization",
}


def _about(device: dict[str, Any]) -> tuple[str, str]:
    """Status and text for one GPU, without what only tells it from others of its kind."""
    if device["error"] is not None:
        return PROBLEM, f"{device['error']}; nvidia-smi -q says more"
    partitioned = ", partitioned (MIG)" if device["mig"] else ""
    text = f"{device['name']}, driver {device['driver_version']}{partitioned}; {_SM_SOURCES[device['sm_source']]}"
    return OK if device["sm_source"] else ABSENT, text


def _ranges(indexes: Sequence[int]) -> str:
    """``0-3,6`` for 0, 1, 2, 3, 6."""
    parts: list[list[int]] = []
    for index in indexes:
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _check_cuda_events(place: Place) -> Iterable[Finding]:
    """Whether waits can be timed on the GPU. On a thread of its own: a wedged driver hangs."""
    name = "cuda events"
    if place.config.gpu_events == "off":
        yield Finding(ABSENT, name, "the setting gpu_events is off: exposed wait is not measured on a GPU")
        return
    if _version("torch") is None:
        yield Finding(ABSENT, name, "there is no torch to make them")
        return
    answers: list[Finding] = []

    def ask() -> None:
        try:
            status, text = _time_with_events(gpus=place.gpus)
        except BaseException as error:  # whatever it is, it is the answer
            status, text = PROBLEM, f"{type(error).__name__}: {error}"
        answers.append(Finding(status, name, text))

    thread = threading.Thread(target=ask, name="telemetry-doctor-cuda", daemon=True)
    thread.start()
    thread.join(_CUDA_SECONDS)
    hung = Finding(PROBLEM, name, f"CUDA has not answered for {_CUDA_SECONDS:g} s; does nvidia-smi answer?")
    yield answers[0] if answers else hung


def _time_with_events(*, gpus: bool) -> tuple[str, str]:
    """Record two events and read the time between them, as the agent would."""
    import torch

    if not (torch.version.cuda or torch.version.hip):
        why = "this torch is built without CUDA: waits are timed on the host"
        return (PROBLEM, f"{why}; there is a GPU: install a CUDA build of torch") if gpus else (ABSENT, why)
    with warnings.catch_warnings(record=True) as caught:  # torch warns of what is wrong, and says False
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        why = str(caught[-1].message).partition("(Triggered")[0] if caught else "torch finds no GPU"
        return (PROBLEM if gpus else ABSENT), f"{why}: waits are timed on the host"
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    after.record()
    after.synchronize()
    apart = 1e3 * before.elapsed_time(after)
    return OK, f"usable on {torch.cuda.get_device_name()}: two in a row are {apart:.1f} us apart"


# -- where it writes and serves --------------------------------------------------------------------------------


def _check_endpoint(place: Place) -> Iterable[Finding]:
    from telemetry.publish.node import PORTS_TRIED

    host, port = place.config.host, place.config.port
    if port is None:
        yield Finding(ABSENT, "endpoint", "the setting port is off: no metrics")
        return
    refused = _bind(host, port)
    if refused is None:
        where = f"port {port}" if port else "any free port"
        yield Finding(OK, "endpoint", f"{where} can be had on {host}")
        return
    last = min(port + PORTS_TRIED, 65536) - 1
    free = next((other for other in range(port + 1, last + 1) if _bind(host, other) is None), None)
    if port and free is not None:
        why = refused.strerror or str(refused)
        text = f"port {port} cannot be had on {host} ({why}): a run would take port {free}"
        yield Finding(ABSENT, "endpoint", text)
    else:
        ports = f"no port from {port} to {last}" if port else "no port at all"
        text = f"{ports} can be had on {host} ({refused}); choose another {ENV_PREFIX}PORT or {ENV_PREFIX}HOST"
        yield Finding(PROBLEM, "endpoint", text)


def _bind(host: str, port: int) -> OSError | None:
    """Take a port as the endpoint would, and give it back. Returns why it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        return error
    return None


def _check_run_folder(place: Place) -> Iterable[Finding]:
    config = place.config
    folder = (config.run_dir or Path("telemetry-runs")).absolute()
    try:
        there = _nearest(folder)
        with tempfile.TemporaryFile(dir=there) as trial:
            trial.write(b"x")
        free = shutil.disk_usage(there).free
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror or error}): no log; choose another --run-dir"
        yield Finding(PROBLEM, "run folder", text)
        return
    logs = config.log_max_bytes * config.log_max_files
    text = f"{folder} can be {'written' if there == folder else 'made'}, {_bytes(free)} free"
    if free < logs:
        yield Finding(PROBLEM, "run folder", f"{text}: the log of one rank may take {_bytes(logs)}; make room")
    else:
        yield Finding(OK, "run folder", text)


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest above it that is there: the one that it would be made in."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise OSError(f"{folder} is a file")
    return folder


def _check_board(place: Place) -> Iterable[Finding]:
    """Make a board, take its lock, and take it away."""
    del place
    from telemetry.publish.board import Board, board_root

    root = board_root()
    try:
        board = Board("doctor", str(os.getpid()))
        try:
            board.try_lead()
        finally:
            board.leave()
        free = shutil.disk_usage(root).free
    except OSError as error:
        yield Finding(PROBLEM, "board", f"{root} cannot be used: no metrics; {error}")
        return
    text = f"ranks meet in {root}, {_bytes(free)} free"
    if free < _BOARD_BYTES:
        yield Finding(PROBLEM, "board", f"{text}: make room (of a container: a larger --shm-size)")
    else:
        yield Finding(OK, "board", text)


# -- the kernel ------------------------------------------------------------------------------------------------


def _check_workers(place: Place) -> Iterable[Finding]:
    del place
    import multiprocessing

    method = multiprocessing.get_start_method()
    cores = len(os.sched_getaffinity(0))
    yield Finding(
        OK, "workers", f"DataLoader workers are started by {method}; {cores} of {os.cpu_count()} cores are ours"
    )


def _check_schedstat(place: Place) -> Iterable[Finding]:
    del place
    from telemetry.collect.proc import read_schedule

    schedule = read_schedule(os.getpid(), threading.get_native_id())
    if schedule is None or schedule.run_ns == 0:
        text = "the kernel keeps none (CONFIG_SCHED_INFO): why workers are slow is not told apart"
        yield Finding(ABSENT, "schedstat", text)
    else:
        yield Finding(OK, "schedstat", "tells running, runnable and blocked workers apart")


def _check_pressure(place: Place) -> Iterable[Finding]:
    del place
    folder = Path("/proc/pressure")
    there = [name for name in ("cpu", "io", "memory") if _readable(folder / name)]
    if there:
        yield Finding(OK, "pressure", f"{folder} tells of {', '.join(there)}")
    else:
        yield Finding(ABSENT, "pressure", f"no {folder}: the kernel lacks PSI, was booted with psi=0, or hides it")


def _check_cgroup(place: Place) -> Iterable[Finding]:
    del place
    from telemetry.collect.pressure import PressureSource
    from telemetry.collect.source import SourceError

    try:
        sample = PressureSource().read()
    except SourceError as error:
        yield Finding(ABSENT, "cgroup", f"{error}: no limits are known")
        return
    cpu, memory, used = sample.cgroup_cpu_limit, sample.cgroup_memory_limit_bytes, sample.cgroup_memory_used_bytes
    cores = "no CPU limit" if cpu is None else f"CPU limit {cpu:g} cores"
    of_it = f", {_bytes(used)} used" if used is not None else ""
    room = "no memory limit" if memory is None else f"memory limit {_bytes(memory)}"
    yield Finding(OK, "cgroup", f"{cores}, {room}{of_it}")


def _readable(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def _bytes(amount: float) -> str:
    """Bytes in the unit a person would use."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


CHECKS: Final[tuple[Callable[[Place], Iterable[Finding]], ...]] = (
    _check_enabled,
    _check_settings,
    _check_versions,
    _check_packages,
    _check_gpu,
    _check_cuda_events,
    _check_endpoint,
    _check_run_folder,
    _check_board,
    _check_workers,
    _check_schedstat,
    _check_pressure,
    _check_cgroup,
)
"""In the order in which they are shown. `_check_cuda_events` relies on what `_check_gpu` has noted."""
