"""``telemetry demo``: trains a small network that waits for its data, and shows what the agent sees.

The training script is started like any other. Everything that is shown is read from the run's log and from its metrics
endpoint, as a person or Prometheus would read it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.config import disabled
from telemetry.report.logs import load
from telemetry.report.process_log import stalls_of
from telemetry.top.endpoints import ScrapeError, fetch, samples
from telemetry.util.text import show

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

SCRIPT: Final = Path(__file__).with_name("train.py")

_EXTRA: Final = (("PIL.Image", "pillow"), ("numpy", "numpy"))
_LOG_INTERVAL_SECONDS: Final = 2
_MAX_STDERR_LINES: Final = 100

_INTERRUPTED: Final = 130
"""The exit status that a shell gives a command that Ctrl-C ended."""

_SECOND_RUN_RATIO: Final = 0.7
"""Duration of the second training, relative to the first."""

_MAX_EXTRA_SECONDS: Final = 120.0
"""A training that takes this much longer than planned counts as hung."""

_EXIT_SECONDS: Final = 5.0
"""Time in which an interrupted training may end by itself."""


class DemoError(Exception):
    """The demo cannot go on; the text has the reason."""


@dataclass(frozen=True)
class DemoPlan:
    """The size of a demo.

    Attributes:
        pictures: number of pictures to train on.
        width, height: their size in pixels.
        seconds: duration of the training.
        poll_seconds: time between two rows about the running training.
        arguments: further arguments of the training script.
    """

    pictures: int = 384
    width: int = 512
    height: int = 384
    seconds: float = 25.0
    poll_seconds: float = 2.0
    arguments: tuple[str, ...] = ()


def demo(run_dir: str, plan: DemoPlan | None = None) -> int:
    """Run the demo. Returns the exit status. Ctrl-C ends the training and then the demo.

    Args:
        run_dir: the folder for the pictures, which the next demo uses again, and for a new run folder each time.
        plan: size of the demo; by default it takes about a minute.
    """
    with _sigterm_as_ctrl_c():
        try:
            _check()
            return _show(Path(run_dir), plan or DemoPlan())
        except DemoError as error:
            sys.stdout.flush()
            sys.stderr.write(f"telemetry demo: {error}\n")
            return 1
        except BrokenPipeError:
            sys.stdout = None  # the reader is gone; at exit Python would try to flush it again
            return 1
        except KeyboardInterrupt:
            sys.stderr.write("\ntelemetry demo: interrupted; the training was ended\n")
            return _INTERRUPTED


def _check() -> None:
    missing = []
    for module, package in _EXTRA:
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(package)
    if missing:
        raise DemoError(f"needs {' and '.join(missing)}: pip install 'torch-telemetry[demo]'")
    if disabled():
        raise DemoError("TELEMETRY_DISABLED is set, so there would be nothing to see: unset it")


# -- the parts of the demo -----------------------------------------------------------------------------------------


def _show(base: Path, plan: DemoPlan) -> int:
    from telemetry.report.command import PageError, page_recorder, report

    try:
        base.mkdir(parents=True, exist_ok=True)
        run = _new_run_folder(base)
        pictures = _prepare(base, plan)
    except OSError as error:
        raise DemoError(f"cannot write below {base}: {error}") from error
    training = [SCRIPT, pictures]
    say(f"2. Training, with the agent on. {SCRIPT.name} is a plain PyTorch script that does not mention the agent.", "")
    _train(
        ["--log-interval-seconds", _LOG_INTERVAL_SECONDS, *training, "--checkpoints", run / "checkpoints"],
        run, plan, plan.seconds, rows=True,
    )  # fmt: skip
    say("", "4. What its log says afterwards:", "", f"   $ {_command_line('report', run)}", "")
    status = report(str(run), as_json=False)
    second = _follow_advice(run, training, plan)
    tried = second or run.with_name(f"{run.name}-two-workers")
    again = ["run", "--run-dir", tried, *training, "--num-workers", 2]
    say(
        "",
        "6. What to try now",
        "",
        "   the report of a run with workers:",
        *([] if second else [f"   $ {_command_line(*again)}"]),
        f"   $ {_command_line('report', tried)}",
        "   a script of your own, unchanged:",
        f"   $ {_command_line('run', '--run-dir', 'runs/first', 'SCRIPT.py', 'ARGS...')}",
        "   this report for a program to read, and the log it was made from:",
        f"   $ {_command_line('report', run, '--json')}",
        f"   $ head -n 3 {shlex.quote(str(run / 'logs'))}/*.jsonl",
        "   what else would work on this machine, and why not:",
        f"   $ {_command_line('doctor')}",
        "",
        "7. The report as a page, to open in a browser or to send to somebody:",
        "",
    )
    try:
        page_recorder()
    except PageError as error:
        say(f"   it was not written: {error}")
        return status
    return status or report(str(run), as_json=False, html=str(run / "report.html"))


def _new_run_folder(base: Path) -> Path:
    """Make a folder that did not exist before, so that no demo overwrites anything."""
    number = 1
    while True:
        folder = base / f"demo-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _prepare(base: Path, plan: DemoPlan) -> Path:
    """Draw the pictures, unless an earlier demo has. Returns their folder."""
    from telemetry.demo.pictures import PictureSet, ensure

    wanted = PictureSet(plan.pictures, plan.width, plan.height)
    folder = base / wanted.folder_name
    say(f"1. {wanted.count} JPEG pictures of {wanted.width} x {wanted.height} to train on, in {folder}")
    began = time.monotonic()
    drawn = ensure(folder, wanted)
    say(f"   drawn in {time.monotonic() - began:.1f} s" if drawn else "   they are there from an earlier demo", "")
    return folder


def _follow_advice(run: Path, training: list[Path], plan: DemoPlan) -> Path | None:
    """Train again with the advised number of workers, and compare. Returns the new run folder; None without advice."""
    first = outcome(run)
    if first.workers is None or first.predicted_speedup is None or not first.steps_per_second:
        say("", "5. In so short a run no stall has led to advice on the number of workers, so this part is skipped.")
        return None
    second = run.with_name(f"{run.name}-{first.workers}-workers")
    seconds = max(1.0, _SECOND_RUN_RATIO * plan.seconds)
    say("", f"5. Taking the advice, num_workers={first.workers}, for {seconds:.0f} s:", "")
    second.mkdir()
    _train([*training, "--num-workers", first.workers], second, plan, seconds)
    rate = outcome(second).steps_per_second
    if rate:
        say(
            "                 steps per second of the training loop",
            f"   no workers                 {first.steps_per_second:6.1f}",
            f"   {first.workers} workers                  {rate:6.1f}",
            f"   speed-up: predicted {first.predicted_speedup:.2f}, realised {rate / first.steps_per_second:.2f}",
        )
    return second


@dataclass(frozen=True)
class DemoOutcome:
    """The result of one run.

    Attributes:
        steps_per_second: pace of its training loop from the first batch on; None without a step.
        workers: the ``num_workers`` in the first advice of the costliest stall; None without one.
        predicted_speedup: predicted factor on the steps per second of this advice; None without one.
    """

    steps_per_second: float | None
    workers: int | None
    predicted_speedup: float | None


def outcome(run: Path) -> DemoOutcome:
    """Read a run's log."""
    process = load(run)[-1]
    totals, ledger = process.totals, process.ledger
    loop = ledger.get("data_wait", 0.0) + ledger.get("compute", 0.0) - totals.first_wait_seconds
    rate = totals.steps_total / loop if totals.steps_total and loop > 0 else None
    stall = max(stalls_of(process), key=lambda stall: stall.lost_seconds, default=None)
    for advice in stall.advice[:1] if stall else ():
        if advice.setting == "num_workers":
            return DemoOutcome(rate, int(advice.value or 0), advice.predicted_speedup)
    return DemoOutcome(rate, None, None)


# -- one training, and what is shown of it while it runs -----------------------------------------------------------


def _train(arguments: list[object], run: Path, plan: DemoPlan, seconds: float, *, rows: bool = False) -> None:
    """Run the script with the agent on, with its output in ``train.out`` and ``train.err`` of the run folder.

    It gets a session of its own. So Ctrl-C reaches the demo alone, and the demo ends the training with its workers.

    Args:
        arguments: arguments of ``telemetry run`` after the run folder.
        run: the run folder.
        plan: it has further arguments of the script.
        seconds: duration of the training.
        rows: whether to print rows about it while it runs.

    Raises:
        DemoError: it failed, or did not end in time.
    """
    typed = ["run", "--run-dir", run, *arguments, "--seconds", f"{seconds:g}", *plan.arguments]
    say(f"   $ {_command_line(*typed)}", "")
    quiet = os.environ | {"TELEMETRY_END_LINE": "off"}
    with (run / "train.out").open("wb") as output, (run / "train.err").open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "telemetry", *map(str, typed)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=quiet, start_new_session=True,
        )  # fmt: skip
    try:
        if rows:
            _LiveView(child, run, plan).until_exit()
        else:
            child.wait(seconds + _MAX_EXTRA_SECONDS)
    except subprocess.TimeoutExpired:
        raise DemoError(f"the training has not ended, and was ended; see {run}") from None
    finally:
        if child.poll() is None:
            _end(child)
    if child.returncode:
        status = child.returncode
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        written = (run / "train.err").read_text(errors="replace").splitlines()[-_MAX_STDERR_LINES:]
        raise DemoError("\n".join([f"the training {how}; its stderr:", *written]))


def _end(child: subprocess.Popen[bytes]) -> None:
    """Interrupt the training, so that the agent can write its last line; kill it if that times out."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


class _LiveView:
    """Polls the metrics of a running training every few seconds, and prints a row each time."""

    _HEADING = "    time   steps  steps/s  waiting for data   newest line of the script"

    def __init__(self, child: subprocess.Popen[bytes], run: Path, plan: DemoPlan) -> None:
        self._child = child
        self._run = run
        self._plan = plan
        self._url: str | None = None
        self._before = Reading(0.0, {}, None)
        self._unanswered = False
        self._exposition = ""
        self._shown_exposition = False

    def until_exit(self) -> None:
        """Print rows until the training has ended.

        Raises:
            DemoError: it has no endpoint.
            subprocess.TimeoutExpired: it does not end in time.
        """
        began = time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(self._plan.poll_seconds)
                break
            passed = time.monotonic() - began
            if passed > self._plan.seconds + _MAX_EXTRA_SECONDS:
                raise subprocess.TimeoutExpired(self._child.args, passed)
            self._poll(passed)
        if self._child.returncode == 0:
            self._show_exposition()

    def _poll(self, passed: float) -> None:
        self._url = self._url or self._find_endpoint()
        if self._url is None:
            return
        try:
            self._exposition = fetch(self._url)
        except ScrapeError as error:
            if self._unanswered:  # not the first time: a run closes its endpoint before its process ends
                say(f"  {passed:4.0f} s   {error}")
            self._unanswered = True
            return
        self._unanswered = False
        before, now = self._before, Reading.of(self._exposition)
        new = now.since(before)
        if new.wall_seconds > 0:  # else the agent has published nothing new
            self._before = now
            waiting = "-" if new.waiting_ratio is None else f"{100 * new.waiting_ratio:.0f} %"
            newest = (self._run / "train.out").read_text(errors="replace").splitlines()[-1:]
            row = f"  {passed:4.0f} s  {now.steps:6.0f}  {new.steps / new.wall_seconds:7.1f}  {waiting:>16}   "
            say((row + "".join(newest)).rstrip())
            if now.stall and now.stall != before.stall:
                say(f"          the agent reports a stall: {now.stall}")
        if passed >= self._plan.seconds / 2 and self._before.steps:
            self._show_exposition()

    def _find_endpoint(self) -> str | None:
        """The URL of the metrics, from the first line of the run's log; None while there is none."""
        for log in (self._run / "logs").glob("rank-*.jsonl"):
            with log.open(encoding="utf-8") as lines, contextlib.suppress(ValueError):  # the line is being written
                url: str | None = json.loads(lines.readline()).get("metrics_url")
                if url is None:
                    raise DemoError("the run has no metrics endpoint; `telemetry doctor` says why")
                say(f"   metrics at {url}, log in {log}", "", self._HEADING)
                return url
        return None

    def _show_exposition(self) -> None:
        lines = lines_that_matter(self._exposition)
        if not lines or self._shown_exposition:
            return
        self._shown_exposition = True
        say("", "3. What Prometheus would scrape at this moment (a part of it):", "")
        say(f"   $ curl -s {self._url}", *(f"   {line}" for line in lines), "")
        if self._child.poll() is None:
            say(self._HEADING)


@dataclass(frozen=True)
class Reading:
    """The figures of one rank in one exposition. ``stall``: the cause of the open stall; None without one."""

    steps: float
    ledger_seconds: dict[str, float]
    stall: str | None

    @classmethod
    def of(cls, text: str) -> Reading:
        """Read an exposition."""
        steps, ledger, stall = 0.0, {}, None
        for name, labels, value in samples(text):
            if name == "training_steps_total":
                steps = value
            elif name == "training_time_seconds_total":
                ledger[labels["category"]] = value
            elif name == "training_stall_active" and value:
                stall = labels["cause"]
        return cls(steps, ledger, stall)

    def since(self, before: Reading) -> Reading:
        """The differences to an earlier reading."""
        spent = {c: seconds - before.ledger_seconds.get(c, 0.0) for c, seconds in self.ledger_seconds.items()}
        return Reading(self.steps - before.steps, spent, self.stall)

    @property
    def wall_seconds(self) -> float:
        """Seconds of wall clock: the sum of the ledger."""
        return sum(self.ledger_seconds.values())

    @property
    def waiting_ratio(self) -> float | None:
        """The share of the training loop that waits for data; None without any training."""
        waited = self.ledger_seconds.get("data_wait", 0.0)
        loop = waited + self.ledger_seconds.get("compute", 0.0)
        return waited / loop if loop > 0 else None


_MATTER: Final = re.compile(
    r"training_(time_seconds_total|steps_total|exposed_wait_seconds_total|process_\w+|stall_active"
    r"|gpu_(utilization|sm_active)_ratio)|telemetry_overhead_seconds_total"
)


def lines_that_matter(text: str) -> list[str]:
    """The samples of an exposition that a person should see first, as they were served."""
    return [
        line
        for line in text.splitlines()
        for name, _, value in samples(line)
        if _MATTER.fullmatch(name) and (name != "training_stall_active" or value)
    ]


# -- signals and output --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """The context in which SIGTERM raises KeyboardInterrupt. By default it would kill us and leave the training."""

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def say(*lines: str) -> None:
    """Print lines on the standard output."""
    for line in lines:
        show(f"{line}\n")


def _command_line(*arguments: object) -> str:
    """A telemetry command as a person would type it in this folder. Paths are shortened."""
    found = shutil.which("telemetry")
    on_path = found is not None and Path(found).parent == Path(sys.executable).parent
    program = ["telemetry"] if on_path else [_relative(Path(sys.executable)), "-m", "telemetry"]
    return shlex.join([*program, *(_relative(a) if isinstance(a, Path) else str(a) for a in arguments)])


def _relative(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
