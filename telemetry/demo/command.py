"""``telemetry demo``: trains a small network that waits for its data, and shows what the agent sees.

The training script is started like any other. Everything that is shown is read from the run's log and from its metrics
endpoint, as a person or Prometheus would read it.
"""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from telemetry.config import disabled
from telemetry.demo.console import command_line, say
from telemetry.demo.demo_outcome import DemoOutcome, outcome
from telemetry.demo.demo_plan import DemoError, DemoPlan
from telemetry.demo.live_view import MAX_EXTRA_SECONDS, LiveView
from telemetry.demo.training_process import report_failure, sigterm_as_ctrl_c, training_process

SCRIPT: Final = Path(__file__).with_name("train.py")

_EXTRA: Final = (("PIL.Image", "pillow"), ("numpy", "numpy"))
_LOG_INTERVAL_SECONDS: Final = 2
_INTERRUPTED: Final = 130
"""The exit status that a shell gives a command that Ctrl-C ended."""

_SECOND_RUN_RATIO: Final = 0.7
"""How long the second training takes, relative to the first."""


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
