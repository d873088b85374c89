"""Draws the pictures of docs/views.md: real runs, and one of 1,000 ranks that is simulated. Takes five minutes.

Needs Chromium, and the extras ``html`` and ``dev``. Each picture is the upper part of the page, as Chromium shows it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.simulated_run import SimulatedRun, write_run  # noqa: E402

_SCRIPTS: Final = ROOT / "tests" / "zoo" / "scripts"
_RUN: Final = (sys.executable, "-m", "telemetry", "run", "--log-interval-seconds", "1")
_HEIGHTS: Final = {"healthy": 1500, "starved": 1500, "thousand-ranks": 1720, "restarted": 1500}


def _healthy(folder: Path) -> None:
    script = [_SCRIPTS / "evaluation.py", "--num-workers", "2", "--seconds", "60"]
    subprocess.run([*_RUN, "--run", "photographs", "--run-dir", folder / "run", *script], cwd=folder, check=True)


def _starved(folder: Path) -> None:
    script = [_SCRIPTS / "pictures.py", "--num-workers", "0", "--seconds", "70"]
    options = ["--run", "photographs", "--stall-window-seconds", "10", "--run-dir", folder / "run"]
    subprocess.run([*_RUN, *options, *script], cwd=folder, check=True)


def _restarted(folder: Path) -> None:
    """A training that writes checkpoints: killed twice, and then ended by itself."""
    script = ROOT / "tests" / "faults" / "restarted_training.py"
    for attempt, seconds in enumerate((26.0, 20.0, None)):
        if seconds is None:
            (folder / "until").write_text("2600")
        variables = {
            "ATTEMPT": str(attempt),
            "FETCH_SECONDS": "0.0002",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        command = [*_RUN, "--run", "small-model", "--run-dir", folder / "run", "--interval-seconds", "0.1", script]
        process = subprocess.Popen(command, cwd=folder, env=os.environ | variables)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            time.sleep(4)


def _thousand_ranks(folder: Path) -> None:
    write_run(folder / "run", SimulatedRun(1000, 3600, interval_seconds=30))


def main() -> None:
    """Draw all pictures, or those that are named on the command line."""
    makers = {
        "healthy": _healthy,
        "starved": _starved,
        "restarted": _restarted,
        "thousand-ranks": _thousand_ranks,
    }
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as temporary:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name in sys.argv[1:] or makers:
            folder = Path(temporary) / name
            folder.mkdir()
            makers[name](folder)
            page = folder / "report.html"
            command = [sys.executable, "-m", "telemetry", "report", folder / "run", "--html", page]
            subprocess.run(command, check=True)
            dark = "dark" if name == "restarted" else "light"
            tab = browser.new_page(viewport={"width": 1120, "height": _HEIGHTS[name]}, color_scheme=dark)
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-drawn]", state="attached")
            picture = ROOT / "docs" / "img" / f"html-{name}.png"
            tab.screenshot(path=picture)
            tab.close()
            with Image.open(picture) as full:  # fewer colours: the file is a third as large
                fewer = full.convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
                fewer.save(picture, optimize=True)
            sys.stdout.write(f"{picture} {picture.stat().st_size // 1000} KB\n")
        browser.close()


if __name__ == "__main__":
    main()
