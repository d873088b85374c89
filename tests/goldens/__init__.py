"""What the commands say of recorded runs, as it was when it was written down.

``python -m tests.goldens`` writes ``expected/`` anew; ``python -m tests.goldens FOLDER...`` first takes run folders in as
inputs, under their own names, without the paths of the machine that they were recorded on.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import msgspec

from tests.html_pages import Page, figures_of

HERE = Path(__file__).parent
INPUTS = HERE / "inputs"
EXPECTED = HERE / "expected"
EVENTS = EXPECTED / "log-events.json"
TRACES = HERE.parent / "traces"
PAIRS = (("real-healthy", "real-starved-cpu"), ("figures", "real-restarted"))
COMMANDS = ("run", "top", "report", "compare", "tune", "trace", "snapshot", "demo", "doctor")
OF_MACHINE = {
    "versions", "packages", "gpu", "cuda events", "endpoint", "board", "threads", "memory", "kernel", "run folder",
}  # fmt: skip
"""Findings of the doctor whose text depends on the machine."""


def names() -> list[str]:
    return sorted(path.name.removesuffix(".tar.xz") for path in INPUTS.glob("*.tar.xz"))


def unpack(folder: Path, *chosen: str) -> None:
    """Unpack inputs, each into the folder of its name."""
    for name in chosen:
        with tarfile.open(INPUTS / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")


def pack(run: Path, replaced: dict[bytes, bytes]) -> None:
    """Make a run folder an input. Two packs of one folder are the same bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in sorted(run.rglob("*")):
            if path.is_dir() or not path.is_file() or path.suffix == ".html":
                continue
            zipped = path.suffix == ".gz"
            content = gzip.decompress(path.read_bytes()) if zipped else path.read_bytes()
            for old, new in replaced.items():
                content = content.replace(old, new)
            content = gzip.compress(content, mtime=0) if zipped else content
            entry = tarfile.TarInfo(f"{run.name}/{path.relative_to(run)}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    INPUTS.mkdir(exist_ok=True)
    (INPUTS / f"{run.name}.tar.xz").write_bytes(lzma.compress(packed.getvalue(), preset=9))


def said(*arguments: str) -> str:
    """What a command prints: its output, then its errors, then its status if that is not 0."""
    from telemetry.cli import main

    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            status = main([*arguments])
        except SystemExit as leaving:
            status = leaving.code
    text = out.getvalue()
    text += f"--- stderr ---\n{errors.getvalue()}" if errors.getvalue() else ""
    return rounded(text + (f"--- status {status} ---\n" if status else ""))


def rounded(text: str) -> str:
    """Long figures with nine digits: the last ones depend on the version of Python, which adds in another order."""
    return re.sub(r"-?\d+\.\d{6,}(?:e[+-]?\d+)?", lambda found: f"{float(found[0]):.9g}", text)


def page_of(run: str) -> str:
    """The text of a run's page, and the figures of its charts, without what belongs to the drawing library."""
    told = said("report", run, "--html", "page.html")
    if not Path("page.html").exists():
        return told
    page = Page(Path("page.html").read_text("utf-8"))
    Path("page.html").unlink()
    lines = [" ".join(text.split()) for text in page.texts]
    lines = [line for line in lines if line]
    for key, columns in figures_of(page).items():
        lines.append(f"== {key}")
        lines += [f"{name} = {' '.join(map(shown, numbers(values)))}" for name, values in columns]
    text = re.sub(r"\nWritten\n.*\n", "\nWritten\n#\n", "\n".join(lines) + "\n")
    return rounded(text)


def numbers(values: list) -> list:
    return values if isinstance(values, list) else values.ravel().tolist()


def shown(value: str | float) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    return f"{value:.9g}" if abs(value) < 1e9 else f"{value:.0f}"


def of_run(name: str) -> dict[str, str]:
    """What is said of a run that is unpacked in the current folder, by file."""
    return {
        f"{name}.report.txt": said("report", name),
        f"{name}.report.json": said("report", name, "--json"),
        f"{name}.page.txt": page_of(name),
    }


def of_comparisons() -> dict[str, str]:
    found = {}
    for number, pair in enumerate(PAIRS, 1):
        found[f"compare-{number}.txt"] = said("compare", *pair)
        found[f"compare-{number}.json"] = said("compare", *pair, "--json")
    return found


def of_traces() -> dict[str, str]:
    found = {}
    for path in sorted(TRACES.iterdir()):
        Path(path.name).write_bytes(path.read_bytes())
        found[f"trace-{path.name.partition('.')[0]}.json"] = said("trace", path.name, "--json")
    return found


def of_help() -> dict[str, str]:
    return {"help.txt": said("--help")} | {f"help-{command}.txt": said(command, "--help") for command in COMMANDS}


def of_doctor() -> dict[str, str]:
    """The findings. Of those that depend on the machine, the names."""
    lines = []
    for line in said("doctor", "--run-dir", "run").splitlines():
        name = line[3:14].strip()
        if line[:2] in {"ok", "--", "!!"} and line[2:3] == " ":
            lines.append(f"?? {name}" if name in OF_MACHINE else line)
    return {"doctor.txt": "\n".join(lines) + "\n"}


def of_zoo() -> dict[str, str]:
    """Cause, cost and advice for each recorded evidence of the zoo."""
    from telemetry.diagnosis.causes import advise
    from telemetry.diagnosis.costs import costs
    from tests.zoo.test_replay import RECORDED, evidence_of

    found = {}
    for path in RECORDED:
        evidence = evidence_of(json.loads(path.read_text())["evidence"])
        lost = costs(evidence)
        cause = max(lost, key=lost.get)
        advice = [msgspec.structs.asdict(each) for each in advise(cause, evidence)]
        found[path.stem] = {"cause": cause, "lost_seconds": dict(sorted(lost.items())), "advice": advice}
    return {"zoo.json": rounded(json.dumps(found, indent=1, default=str) + "\n")}


def of_metrics() -> dict[str, str]:
    """The exposition of a run in which everything was measured, without its values."""
    from tests.full_views import full_view, page

    text = page(full_view())
    lines = [line if line.startswith("#") else f"{line.rpartition(' ')[0]} #" for line in text.splitlines()]
    return {"metrics.txt": "\n".join(lines) + "\n"}


KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}


def kind_of(line: dict, key: str) -> str:
    if key not in line:
        return "absent"
    return "null" if line[key] is None else KINDS[type(line[key])]


def events_of(runs: list[Path]) -> dict[str, dict[str, list[str]]]:
    """By event and key: the JSON types of its values, and ``absent`` if not each line of that event has it."""
    lines = [
        json.loads(line)
        for run in runs
        for path in sorted(run.glob("logs/*.jsonl*"))
        for line in path.read_text().splitlines()
    ]
    found: dict = {}
    for event in sorted({line["event"] for line in lines}):
        of_event = [line for line in lines if line["event"] == event]
        keys = sorted({key for line in of_event for key in line})
        found[event] = {key: sorted({kind_of(line, key) for line in of_event}) for key in keys}
    return found


def train(folder: Path, words: str, steps: int, *options: str) -> None:
    """Run the training of the recorded logs, in a process of its own."""
    command = [sys.executable, "-m", "telemetry", "run", "--run-dir", str(folder), "--port", "off"]
    command += ["--log-interval-seconds", "0.5", "--interval-seconds", "0.2", "--start-line", "off", *options]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    subprocess.run(
        [*command, str(HERE / "train.py"), words, str(steps)], check=True, timeout=120, env=environment,
        cwd=folder.parent,
    )  # fmt: skip
