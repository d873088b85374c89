"""Writes docs/img/top-*.svg: real screens of `telemetry top`, read from tmux.

    python docs/tools/top_screenshots.py [NAME ...]

`stall`: a job of four ranks on two nodes, one with a slow loader, at 100 columns. `rank`: the same, with that rank
opened, at 80 columns. `ranks`: 1,000 simulated ranks of `benchmarks/top_ranks.py`. `plain`: the stall at 80 columns and
without colours. Needs tmux and the extra `top`.
"""

from __future__ import annotations

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

from rich.ansi import AnsiDecoder
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

IMAGES = ROOT / "docs" / "img"
SCRIPT = ROOT / "tests" / "stack" / "train_ddp.py"


class Screen:
    """A window of tmux with `telemetry top` in it."""

    def __init__(self, folder: Path, name: str, columns: int, lines: int, run_dir: Path, **variables: str) -> None:
        self._server = ["tmux", "-S", str(folder / f"{name}.tmux"), "-f", "/dev/null"]
        self._columns, self._title = columns, f"telemetry top {run_dir.name}"
        settings = " ".join(f"{key}={value}" for key, value in variables.items())
        command = f"env {settings} {shlex.join([sys.executable, '-m', 'telemetry', 'top', str(run_dir)])}"
        environment = os.environ | {"LC_ALL": "C.UTF-8", "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
        size = ["-x", str(columns), "-y", str(lines)]
        subprocess.run([*self._server, "new-session", "-d", *size, "-s", "t", command], env=environment, check=True)

    def press(self, *keys: str) -> None:
        """Press keys."""
        subprocess.run([*self._server, "send-keys", "-t", "t", *keys], check=True)

    def text(self) -> str:
        """What stands there, with its colours."""
        command = [*self._server, "capture-pane", "-e", "-p", "-t", "t"]
        return subprocess.run(command, check=True, capture_output=True).stdout.decode()

    def wait_for(self, *texts: str, seconds: float = 120.0) -> None:
        """Wait until all of some texts stand there."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            plain = re.sub(r"\x1b\[[0-9;]*m", "", self.text())
            if all(text in plain for text in texts):
                return
            time.sleep(0.2)
        raise SystemExit(f"{texts} did not appear:\n{self.text()}")

    def save(self, name: str) -> None:
        """Write the picture."""
        console = Console(record=True, width=self._columns, file=io.StringIO(), force_terminal=True)
        for line in AnsiDecoder().decode(self.text()):  # a style may go on in the next line
            console.print(line, no_wrap=True, crop=True)
        picture = console.export_svg(title=self._title, unique_id=f"top-{name}")
        # The browser's own font: no request to another host.
        picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL).replace("Fira Code,", "")
        picture = re.sub(r"<!--.*?-->\s*", "", picture, flags=re.DOTALL)
        (IMAGES / f"top-{name}.svg").write_text(picture, encoding="utf-8")
        print(f"docs/img/top-{name}.svg")

    def close(self) -> None:
        """End it."""
        subprocess.run([*self._server, "kill-server"], check=False, capture_output=True)


def pictures_of_a_stall(folder: Path, wanted: set[str]) -> None:
    """Train four ranks on two nodes, and take pictures of their stall."""
    run_dir, stop = folder / "example", folder / "stop"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = [str(SCRIPT), "--until", str(stop), "--workers", "1", "--pace-seconds", "0.05", "--slow-seconds", "0.08",
              "--samples", "400"]  # fmt: skip
    jobs = []
    for node in (0, 1):
        variables = {"TELEMETRY_NODE": f"node-{node + 1}", "SLOW_RANK": "2", "OMP_NUM_THREADS": "1",
                     "PYTHONPATH": str(ROOT)}  # fmt: skip
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
                  "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port),
                  "-m", "telemetry", "run", "--run-dir", str(run_dir), "--port", "off"]  # fmt: skip
        jobs.append(subprocess.Popen([*launch, *script], env=os.environ | variables, stderr=subprocess.DEVNULL))
    try:
        for name, columns, lines, variables in (
            ("stall", 100, 26, {}),
            ("rank", 80, 24, {}),
            ("plain", 80, 24, {"NO_COLOR": "1"}),
        ):
            if name not in wanted:
                continue
            screen = Screen(folder, name, columns, lines, run_dir, **variables)
            try:
                screen.wait_for("Starved: rank 2", "waits for rank 2", "predicted")
                if name == "rank":
                    screen.press("Enter")
                    screen.wait_for("pid ", "whole run")
                screen.save(name)
            finally:
                screen.close()
    finally:
        stop.touch()
        for job in jobs:
            job.wait(60)


def picture_of_many_ranks(folder: Path) -> None:
    """Take a picture of 1,000 simulated ranks."""
    from benchmarks.top_ranks import SimulatedRanks, grow_until

    run_dir, stop = folder / "large", folder / "stop-large"
    ranks = SimulatedRanks(run_dir, 1000, 5)
    writer = multiprocessing.get_context("fork").Process(target=grow_until, args=(ranks, stop))
    writer.start()
    screen = Screen(folder, "ranks", 120, 32, run_dir)
    try:
        screen.wait_for("1000 ranks", "Starved", " compute ")
        screen.save("ranks")
    finally:
        screen.close()
        stop.touch()
        writer.join(60)


def main() -> None:
    """Take the pictures that are named, or all."""
    wanted = set(sys.argv[1:]) or {"stall", "rank", "plain", "ranks"}
    with tempfile.TemporaryDirectory() as folder:
        if wanted - {"ranks"}:
            pictures_of_a_stall(Path(folder), wanted)
        if "ranks" in wanted:
            picture_of_many_ranks(Path(folder))


if __name__ == "__main__":
    main()
