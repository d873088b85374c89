"""Takes the pictures of docs/views.md: ``python docs/tools/pictures.py [NAME ...]``. All of them take ten minutes.

``html-*.png`` are upper parts of pages of `report --html` in Chromium. ``top-*.svg`` are screens of `telemetry top` in
tmux, of a job of four ranks on two nodes with one slow loader. Pictures of 1,000 ranks are of simulated ones. Needs
tmux, Chromium, and the extras ``html``, ``top`` and ``dev``.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.ansi import AnsiDecoder
from rich.console import Console

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.simulated_run import SimulatedRun, write_run  # noqa: E402
from benchmarks.top_ranks import SimulatedRanks, grow_until  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IMAGES: Final = ROOT / "docs" / "img"
TELEMETRY: Final = (sys.executable, "-m", "telemetry")
ENVIRONMENT: Final = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


# -- pages -----------------------------------------------------------------------------------------------------------


def healthy(folder: Path) -> None:
    """Photographs with evaluations."""
    script = ROOT / "tests" / "zoo" / "scripts" / "evaluation.py"
    run(folder, script, "--num-workers", "2", "--seconds", "60", TELEMETRY_RUN="photographs")


def starved(folder: Path) -> None:
    """Photographs without workers."""
    script = ROOT / "tests" / "zoo" / "scripts" / "pictures.py"
    variables = {"TELEMETRY_RUN": "photographs", "TELEMETRY_STALL_WINDOW_SECONDS": "10"}
    run(folder, script, "--num-workers", "0", "--seconds", "70", **variables)


def restarted(folder: Path) -> None:
    """A training that writes checkpoints: killed twice, and then ended by itself."""
    variables = {"FETCH_SECONDS": "0.0002", "TELEMETRY_RUN": "small-model", "TELEMETRY_INTERVAL_SECONDS": "0.1"}
    script = ROOT / "tests" / "faults" / "restarted_training.py"
    for attempt, seconds in enumerate((26.0, 20.0, None)):
        if seconds is None:
            (folder / "until").write_text("2600")
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed then
            run(folder, script, seconds=seconds, ATTEMPT=str(attempt), **variables)
            return
        time.sleep(4)


def thousand_ranks(folder: Path) -> None:
    """An hour of 1,000 simulated ranks."""
    write_run(folder / "run", SimulatedRun(1000, 3600, interval_seconds=30))


def run(folder: Path, *script: str | Path, seconds: float | None = None, **variables: str) -> None:
    """Run a script with the agent. Raises TimeoutExpired when it was killed after some seconds."""
    command = [*TELEMETRY, "run", "--log-interval-seconds", "1", "--run-dir", folder / "run", *script]
    subprocess.run(command, cwd=folder, env=ENVIRONMENT | variables, check=True, timeout=seconds)


def picture_of_page(name: str, make: Callable[[Path], None], folder: Path) -> None:
    """Make a run, and take a picture of its report."""
    make(folder)
    page = folder / "report.html"
    subprocess.run([*TELEMETRY, "report", folder / "run", "--html", page], check=True)
    picture = IMAGES / f"html-{name}.png"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        size = {"width": 1120, "height": 1720 if name == "thousand-ranks" else 1500}
        tab = browser.new_page(viewport=size, color_scheme="dark" if name == "restarted" else "light")
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-drawn]", state="attached")
        tab.screenshot(path=picture)
        browser.close()
    with Image.open(picture) as full:  # fewer colours: the file is a third as large
        fewer = full.convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        fewer.save(picture, optimize=True)


# -- top -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def four_ranks(folder: Path) -> Iterator[Path]:
    """A job of four ranks on two nodes; rank 2 has a slow loader."""
    run_dir, stop = folder / "example", folder / "stop"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    torchrun = f"-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port {port}"
    agent = f"-m telemetry run --run-dir {run_dir} --port off"
    script = f"{ROOT}/tests/stack/train_ddp.py --until {stop} --workers 1 --pace-seconds 0.05 --slow-seconds 0.08"
    jobs = [
        subprocess.Popen(
            [sys.executable, *f"{torchrun} --node-rank {node} {agent} {script} --samples 400".split()],
            env=ENVIRONMENT | {"TELEMETRY_NODE": f"node-{node + 1}", "SLOW_RANK": "2"},
            stderr=subprocess.DEVNULL,
        )
        for node in (0, 1)
    ]
    try:
        yield run_dir
    finally:
        stop.touch()
        for job in jobs:
            job.wait(60)


@contextlib.contextmanager
def many_ranks(folder: Path) -> Iterator[Path]:
    """1,000 simulated ranks."""
    run_dir, stop = folder / "large", folder / "stop"
    ranks = SimulatedRanks(run_dir, 1000, 5)
    writer = multiprocessing.get_context("fork").Process(target=grow_until, args=(ranks, stop))
    writer.start()
    try:
        yield run_dir
    finally:
        stop.touch()
        writer.join(60)


STALL: Final = ("Starved: rank 2", "waits for rank 2", "newest stall: rank 2")


def picture_of_top(name: str, run_dir: Path, folder: Path) -> None:
    """Open `telemetry top`, wait for some texts, and save its screen."""
    columns, lines, texts = {
        "ranks": (120, 32, ("1000 ranks", "Starved", " compute ")),
        "stall": (100, 26, STALL),
    }.get(name, (80, 24, STALL))
    tmux = ["tmux", "-S", str(folder / f"{name}.tmux"), "-f", "/dev/null"]
    command = f"{'NO_COLOR=1 ' if name == 'plain' else ''}{shlex.join([*TELEMETRY, 'top', str(run_dir)])}"
    environment = ENVIRONMENT | {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}
    size = ["-x", str(columns), "-y", str(lines)]
    subprocess.run([*tmux, "new-session", "-d", *size, "-s", "t", command], env=environment, check=True)
    try:
        screen = screen_with(tmux, *texts)
        if name == "rank":
            subprocess.run([*tmux, "send-keys", "-t", "t", "Enter"], check=True)
            screen = screen_with(tmux, "pid ", "whole run")
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, capture_output=True)
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    for line in AnsiDecoder().decode(screen):  # a style may go on in the next line
        console.print(line, no_wrap=True, crop=True)
    picture = console.export_svg(title=f"telemetry top {run_dir.name}", unique_id=f"top-{name}")
    # The browser's own font: no request to another host.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL).replace("Fira Code,", "")
    picture = re.sub(r"<!--.*?-->\s*", "", picture, flags=re.DOTALL)
    (IMAGES / f"top-{name}.svg").write_text(picture, encoding="utf-8")


def screen_with(tmux: list[str], *texts: str, seconds: float = 120.0) -> str:
    """The screen with its colours, once all of some texts stand there."""
    until = time.monotonic() + seconds
    while True:
        command = [*tmux, "capture-pane", "-e", "-p", "-t", "t"]
        screen = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        if all(text in re.sub(r"\x1b\[[0-9;]*m", "", screen) for text in texts):
            return screen
        if time.monotonic() > until:
            raise SystemExit(f"{texts} did not appear:\n{screen}")
        time.sleep(0.2)


PAGES: Final = {"healthy": healthy, "starved": starved, "restarted": restarted, "thousand-ranks": thousand_ranks}
SCREENS: Final = {"stall": four_ranks, "rank": four_ranks, "plain": four_ranks, "ranks": many_ranks}


def main() -> None:
    """Take the pictures that are named, or all."""
    for name in sys.argv[1:] or (*PAGES, *SCREENS):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if name in PAGES:
                picture_of_page(name, PAGES[name], folder)
            else:
                with SCREENS[name](folder) as run_dir:
                    picture_of_top(name, run_dir, folder)


if __name__ == "__main__":
    main()
