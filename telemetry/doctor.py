"""``telemetry doctor``: check what works on this machine, and what to do about the rest.

Each small check answers one question, and leaves nothing behind.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import re
import runpy
import shutil
import socket
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry._version import __version__
from telemetry.config import ENV_PREFIX, Config, SettingError, settings, unknown_variables
from telemetry.safety.processes import DISABLED_VARIABLE, disabled, runs_without_gil
from telemetry.seams.table import absent
from telemetry.util.words import binary_size, ranges, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.node.server import Address

OK: Final = "ok"
ABSENT: Final = "--"
PROBLEM: Final = "!!"


class Finding(NamedTuple):
    """The result of a check. ``status`` is ``ok``, ``--`` (optional and missing) or ``!!`` (a problem)."""

    status: str
    name: str
    text: str


Results = Iterable[tuple[str, str]]
"""Results of a check: status and text. Its name is that of the function."""


@dataclass
class CheckContext:
    """The settings (the defaults if they are not valid), and ``gpus``: whether an earlier check has found a GPU."""

    config: Config
    error: SettingError | None = None
    gpus: bool = False


def doctor(run_dir: str | None) -> int:
    """Print the findings. Returns 1 if there is a problem, else 0."""
    findings = examine(run_dir)
    show(render(findings) + "\n")
    return int(any(finding.status == PROBLEM for finding in findings))


def examine(run_dir: str | None) -> list[Finding]:
    """Run all checks, for ``run_dir`` or the folder of the settings. A check that raises becomes a finding itself."""
    given = {} if run_dir is None else {"run_dir": run_dir}
    try:
        place = CheckContext(Config.load(given))
    except SettingError as error:
        place = CheckContext(Config.load({} if error.name == "run_dir" else given, environ={}), error)
    findings: list[Finding] = []
    for check in CHECKS:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            findings += [Finding(status, name, text) for status, text in check(place)]
        except Exception as error:
            findings.append(Finding(PROBLEM, name, f"this check failed itself: {type(error).__name__}: {error}"))
    return findings


WIDTH: Final = 100
_NAME_WIDTH: Final = 11


def render(findings: Sequence[Finding]) -> str:
    """The findings as lines that fit a terminal, at most two for each."""
    lines = []
    for finding in findings:
        text = " ".join(finding.text.split())  # an error message may have several lines
        first = f"{finding.status} {finding.name:<{_NAME_WIDTH}} "
        wrapped = textwrap.wrap(text, WIDTH - len(first), max_lines=2, placeholder=" ...") or [""]
        lines += [(" " * len(first) if number else first) + line for number, line in enumerate(wrapped)]
    problems = sum(finding.status == PROBLEM for finding in findings)
    verdict = f"{problems} problem{'s' * (problems != 1)}, see the lines with !!" if problems else "no problem found"
    return "\n".join([*lines, f"{verdict}. Lines with -- are optional: the agent works without them."])


# -- settings and packages ---------------------------------------------------------------------------------------------

OLDEST_TORCH: Final = (2, 4)
NEEDED: Final = ("structlog", "psutil", "msgspec", "prometheus-client", "nvidia-ml-py")


def check_enabled(_place: CheckContext) -> Results:
    """Whether telemetry is turned off."""
    if disabled():
        yield PROBLEM, f"{DISABLED_VARIABLE}={os.environ[DISABLED_VARIABLE]} turns everything off; unset it"
    else:
        yield OK, f"telemetry is on: {DISABLED_VARIABLE} is not set"


def check_settings(place: CheckContext) -> Results:
    """Whether the settings are valid, and which variables name no setting."""
    if place.error is not None:
        yield PROBLEM, f"{place.error}. No run will start; the other checks use the defaults"
    else:
        used = sorted({setting.variable for setting in settings()} & os.environ.keys())
        yield OK, f"valid; set by environment variables: {', '.join(used) or 'none'}"
    ignored = [f"{name} (did you mean {close}?)" if close else name for name, close in unknown_variables().items()]
    if ignored:
        yield ABSENT, f"ignored, because they name no setting: {', '.join(ignored)}"


def check_versions(_place: CheckContext) -> Results:
    """Whether the versions of Python and torch are supported."""
    torch = version_of("torch")
    problem = ""
    if runs_without_gil():
        problem = "; Python's GIL is off, and no run will start; set PYTHON_GIL=1"
    elif torch is None:
        problem = "; run pip install torch"
    elif _release(torch) < OLDEST_TORCH:
        problem = f"; use torch {'.'.join(map(str, OLDEST_TORCH))} or newer"
    text = f"python {platform.python_version()}, torch {torch or 'missing'}, telemetry {__version__}"
    yield PROBLEM if problem else OK, text + problem


def check_packages(_place: CheckContext) -> Results:
    """Whether the packages that the agent needs are installed, and no conflicting package is."""
    found = {package: version_of(package) for package in NEEDED}
    missing = [package for package, version in found.items() if version is None]
    if missing:
        yield PROBLEM, f"missing: {', '.join(missing)}; run pip install {' '.join(missing)}"
    else:
        yield OK, ", ".join(f"{package} {version}" for package, version in found.items())
    old = version_of("pynvml")
    if old is not None and _release(old) < (12, 0):  # it contains a module of the same name
        remedy = "run pip uninstall pynvml, then reinstall nvidia-ml-py"
        yield PROBLEM, f"pynvml {old} overwrites nvidia-ml-py; {remedy}"


def version_of(package: str) -> str | None:
    """The version of an installed package, without importing it, which can take seconds."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # Some distributions ship torch without its metadata.
        return "of unknown version" if importlib.util.find_spec(package.replace("-", "_")) else None


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version. A version without numbers counts as new enough."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, numbers.groups())) if numbers else (sys.maxsize,)


# -- GPUs --------------------------------------------------------------------------------------------------------------

_CUDA_SECONDS: Final = 60.0
"""A wedged driver hangs. But importing torch from a slow disk can take half a minute, too."""

_DRIVER_SECONDS: Final = 5.0
_BETWEEN_SAMPLES_SECONDS: Final = 0.15
"""Hardware counters give the difference of two samples, more than 100 ms apart."""


def check_gpu(place: CheckContext) -> Results:
    """The GPUs that the agent's own reader finds, of which identical ones share a line. Of AMD's only its package."""
    from telemetry.sources.collector import CollectorError
    from telemetry.sources.gpu import GpuSource, NoGpuError
    from telemetry.sources.nvml import Nvml

    if _is_rocm():
        return [_amd()]
    driver = Nvml()
    source = GpuSource(driver, driver.survey, deadline_seconds=_DRIVER_SECONDS)
    try:
        for _ in range(2):
            source.look(_DRIVER_SECONDS)
            time.sleep(_BETWEEN_SAMPLES_SECONDS)
        gpus = source.read()
    except NoGpuError as error:
        return [(ABSENT, f"{error}: there are no GPU metrics")]
    except CollectorError as error:
        return [(PROBLEM, f"{error}; run nvidia-smi, it should fail too")]
    finally:
        source.close()
    place.gpus = True
    alike: dict[tuple[str, str], list[int]] = {}
    without = "not available, only utilization (hardware counters need Hopper or newer, and permission)"
    for gpu in gpus:
        status, activity = (ABSENT, without) if gpu.sm_active_ratio is None else (OK, "read from hardware counters")
        text = f"{gpu.name}, driver {driver.version}; SM activity is {activity}"
        alike.setdefault((status, text), []).append(gpu.index)
    for index, lost in driver.unreadable.items():
        alike.setdefault((PROBLEM, f"{lost}; run nvidia-smi -q for details"), []).append(index)
    shown = {key: [f"{a}-{b}" if a < b else str(a) for a, b in ranges(indexes)] for key, indexes in alike.items()}
    return [(status, f"{','.join(indexes)}: {text}") for (status, text), indexes in shown.items()]


def _is_rocm() -> bool:
    """Whether torch is a ROCm build, without importing it, which can take seconds."""
    spec = importlib.util.find_spec("torch")
    file = None if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py")
    return file is not None and file.is_file() and bool(runpy.run_path(str(file)).get("hip"))


def _amd() -> tuple[str, str]:
    binding = version_of("amdsmi")
    if binding is None:
        return ABSENT, "amdsmi is missing: there are no GPU metrics; install ROCm's or torch-telemetry[amd]"
    return OK, f"torch is a ROCm build; AMD's GPUs are read through amdsmi {binding}"


def check_cuda_events(place: CheckContext) -> Results:
    """Whether waits can be measured on the GPU. It runs on its own thread, because a wedged driver hangs."""
    if place.config.gpu_events == "off":
        return [(ABSENT, "turned off by the setting gpu_events: the exposed wait is not measured on GPUs")]
    if version_of("torch") is None:
        return [(ABSENT, "torch is not installed")]
    answers: list[tuple[str, str]] = []

    def ask() -> None:
        try:
            answers.append(_time_with_events(gpus=place.gpus))
        except BaseException as error:  # any error is the result of the check
            answers.append((PROBLEM, f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=ask, name="telemetry-doctor-cuda", daemon=True)
    thread.start()
    thread.join(_CUDA_SECONDS)
    hung = PROBLEM, f"CUDA has not answered for {_CUDA_SECONDS:g} s; check whether nvidia-smi answers"
    return answers or [hung]


def _time_with_events(*, gpus: bool) -> tuple[str, str]:
    """Record two events and read the time between them, as the agent would."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch  # warns if there is no NumPy, which telemetry does not need

        caught.clear()
        usable = torch.cuda.is_available()  # warns about the reason and returns False
    if not usable:
        why = str(caught[-1].message).partition("(Triggered")[0] if caught else "torch finds no GPU"
        if not (torch.version.cuda or torch.version.hip):
            why = "this build of torch has no CUDA (for a GPU, install a CUDA build)"
        return (PROBLEM if gpus else ABSENT), f"{why}, so waits are measured on the host"
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    after.record()
    after.synchronize()
    apart = 1e3 * before.elapsed_time(after)
    return OK, f"work on {torch.cuda.get_device_name()}; two events in a row are {apart:.1f} us apart"


def check_torch(_place: CheckContext) -> Results:
    """Whether this torch has all the names that the agent patches or reads."""
    if "torch" not in sys.modules:
        return
    missing = [(ABSENT, f"{seam.module} has no {', '.join(seam.names)}; absent: {seam.without}") for seam in absent()]
    yield from missing or [(OK, "this torch has every name that the agent patches or reads")]


# -- metrics and logs --------------------------------------------------------------------------------------------------

_BOARD_BYTES: Final = 16 << 20
_RESOLVER_SECONDS: Final = 5.0


def check_endpoint(place: CheckContext) -> Results:
    """Whether the port is free, and if not, which port a run would use."""
    from telemetry.node.server import address_of, explained, from_port

    host, port = place.config.host, place.config.port
    if port is None:
        return [(ABSENT, "turned off by the setting port: there are no Prometheus metrics")]
    try:
        free = _first_free(address_of(host, _RESOLVER_SECONDS), from_port(port))
    except OSError as error:
        why, remedy = explained(error, host, port)
        return [(PROBLEM, f"no metrics: {why}; {remedy} ({ENV_PREFIX}HOST, {ENV_PREFIX}PORT)")]
    if free != port:
        return [(ABSENT, f"port {port} is taken on {host}; a run will use port {free} instead")]
    return [(OK, f"port {port} is free on {host}" if port else f"a free port was found on {host}")]


def _first_free(address: Address, ports: Iterable[int]) -> int:
    """The first port that can be bound as the endpoint does it. Raises OSError if there is none."""
    for port in ports:
        with socket.socket(address.family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(address.at(port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def check_run_folder(place: CheckContext) -> Results:
    """Whether the run folder is writable, with enough space for the log."""
    folder = there = (place.config.run_dir or Path("telemetry-runs")).absolute()
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
        if not there.is_dir():
            raise OSError(f"{there} is a file")  # noqa: TRY301
        with tempfile.TemporaryFile(dir=there) as trial:
            trial.write(b"x")
        free = shutil.disk_usage(there).free
    except OSError as error:
        why = error.strerror or error
        return [(PROBLEM, f"{folder} is not writable ({why}): there is no log; choose another --run-dir")]
    logs = place.config.log_max_bytes * place.config.log_max_files
    text = f"{folder} {'is writable' if there == folder else 'can be created'}, {binary_size(free)} free"
    if free < logs:
        return [(PROBLEM, f"{text}: the log of one rank can grow to {binary_size(logs)}; free some space")]
    return [(OK, text)]


def check_board(_place: CheckContext) -> Results:
    """Whether a board can be created and locked. It is removed again."""
    from telemetry.node.board import Board, board_root

    root = board_root()
    try:
        board = Board("doctor", str(os.getpid()), "")
        try:
            board.lead()
        finally:
            board.leave()
        free = shutil.disk_usage(root).free
    except OSError as error:
        return [(PROBLEM, f"the shared folder {root} does not work: there are no metrics; make it writable ({error})")]
    notice = f" ({board.notice.partition(';')[0]})" if board.notice else ""
    text = f"the ranks of this node share {root}, {binary_size(free)} free{notice}"
    if free < _BOARD_BYTES:
        return [(PROBLEM, f"{text}: free some space (for a container, raise --shm-size)")]
    return [(OK, text)]


# -- what the kernel reports -------------------------------------------------------------------------------------------


def check_threads(_place: CheckContext) -> Results:
    """How workers are started, and whether torch computes with more threads than there are cores."""
    from telemetry.sources.proc import planned_threads

    planned = planned_threads()
    if planned.too_many:
        return [(PROBLEM, f"{planned.too_many}, or call torch.set_num_threads")]
    cores = f"this process may use {planned.cores:g} of {os.cpu_count()} cores"
    method = multiprocessing.get_start_method()
    return [(OK, f"torch computes with at most {planned.threads} threads, {cores}; workers are started by {method}")]


def check_memory(_place: CheckContext) -> Results:
    """The memory that is left, within the limit of the cgroup."""
    from telemetry.sources.memory import MemorySource

    sample = MemorySource(tuple).read()
    available, limit = sample.memory_available_bytes, sample.memory_limit_bytes
    left = "unknown" if available is None or limit is None else f"{binary_size(available)} of {binary_size(limit)}"
    return [(OK, f"left for this process: {left}")]


_KERNEL: Final = {
    "/proc/self/schedstat": ("tells running and waiting workers apart", "causes of slow workers are less exact"),
    "/proc/pressure/cpu": ("tells how long tasks wait for resources", "no pressure is measured (boot with psi=1)"),
    "/proc/self/smaps_rollup": ("tells which memory workers share", "memory that workers copy has no place of growth"),
}


def check_kernel(_place: CheckContext) -> Results:
    """What the kernel reports, and what is lost without it."""
    for path, (works, lost) in _KERNEL.items():
        try:
            told = Path(path).read_bytes().strip(b"0 \n")  # only zeros: a kernel without CONFIG_SCHED_INFO
        except OSError:
            told = b""
        yield (OK, f"{path} {works}") if told else (ABSENT, f"no {path}: {lost}")


CHECKS: Final[tuple[Callable[[CheckContext], Results], ...]] = (
    check_enabled, check_settings, check_versions, check_packages, check_gpu, check_cuda_events, check_torch,
    check_endpoint, check_run_folder, check_board, check_threads, check_memory, check_kernel,
)  # fmt: skip
"""In the order of the output. `check_cuda_events` uses a result of `check_gpu`, and imports torch for `check_torch`."""
