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
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.config import disabled
from telemetry.diagnosis.verdict import costliest_of
from telemetry.report.logs import load
from telemetry.report.summary import summarize
from telemetry.top.endpoints import ScrapeError, fetch, samples
from telemetry.util.text import show

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

SCRIPT: Final = Path(__file__).with_name("train.py")

_EXTRA: Final = (("PIL.Image", "pillow"), ("numpy", "numpy"))
_LOG_INTERVAL_SECONDS: Final = 2
_INTERRUPTED: Final = 130
"""The exit status that a shell gives a command that Ctrl-C ended."""

_SECOND_RUN_RATIO: Final = 0.7
"""How long the second training takes, relative to the first."""


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """How large a demo is.

    Attributes:
        pictures: how many pictures to train on.
        width, height: their size in pixels.
        seconds: how long to train.
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
        plan: how large the demo is; by default it takes about a minute.
    """
    with sigterm_as_ctrl_c():
        try:
            _check()
            return _show(Path(run_dir), plan or DemoPlan())
        except DemoError as error:
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


def _show(base: Path, plan: DemoPlan) -> int:
    """Run the whole demo. Returns the exit status."""
    try:
        run = _new_run_folder(base)
        pictures = _prepare(base, plan)
    except OSError as error:
        raise DemoError(f"cannot write below {base}: {error}") from error
    options: list[object] = ["--run-dir", run, "--log-interval-seconds", _LOG_INTERVAL_SECONDS]
    training: list[object] = [SCRIPT, pictures]
    limits: list[object] = ["--checkpoints", run / "checkpoints", "--seconds", f"{plan.seconds:g}", *plan.arguments]
    arguments = ["run", *options, *training, *limits]
    say(f"2. Training, with the agent on. {SCRIPT.name} is a plain PyTorch script that does not mention the agent.", "")
    say(f"   $ {command_line(*arguments)}", "")
    with training_process([*map(str, arguments)], run) as child:
        LiveView(child, run, plan).until_exit()
    if child.returncode:
        report_failure(child.returncode, run / "train.err")
        return 1
    say("", "4. What its log says afterwards:", "", f"   $ {command_line('report', run)}", "")
    from telemetry.report.command import report

    status = report(str(run), as_json=False)
    try:
        applied = _follow_advice(run, training, plan)
    except _SecondTrainingError:
        return 1
    _suggest(run, training, applied)
    return status or _write_page(run)


def _write_page(run: Path) -> int:
    """Write the report of the first training as a page. Returns the exit status."""
    from telemetry.report.command import PageError, page_recorder, report

    say("", "7. The report as a page, to open in a browser or to send to somebody:", "")
    try:
        page_recorder()
    except PageError as error:
        say(f"   it was not written: {error}")
        return 0
    return report(str(run), as_json=False, html=str(run / "report.html"))


def _new_run_folder(base: Path) -> Path:
    """Make a folder that did not exist before, so that no demo overwrites anything."""
    base.mkdir(parents=True, exist_ok=True)
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


class _SecondTrainingError(Exception):
    """The second training has failed, and the reason is printed."""


def _follow_advice(run: Path, training: list[object], plan: DemoPlan) -> Path | None:
    """Train again with the advised number of workers, and compare. Returns the new run folder; None without advice."""
    first = outcome(run)
    if first.workers is None or first.predicted_speedup is None or not first.steps_per_second:
        say("", "5. In so short a run no stall has led to advice on the number of workers, so this part is skipped.")
        return None
    second = run.with_name(f"{run.name}-{first.workers}-workers")
    seconds = max(1.0, _SECOND_RUN_RATIO * plan.seconds)
    again: list[object] = [*training, "--num-workers", first.workers, "--seconds", f"{seconds:g}", *plan.arguments]
    say("", f"5. Taking the advice, num_workers={first.workers}, for {seconds:.0f} s:", "")
    arguments = ["run", "--run-dir", second, *again]
    say(f"   $ {command_line(*arguments)}", "")
    second.mkdir()
    with training_process([*map(str, arguments)], second) as child:
        try:
            child.wait(seconds + MAX_EXTRA_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the second training has not ended, and was ended; see {second}") from None
    if child.returncode:
        report_failure(child.returncode, second / "train.err")
        raise _SecondTrainingError
    _compare(first, outcome(second))
    return second


def _compare(first: DemoOutcome, second: DemoOutcome) -> None:
    if not first.steps_per_second or not second.steps_per_second:
        return
    say(
        "                 steps per second of the training loop",
        f"   no workers                 {first.steps_per_second:6.1f}",
        f"   {first.workers} workers                  {second.steps_per_second:6.1f}",
        f"   speed-up: predicted {first.predicted_speedup:.2f}, "
        f"realised {second.steps_per_second / first.steps_per_second:.2f}",
    )


def _suggest(run: Path, training: list[object], applied: Path | None) -> None:
    second = applied or run.with_name(f"{run.name}-two-workers")
    tried = (
        [f"   $ {command_line('run', '--run-dir', second, *training, '--num-workers', 2)}"] if applied is None else []
    )
    say(
        "",
        "6. What to try now",
        "",
        "   the report of a run with workers:",
        *tried,
        f"   $ {command_line('report', second)}",
        "   a script of your own, unchanged:",
        f"   $ {command_line('run', '--run-dir', 'runs/first', 'SCRIPT.py', 'ARGS...')}",
        "   this report for a program to read, and the log it was made from:",
        f"   $ {command_line('report', run, '--json')}",
        f"   $ head -n 3 {shlex.quote(str(run / 'logs'))}/*.jsonl",
        "   what else would work on this machine, and why not:",
        f"   $ {command_line('doctor')}",
    )


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """What one run came to.

    Attributes:
        steps_per_second: steps per second of training loop (wait and compute from the first batch on); None without
            a step.
        workers: the ``num_workers`` that the costliest stall's first advice names; None if it names none.
        predicted_speedup: the factor on the steps per second that this advice predicts; None if it predicts none.
    """

    steps_per_second: float | None
    workers: int | None
    predicted_speedup: float | None


def outcome(run: Path) -> DemoOutcome:
    """Read a run's log.

    Raises:
        telemetry.report.log_files.NoRunError: there is no log.
    """
    processes = load(run)
    report = summarize(processes)
    rank, first_wait = report["ranks"][-1], processes[-1].totals.get("first_wait_seconds")
    loop = rank["ledger"]["data_wait"] + rank["ledger"]["compute"]
    loop -= first_wait if isinstance(first_wait, float) else 0.0
    rate = rank["steps"] / loop if rank["steps"] and loop > 0 else None
    stall = costliest_of(rank["rank"], report["stalls"])
    advice = stall["advice"][0] if stall is not None and stall["advice"] else {}
    if advice.get("setting") != "num_workers":
        return DemoOutcome(rate, None, None)
    return DemoOutcome(rate, int(advice["value"]), advice.get("predicted_speedup"))


MAX_EXTRA_SECONDS: Final = 120.0
"""How much longer than planned a training may take before it counts as hung."""


class LiveView:
    """Polls the metrics of a running training every few seconds, and prints a row each time.

    Args:
        child: the training.
        run: its run folder.
        plan: how often to poll, and how long the training takes.
    """

    _HEADING = "    time   steps  steps/s  waiting for data  step p50   most time in   newest line of the script"

    def __init__(self, child: subprocess.Popen[bytes], run: Path, plan: DemoPlan) -> None:
        self._child = child
        self._run = run
        self._plan = plan
        self._began = time.monotonic()
        self._url: str | None = None
        self._before = Reading(0.0, {}, (), None)
        self._unanswered = False
        self._exposition = ""
        self._shown_exposition = False

    def until_exit(self) -> None:
        """Print rows until the training has ended.

        Raises:
            DemoError: it does not end in time.
        """
        while True:
            try:
                self._child.wait(self._plan.poll_seconds)
                break
            except subprocess.TimeoutExpired:
                pass
            passed = time.monotonic() - self._began
            if passed > self._plan.seconds + MAX_EXTRA_SECONDS:
                raise DemoError(f"the training has not ended in {passed:.0f} s, and was ended; see {self._run}")
            self._poll(passed)
        if self._child.returncode == 0 and not self._shown_exposition:
            self._show_exposition()

    def _poll(self, passed: float) -> None:
        if self._url is None:
            self._find_endpoint()
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
        self._row(passed, Reading.of(self._exposition))
        if not self._shown_exposition and passed >= self._plan.seconds / 2 and self._before.steps:
            self._show_exposition()

    def _find_endpoint(self) -> None:
        """Read the URL of the metrics from the first line of the run's log."""
        for log in (self._run / "logs").glob("rank-*.jsonl"):
            with log.open(encoding="utf-8") as lines, contextlib.suppress(ValueError):  # the line is being written
                head = json.loads(lines.readline())
                self._url = head.get("metrics_url")
                if self._url is None:
                    raise DemoError("the run has no metrics endpoint; `telemetry doctor` says why")
                say(f"   metrics at {self._url}, log in {log}", "", self._HEADING)

    def _row(self, passed: float, now: Reading) -> None:
        """Print what has happened since the last row."""
        stalled_before = self._before.stall
        new, self._before = now.since(self._before), now
        seconds = new.wall_seconds
        if seconds <= 0:
            return  # the agent has published nothing new
        rate = f"{new.steps / seconds:.1f}"
        waiting = "-" if new.waiting_ratio is None else f"{100 * new.waiting_ratio:.0f} %"
        median = "-" if new.median_step_seconds is None else f"{1e3 * new.median_step_seconds:.0f} ms"
        most = max(new.ledger_seconds, key=lambda category: new.ledger_seconds[category]).replace("_", " ")
        row = f"  {passed:4.0f} s  {now.steps:6.0f}  {rate:>7}  {waiting:>16}  {median:>8}   {most:<12}   "
        say((row + self._newest_output()).rstrip())
        if now.stall and now.stall != stalled_before:
            say(f"          the agent reports a stall: {now.stall}")

    def _newest_output(self) -> str:
        lines = (self._run / "train.out").read_text(errors="replace").splitlines()
        return lines[-1] if lines else ""

    def _show_exposition(self) -> None:
        lines = lines_that_matter(self._exposition)
        if lines:
            self._shown_exposition = True
            say("", "3. What Prometheus would scrape at this moment (a part of it):", "")
            say(f"   $ curl -s {self._url}", *(f"   {line}" for line in lines), "")
            if self._child.poll() is None:
                say(self._HEADING)


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of one exposition of one rank that the demo shows.

    Attributes:
        steps: how many steps have ended.
        ledger_seconds: seconds by category; their sum is the wall clock of the run.
        buckets: histogram of the step duration: upper bounds in seconds, and how many steps took no longer.
        stall: the cause of the open stall; None without one.
    """

    steps: float
    ledger_seconds: dict[str, float]
    buckets: tuple[tuple[float, float], ...]
    stall: str | None

    @classmethod
    def of(cls, text: str) -> Reading:
        """Read an exposition."""
        steps, ledger, buckets, stall = 0.0, {}, [], None
        for name, labels, value in samples(text):
            if name == "training_steps_total":
                steps = value
            elif name == "training_time_seconds_total":
                ledger[labels["category"]] = value
            elif name == "training_step_duration_seconds_bucket":
                buckets.append((float(labels["le"]), value))
            elif name == "training_stall_active" and value:
                stall = labels["cause"]
        return cls(steps, ledger, tuple(buckets), stall)

    def since(self, before: Reading) -> Reading:
        """The differences to an earlier reading."""
        spent = before.ledger_seconds
        earlier = dict(before.buckets)
        return Reading(
            self.steps - before.steps,
            {category: seconds - spent.get(category, 0.0) for category, seconds in self.ledger_seconds.items()},
            tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in self.buckets),
            self.stall,
        )

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

    @property
    def median_step_seconds(self) -> float | None:
        """The p50 of the step duration as PromQL's ``histogram_quantile`` computes it; None without a step."""
        half = self.buckets[-1][1] / 2 if self.buckets else 0.0
        if half <= 0:
            return None
        for (low, below), (high, up_to) in pairwise(((0.0, 0.0), *self.buckets)):
            if up_to >= half:
                # The last bucket has no upper bound: the step is longer than the bound before, and no more is known.
                return low if high == float("inf") else low + (high - low) * (half - below) / (up_to - below)
        return None


_MATTER: Final = re.compile(
    r"training_(time_seconds_total|steps_total|exposed_wait_seconds_total|process_\w+|stall_active"
    r"|gpu_(utilization|sm_active)_ratio)|telemetry_overhead_seconds_total"
)


def lines_that_matter(text: str) -> list[str]:
    """The samples of an exposition that a person should see first, as they were served."""
    shown = []
    for line in text.splitlines():
        for name, _, value in samples(line):
            quiet = name == "training_stall_active" and value == 0
            if _MATTER.fullmatch(name) and not quiet:
                shown.append(line)
    return shown


_EXIT_SECONDS: Final = 5.0
"""How long an interrupted training may take to end by itself."""

_MAX_STDERR_LINES: Final = 100


@contextlib.contextmanager
def training_process(arguments: list[str], run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``telemetry ARGUMENTS`` with its output in files. It is ended when the context is left.

    It gets a session of its own. So Ctrl-C reaches the demo alone, and the demo ends the training with its workers.

    Args:
        arguments: arguments of the command line.
        run: the run folder; it gets ``train.out`` and ``train.err``.
    """
    command = [sys.executable, "-m", "telemetry", *arguments]
    quiet = os.environ | {"TELEMETRY_END_LINE": "off"}
    with (run / "train.out").open("wb") as output, (run / "train.err").open("wb") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=quiet, start_new_session=True
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Interrupt the training, so that the agent can write its last line; kill it if that times out."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """The context in which SIGTERM raises KeyboardInterrupt. By default it would kill us and leave the training."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise KeyboardInterrupt


def report_failure(status: int, errors: Path) -> None:
    """Print how a training ended that failed, and the end of its stderr.

    Args:
        status: its exit status; negative for a signal.
        errors: the file with its stderr.
    """
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    written = errors.read_text(errors="replace").splitlines()[-_MAX_STDERR_LINES:]
    sys.stdout.flush()
    sys.stderr.write("\n".join(["", f"telemetry demo: the training {how}; its stderr:", *written, ""]))


def say(*lines: str) -> None:
    """Print lines on the standard output."""
    for line in lines:
        show(f"{line}\n")


def command_line(*arguments: object) -> str:
    """A telemetry command as a person would type it in this folder. Paths are shortened."""
    found = shutil.which("telemetry")
    on_path = found is not None and Path(found).parent == Path(sys.executable).parent
    program = ["telemetry"] if on_path else [_relative(Path(sys.executable)), "-m", "telemetry"]
    return shlex.join([*program, *(_relative(a) if isinstance(a, Path) else str(a) for a in arguments)])


def _relative(path: Path) -> str:
    """A path below the current folder relative to it; any other as it is."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
