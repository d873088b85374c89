"""``telemetry demo``: trains a small network that waits for its data, and shows what the agent sees.

The training script is started like any other, and what is shown is what the other commands print of its run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.compare import compare
from telemetry.log.reader import NoRunError
from telemetry.report.report_command import PageError, page_recorder, report
from telemetry.report.summary import read_report
from telemetry.safety.processes import disabled
from telemetry.top.command import top
from telemetry.util.words import show, warn

if TYPE_CHECKING:
    from telemetry.model.records import Advice

SCRIPT: Final = Path(__file__).with_name("train.py")

_SECOND_RUN_RATIO: Final = 0.7
"""Duration of the second training, relative to the first."""

_MAX_EXTRA_SECONDS: Final = 120.0
"""A training that takes this much longer than planned counts as hung."""

_EXIT_SECONDS: Final = 5.0
"""Time in which an interrupted training may end by itself."""

_MAX_STDERR_LINES: Final = 100


class DemoError(Exception):
    """The demo cannot go on; the text has the reason."""


class DemoPlan(NamedTuple):
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
        return _show(Path(run_dir), plan or DemoPlan())
    except DemoError as error:
        sys.stdout.flush()
        warn(f"telemetry demo: {error}\n")
        return 1
    except KeyboardInterrupt:
        warn("\ntelemetry demo: interrupted; the training was ended\n")
        return 128 + signal.SIGINT


def _show(base: Path, plan: DemoPlan) -> int:
    """The parts of the demo, one after the other."""
    run, pictures = _prepare(base, plan)
    training = [str(SCRIPT), str(pictures), *plan.arguments]
    say(f"2. Training, with the agent on. {SCRIPT.name} is a plain PyTorch script that does not mention the agent.", "")
    _train(run, [*training, "--checkpoints", str(run / "checkpoints")], plan.seconds, look=True)
    say("", "4. What its log says afterwards:", "", _command_line("report", run), "")
    status = report(str(run), as_json=False)
    tried = _follow_advice(run, training, plan)
    say("", "6. What to try now:", "", *([_command_line("report", tried)] if tried else []))
    say(_command_line("report", run, "--json"), _command_line("doctor"))
    say(_command_line("run", "--run-dir", "runs/first", "SCRIPT.py", "ARGS..."))
    say("", "7. The report as a page, to open in a browser or to send to somebody:", "")
    try:
        page_recorder()
    except PageError as error:
        say(f"   it was not written: {error}")
        return status
    return status or report(str(run), as_json=False, html=str(run / "report.html"))


def _prepare(base: Path, plan: DemoPlan) -> tuple[Path, Path]:
    """Make a run folder that did not exist before, and the pictures, unless an earlier demo has. Returns both."""
    try:
        from telemetry.demo.pictures import draw_missing
    except ImportError:
        raise DemoError("needs pillow and numpy: pip install 'torch-telemetry[demo]'") from None
    if disabled():
        raise DemoError("TELEMETRY_DISABLED is set, so there would be nothing to see: unset it")
    number = 1
    while (base / f"demo-{number}").exists():
        number += 1
    run, pictures = base / f"demo-{number}", base / f"pictures-{plan.pictures}-{plan.width}x{plan.height}"
    try:
        run.mkdir(parents=True)
        say(f"1. {plan.pictures} JPEG pictures of {plan.width} x {plan.height} to train on, in {pictures}")
        drawn = draw_missing(pictures, plan.pictures, plan.width, plan.height)
    except OSError as error:
        raise DemoError(f"cannot write below {base}: {error}") from error
    say("" if drawn else "   they are there from an earlier demo\n")
    return run, pictures


def _follow_advice(run: Path, training: list[str], plan: DemoPlan) -> Path | None:
    """Train again with the advised number of workers, and compare. Returns the new run folder; None without advice."""
    advice = advised(run)
    if advice is None:
        say("", "5. In so short a run no stall has led to advice on the number of workers, so this part is skipped.")
        return None
    second = run.with_name(f"{run.name}-{advice.value}-workers")
    second.mkdir()
    gain = f"{advice.predicted_speedup:.2f} times the steps per second"
    say("", f"5. Taking the advice, {advice.typed}, which predicts {gain} in the training loop:", "")
    _train(second, [*training, "--num-workers", str(advice.value)], max(1.0, _SECOND_RUN_RATIO * plan.seconds))
    say(_command_line("compare", run, second), "")
    compare(str(run), str(second), as_json=False, fail_over=None)
    return second


def advised(run: Path) -> Advice | None:
    """The first advice in the report of a run about the number of workers, with a prediction; None without one."""
    given = read_report(run, traces=False).values.advice
    return next((each for each in given if each.setting == "num_workers" and each.predicted_speedup), None)


# -- one training, and what the other commands show while it runs ------------------------------------------------------


def _train(run: Path, script: list[str], seconds: float, *, look: bool = False) -> None:
    """Run the script with the agent on, with its output in ``train.out`` and ``train.err`` of the run folder.

    It gets a session of its own. So Ctrl-C reaches the demo alone, and the demo ends the training with its workers.

    Args:
        run: the run folder.
        script: the script and its arguments.
        seconds: duration of the training.
        look: whether to show the run after half of this time.

    Raises:
        DemoError: it failed, or did not end in time.
    """
    typed = ["run", "--run-dir", str(run), "--log-interval-seconds", "2", *script, "--seconds", f"{seconds:g}"]
    say(_command_line(*typed), "")
    interrupts: list[int] = []
    # An exception while the child starts would leave it running.
    before = signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    with (run / "train.out").open("wb") as output, (run / "train.err").open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "telemetry", *typed], stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            env=os.environ | {"TELEMETRY_END_LINE": "off"}, start_new_session=True,
        )  # fmt: skip
    try:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            raise KeyboardInterrupt
        if look:
            _look_at(child, run, seconds / 2)
        child.wait(seconds + _MAX_EXTRA_SECONDS)
    except subprocess.TimeoutExpired:
        raise DemoError(f"the training has not ended, and was ended; see {run}") from None
    finally:
        if child.poll() is None:
            _end(child)
    if child.returncode:
        written = (run / "train.err").read_text(errors="replace").splitlines()[-_MAX_STDERR_LINES:]
        status = child.returncode
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
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
        say("3. What one sees of it meanwhile:", "", _command_line("top", "--once", run), "")
        top(str(run), once=True)
        try:
            url = read_report(run, traces=False).now[-1].head.metrics_url
            lines = _served(url) if url else []
        except (NoRunError, OSError):  # it has not started, or has ended at this moment
            lines = []
        if lines:
            say("", "   and what Prometheus would scrape (a part of it):", "", f"   $ curl -s {url}")
            say(*(f"   {line}" for line in lines))


_MATTER: Final = re.compile(
    r"^(?:training_(?:time_seconds_total|steps_total|exposed_wait_seconds_total|process_\w+"
    r"|gpu_(?:utilization|sm_active)_ratio)|telemetry_overhead_seconds_total)\b.*|^training_stall_active.* 1(?:\.0)?$",
    re.MULTILINE,
)
"""Samples that a person should see first. Of the causes of stalls that of an open one."""


def _served(url: str) -> list[str]:
    """Some lines of an endpoint on this machine. Raises OSError if it does not answer."""
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with without_proxy.open(url, timeout=_EXIT_SECONDS) as answer:
        return _MATTER.findall(answer.read().decode())


def say(*lines: str) -> None:
    """Print lines on the standard output."""
    for line in lines:
        show(f"{line}\n")


def _command_line(*arguments: object) -> str:
    """A telemetry command as a person would type it."""
    program = ["telemetry"] if shutil.which("telemetry") else [sys.executable, "-m", "telemetry"]
    return f"   $ {shlex.join([*program, *map(str, arguments)])}"
