"""``telemetry demo``: trains a small network that waits for its data, and shows what the agent sees.

The training script is started like any other, and what is shown is what the other commands print of its run.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from telemetry.report.command import PageError, page_recorder, report
from telemetry.report.logs import NoRunError, load
from telemetry.report.process_log import stalls_of
from telemetry.top.command import top
from telemetry.util.processes import disabled
from telemetry.util.text import show, warn

SCRIPT: Final = Path(__file__).with_name("train.py")

_EXTRA: Final = (("PIL.Image", "pillow"), ("numpy", "numpy"))
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
        pictures: number of pictures to train on. ``width``, ``height``: their size in pixels.
        seconds: duration of the training.
        arguments: further arguments of the training script.
    """

    pictures: int = 384
    width: int = 512
    height: int = 384
    seconds: float = 25.0
    arguments: tuple[str, ...] = ()


def demo(run_dir: str, plan: DemoPlan | None = None) -> int:
    """Run the demo. Returns the exit status. Ctrl-C ends the training and then the demo.

    Args:
        run_dir: the folder for the pictures, which the next demo uses again, and for a new run folder each time.
        plan: size of the demo; by default it takes about a minute.
    """
    try:
        _check()
        return _show(Path(run_dir), plan or DemoPlan())
    except DemoError as error:
        sys.stdout.flush()
        warn(f"telemetry demo: {error}\n")
        return 1
    except KeyboardInterrupt:
        warn("\ntelemetry demo: interrupted; the training was ended\n")
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


# -- the parts of the demo ---------------------------------------------------------------------------------------------


def _show(base: Path, plan: DemoPlan) -> int:
    try:
        base.mkdir(parents=True, exist_ok=True)
        run = _new_run_folder(base)
        training = [str(SCRIPT), str(_prepare(base, plan))]
    except OSError as error:
        raise DemoError(f"cannot write below {base}: {error}") from error
    say(f"2. Training, with the agent on. {SCRIPT.name} is a plain PyTorch script that does not mention the agent.", "")
    _train([*training, "--checkpoints", str(run / "checkpoints")], run, plan, plan.seconds, look=True)
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
    while (base / f"demo-{number}").exists():
        number += 1
    folder = base / f"demo-{number}"
    folder.mkdir()
    return folder


def _prepare(base: Path, plan: DemoPlan) -> Path:
    """Draw the pictures, unless an earlier demo has. Returns their folder."""
    from telemetry.demo.pictures import draw_missing

    size = f"{plan.width} x {plan.height}"
    folder = base / f"pictures-{plan.pictures}-{plan.width}x{plan.height}"
    say(f"1. {plan.pictures} JPEG pictures of {size} to train on, in {folder}")
    began = time.monotonic()
    drawn = draw_missing(folder, plan.pictures, plan.width, plan.height)
    say(f"   drawn in {time.monotonic() - began:.1f} s" if drawn else "   they are there from an earlier demo", "")
    return folder


def _follow_advice(run: Path, training: list[str], plan: DemoPlan) -> Path | None:
    """Train again with the advised number of workers, and compare. Returns the new run folder; None without advice."""
    first = outcome(run)
    if first.workers is None or first.predicted_speedup is None or not first.steps_per_second:
        say("", "5. In so short a run no stall has led to advice on the number of workers, so this part is skipped.")
        return None
    second = run.with_name(f"{run.name}-{first.workers}-workers")
    seconds = max(1.0, _SECOND_RUN_RATIO * plan.seconds)
    say("", f"5. Taking the advice, num_workers={first.workers}, for {seconds:.0f} s:", "")
    second.mkdir()
    _train([*training, "--num-workers", str(first.workers)], second, plan, seconds)
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


# -- one training, and what the other commands show while it runs ------------------------------------------------------


def _train(arguments: list[str], run: Path, plan: DemoPlan, seconds: float, *, look: bool = False) -> None:
    """Run the script with the agent on, with its output in ``train.out`` and ``train.err`` of the run folder.

    It gets a session of its own. So Ctrl-C reaches the demo alone, and the demo ends the training with its workers.

    Args:
        arguments: the script and its arguments.
        run: the run folder.
        plan: it has further arguments of the script.
        seconds: duration of the training.
        look: whether to show the run after half of this time.

    Raises:
        DemoError: it failed, or did not end in time.
    """
    typed = ["run", "--run-dir", run, "--log-interval-seconds", 2, *arguments, "--seconds", f"{seconds:g}"]
    typed += plan.arguments
    say(f"   $ {_command_line(*typed)}", "")
    with (run / "train.out").open("wb") as output, (run / "train.err").open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "telemetry", *map(str, typed)], stdin=subprocess.DEVNULL, stdout=output,
            stderr=errors, env=os.environ | {"TELEMETRY_END_LINE": "off"}, start_new_session=True,
        )  # fmt: skip
    try:
        if look:
            _look_at(child, run, seconds / 2)
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
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _look_at(child: subprocess.Popen[bytes], run: Path, seconds: float) -> None:
    """Let the training run for so long, and show what the live view and Prometheus would see."""
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        say("3. What one sees of it meanwhile:", "", f"   $ {_command_line('top', '--once', run)}", "")
        top(str(run), once=True)
        try:
            url = load(run)[-1].head.metrics_url
            lines = lines_that_matter(_served(url)) if url else []
        except (NoRunError, OSError):  # it has not started, or has ended at this moment
            lines = []
        if lines:
            say("", "   and what Prometheus would scrape (a part of it):", "", f"   $ curl -s {url}")
            say(*(f"   {line}" for line in lines))


_MATTER: Final = re.compile(
    r"training_(time_seconds_total|steps_total|exposed_wait_seconds_total|process_\w+|stall_active"
    r"|gpu_(utilization|sm_active)_ratio)\b|telemetry_overhead_seconds_total\b"
)
_without_proxy: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _served(url: str) -> str:
    """What an endpoint on this machine serves.

    Raises:
        OSError: it does not answer.
    """
    with _without_proxy.open(url, timeout=_EXIT_SECONDS) as answer:
        return bytes(answer.read()).decode()


def lines_that_matter(text: str) -> list[str]:
    """The samples of an exposition that a person should see first, as they were served."""
    lines = [line for line in text.splitlines() if _MATTER.match(line)]
    return [line for line in lines if not line.startswith("training_stall_active") or float(line.rpartition(" ")[2])]


def say(*lines: str) -> None:
    """Print lines on the standard output."""
    for line in lines:
        show(f"{line}\n")


def _command_line(*arguments: object) -> str:
    """A telemetry command as a person would type it."""
    program = ["telemetry"] if shutil.which("telemetry") else [sys.executable, "-m", "telemetry"]
    return shlex.join([*program, *map(str, arguments)])
