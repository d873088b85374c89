"""``telemetry demo``: trains a small network that starves, with the agent on, and shows what is seen of it.

The training script is started as anybody would start their own; all that is shown is read from the outside, where
a person or Prometheus would read it: the run's log and its metrics endpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
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
from telemetry.demo.outcome import Outcome, outcome
from telemetry.demo.scrape import Reading, ScrapeError, fetch, lines_that_matter
from telemetry.terminal import show

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

SCRIPT: Final = Path(__file__).with_name("train.py")

_EXTRA: Final = (("PIL.Image", "pillow"), ("numpy", "numpy"))
_LOG_INTERVAL_SECONDS: Final = 2
_PATIENCE_SECONDS: Final = 120.0
"""How much longer than its own limit the script may take before it counts as hung."""

_FAREWELL_SECONDS: Final = 5.0
"""How long an interrupted script has to end by itself."""

_INTERRUPTED: Final = 130
"""What a shell reports of a command that Ctrl-C ended."""

_MOST_STDERR_LINES: Final = 100

_SECOND_RUN_SHARE: Final = 0.7
"""How long the run with the advice taken is trained, of the time of the first."""


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How large a demo.

    Attributes:
        pictures: how many to train on; ``width`` and ``height``: how large they are.
        seconds: how long to train.
        look_seconds: between two looks at the run.
        arguments: more of them for the training script.
    """

    pictures: int = 384
    width: int = 512
    height: int = 384
    seconds: float = 25.0
    look_seconds: float = 2.0
    arguments: tuple[str, ...] = ()


def demo(run_dir: str, plan: Plan | None = None) -> int:
    """Run the demo below a folder. Returns the exit status; a Ctrl-C ends the training and then the demo.

    Args:
        run_dir: gets the pictures, which the next demo finds there, and a new folder for each run.
        plan: how large a demo; by default one of about a minute.
    """
    with _terminable():
        try:
            _check()
            return _show(Path(run_dir), plan or Plan())
        except DemoError as error:
            sys.stderr.write(f"telemetry demo: {error}\n")
            return 1
        except BrokenPipeError:
            sys.stdout = None  # the reader has seen enough; and Python is not to flush it again at exit
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


def _show(base: Path, plan: Plan) -> int:
    """The demo from its first line to its last."""
    try:
        run = _new_run_folder(base)
        pictures = _prepare(base, plan)
    except OSError as error:
        raise DemoError(f"cannot write below {base}: {error}") from error
    options: list[object] = ["--run-dir", run, "--log-interval-seconds", _LOG_INTERVAL_SECONDS]
    training: list[object] = [SCRIPT, pictures]
    limits: list[object] = ["--checkpoints", run / "checkpoints", "--seconds", f"{plan.seconds:g}", *plan.arguments]
    arguments = ["run", *options, *training, *limits]
    _say(f"2. Training, with the agent on: {SCRIPT.name} is a plain PyTorch script and knows nothing of it.", "")
    _say(f"   $ {_command(*arguments)}", "")
    with _running([sys.executable, "-m", "telemetry", *map(str, arguments)], run) as child:
        _Watch(child, run, plan).until_it_ends()
    if child.returncode:
        _tell_failure(child.returncode, run / "train.err")
        return 1
    _say("", "4. What its log says afterwards:", "", f"   $ {_command('report', run)}", "")
    from telemetry.report.command import report

    status = report(str(run), as_json=False)
    try:
        applied = _take_the_advice(run, training, plan)
    except _SecondTrainingError:
        return 1
    _suggest(run, training, applied)
    return status


def _new_run_folder(base: Path) -> Path:
    """A folder that was not there before: no demo writes over another's, or over anything else."""
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


def _prepare(base: Path, plan: Plan) -> Path:
    """Draw the pictures, unless they are there. Returns their folder."""
    from telemetry.demo.pictures import PictureSet, ensure

    wanted = PictureSet(plan.pictures, plan.width, plan.height)
    folder = base / wanted.folder_name
    _say(f"1. {wanted.count} JPEG pictures of {wanted.width} x {wanted.height} to train on, in {folder}")
    began = time.monotonic()
    drawn = ensure(folder, wanted)
    _say(f"   drawn in {time.monotonic() - began:.1f} s" if drawn else "   they are there from an earlier demo", "")
    return folder


# -- the child -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _running(command: list[str], run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The training process, its output in files; however this is left, the process does not outlive it.

    It gets a session of its own: so a Ctrl-C reaches us alone, and it is we who end it, its workers included.
    """
    with (run / "train.out").open("wb") as output, (run / "train.err").open("wb") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask as Ctrl-C would, so that the agent can write its last line; then insist."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(_FAREWELL_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Within, SIGTERM is as good as Ctrl-C: Python would die of it at once, and leave the training behind."""
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


def _tell_failure(status: int, errors: Path) -> None:
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    written = errors.read_text(errors="replace").splitlines()[-_MOST_STDERR_LINES:]
    sys.stdout.flush()
    sys.stderr.write("\n".join(["", f"telemetry demo: the training {how}; its stderr:", *written, ""]))


# -- what is seen while it runs --------------------------------------------------------------------------------


class _Watch:
    """Looks at a run every few seconds, and prints a row of what it sees."""

    _HEADING = "    time   steps  steps/s  waiting for data  step p50   most time in   newest line of the script"

    def __init__(self, child: subprocess.Popen[bytes], run: Path, plan: Plan) -> None:
        self._child = child
        self._run = run
        self._plan = plan
        self._began = time.monotonic()
        self._url: str | None = None
        self._before = Reading(0.0, {}, (), None)
        self._unanswered = False
        self._exposition = ""
        self._shown_exposition = False

    def until_it_ends(self) -> None:
        """Watch until the script has ended.

        Raises:
            DemoError: it does not end.
        """
        while True:
            try:
                self._child.wait(self._plan.look_seconds)
                break
            except subprocess.TimeoutExpired:
                pass
            passed = time.monotonic() - self._began
            if passed > self._plan.seconds + _PATIENCE_SECONDS:
                raise DemoError(f"the training has not ended in {passed:.0f} s, and was ended; see {self._run}")
            self._look(passed)
        if self._child.returncode == 0 and not self._shown_exposition:
            self._show_exposition()

    def _look(self, passed: float) -> None:
        if self._url is None:
            self._find_endpoint()
        if self._url is None:
            return
        try:
            self._exposition = fetch(self._url)
        except ScrapeError as error:
            if self._unanswered:  # once is no news: while the run ends, its endpoint is gone before its process
                _say(f"  {passed:4.0f} s   {error}")
            self._unanswered = True
            return
        self._unanswered = False
        self._row(passed, Reading.of(self._exposition))
        if not self._shown_exposition and passed >= self._plan.seconds / 2 and self._before.steps:
            self._show_exposition()

    def _find_endpoint(self) -> None:
        """Where the metrics are stands in the first line of the run's log."""
        for log in (self._run / "logs").glob("rank-*.jsonl"):
            with log.open(encoding="utf-8") as lines, contextlib.suppress(ValueError):  # the line is being written
                head = json.loads(lines.readline())
                self._url = head.get("metrics_url")
                if self._url is None:
                    raise DemoError("the run has no metrics endpoint; `telemetry doctor` says why")
                _say(f"   metrics at {self._url}, log in {log}", "", self._HEADING)

    def _row(self, passed: float, now: Reading) -> None:
        """What has happened since the last row."""
        stalled_before = self._before.stall
        new, self._before = now.since(self._before), now
        seconds = new.wall_seconds
        if seconds <= 0:
            return  # the agent has published nothing new
        rate = f"{new.steps / seconds:.1f}"
        waiting = "-" if new.waiting_ratio is None else f"{100 * new.waiting_ratio:.0f} %"
        median = "-" if new.median_step_seconds is None else f"{1e3 * new.median_step_seconds:.0f} ms"
        most = max(new.ledger_seconds, key=lambda category: new.ledger_seconds[category]).replace("_", " ")
        row = (
            f"  {passed:4.0f} s  {now.steps:6.0f}  {rate:>7}  {waiting:>16}  {median:>8}   {most:<12}   {self._said()}"
        )
        _say(row.rstrip())
        if now.stall and now.stall != stalled_before:
            _say(f"          a stall, says the agent: {now.stall}")

    def _said(self) -> str:
        lines = (self._run / "train.out").read_text(errors="replace").splitlines()
        return lines[-1] if lines else ""

    def _show_exposition(self) -> None:
        lines = lines_that_matter(self._exposition)
        if lines:
            self._shown_exposition = True
            _say("", "3. What Prometheus would scrape at this moment (a part of it):", "")
            _say(f"   $ curl -s {self._url}", *(f"   {line}" for line in lines), "")
            if self._child.poll() is None:
                _say(self._HEADING)


# -- the end ---------------------------------------------------------------------------------------------------


class _SecondTrainingError(Exception):
    """It has failed, and that has been told."""


def _take_the_advice(run: Path, training: list[object], plan: Plan) -> Path | None:
    """Train again with the number of workers advised, and compare. Returns the folder of that run, None without one."""
    first = outcome(run)
    if first.workers is None or first.predicted_speedup is None or not first.steps_per_second:
        _say("", "5. No stall has asked for workers in so short a run, so there is no prediction to try.")
        return None
    second = run.with_name(f"{run.name}-{first.workers}-workers")
    seconds = max(1.0, _SECOND_RUN_SHARE * plan.seconds)
    again: list[object] = [*training, "--num-workers", first.workers, "--seconds", f"{seconds:g}", *plan.arguments]
    _say("", f"5. Taking the advice, num_workers={first.workers}, for {seconds:.0f} s:", "")
    arguments = ["run", "--run-dir", second, *again]
    _say(f"   $ {_command(*arguments)}", "")
    second.mkdir()
    with _running([sys.executable, "-m", "telemetry", *map(str, arguments)], second) as child:
        try:
            child.wait(seconds + _PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the second training has not ended, and was ended; see {second}") from None
    if child.returncode:
        _tell_failure(child.returncode, second / "train.err")
        raise _SecondTrainingError
    _compare(first, outcome(second))
    return second


def _compare(first: Outcome, second: Outcome) -> None:
    if not first.steps_per_second or not second.steps_per_second:
        return
    _say(
        "                 steps per second of the training loop",
        f"   no workers                 {first.steps_per_second:6.1f}",
        f"   {first.workers} workers                  {second.steps_per_second:6.1f}",
        f"   speed-up: predicted {first.predicted_speedup:.2f}, "
        f"realised {second.steps_per_second / first.steps_per_second:.2f}",
    )


def _suggest(run: Path, training: list[object], applied: Path | None) -> None:
    second = applied or run.with_name(f"{run.name}-two-workers")
    tried = [f"   $ {_command('run', '--run-dir', second, *training, '--num-workers', 2)}"] if applied is None else []
    _say(
        "",
        "6. What to try now",
        "",
        "   the report of a run with workers:",
        *tried,
        f"   $ {_command('report', second)}",
        "   a script of your own, unchanged:",
        f"   $ {_command('run', '--run-dir', 'runs/first', 'SCRIPT.py', 'ARGS...')}",
        "   this report for a program to read, and the log it was made from:",
        f"   $ {_command('report', run, '--json')}",
        f"   $ head -n 3 {shlex.quote(str(run / 'logs'))}/*.jsonl",
        "   what else would work on this machine, and why not:",
        f"   $ {_command('doctor')}",
    )


def _command(*arguments: object) -> str:
    """A command of ours as one would type it here."""
    found = shutil.which("telemetry")
    on_path = found is not None and Path(found).parent == Path(sys.executable).parent
    program = ["telemetry"] if on_path else [_short(Path(sys.executable)), "-m", "telemetry"]
    return shlex.join([*program, *(_short(a) if isinstance(a, Path) else str(a) for a in arguments)])


def _short(path: Path) -> str:
    """A path without what it shares with the current folder."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _say(*lines: str) -> None:
    for line in lines:
        show(f"{line}\n")
