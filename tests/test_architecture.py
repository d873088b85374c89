"""Imports go one way, and each third-party library has one importer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "telemetry"

BASE = {
    "records",
    "clock",
    "config",
    "identity",
    "faults",
    "files",
    "forks",
    "signals",
    "sketch",
    "stacks",
    "stderr",
    "terminal",
    "_version",
}
ROOMS = {"attach", "collect", "diagnose", "publish", "snapshot"}
TOP = {
    "accounts",
    "agent",
    "callback",
    "judge",
    "logbook",
    "membership",
    "sampling",
    "snapshots",
    "watchdog",
    "api",
    "cli",
    "launch",
    "doctor",
    "demo",
    "__main__",
    "__init__",
}
REPORT_MAY = {"files", "records", "sketch", "report", "snapshot.trace", "terminal"}

OWNERS = {
    "pynvml": {"collect/nvml.py"},
    "psutil": {"collect/host.py"},
    "structlog": {"publish/jsonl.py"},
    "prometheus_client": {"publish/exposition.py", "publish/endpoint.py"},
    "torch": {
        "attach/worker_probe.py",
        "demo/train.py",
        "doctor/gpu.py",
        "snapshot/session.py",
    },  # else attach/ works on the modules that the script has imported
    "PIL": {"demo/pictures.py", "demo/train.py", "demo/command.py"},
    "orjson": {
        "publish/jsonl.py",
        "report/load.py",
        "report/command.py",
        "snapshot/reading/scanner.py",
        "snapshot/reading/command.py",
    },
}


def imports(path: Path):
    """Every module a file imports, at the top, inside functions and for type checking."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(path: Path) -> set[str]:
    found = set()
    for name in imports(path):
        if name.startswith("telemetry."):
            rest = name.removeprefix("telemetry.")
            if (PACKAGE / (rest.replace(".", "/") + ".py")).exists() or (PACKAGE / rest.replace(".", "/")).is_dir():
                found.add(rest)
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    used = ours(path)
    if room == "report":
        assert {u for u in used if u not in REPORT_MAY and not u.startswith("report")} == set()
        return
    for use in used:
        floor = use.split(".")[0]
        if room == "records":
            pytest.fail(f"records imports {use}")
        elif room in BASE:
            assert floor in BASE, f"{room} imports {use}"
        elif room in ROOMS:
            assert floor in BASE | {room}, f"{room} imports its sibling {use}"


def test_the_profiler_has_one_importer():
    users = {
        str(path.relative_to(PACKAGE)) for path in FILES if any(n.startswith("torch.profiler") for n in imports(path))
    }
    assert users == {"snapshot/session.py"}


@pytest.mark.parametrize("library", OWNERS)
def test_each_library_has_its_importers(library):
    users = {
        str(path.relative_to(PACKAGE)) for path in FILES if any(name.split(".")[0] == library for name in imports(path))
    }
    assert users <= OWNERS[library]


def test_every_file_is_on_a_floor():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert rooms <= BASE | ROOMS | TOP | {"report"}


def test_nothing_is_printed_or_registered_where_training_runs():
    """No signal handler and no output of ours: only the command line prints, and the start line."""
    for path in FILES:
        room = path.relative_to(PACKAGE).parts[0]
        if room in ROOMS | {"agent.py", "sampling.py"}:
            handlers = {"signal.signal"} if path == PACKAGE / "attach" / "worker_stacks.py" else set()  # in a worker
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    assert (
                        name not in {"print", "signal.signal", "signal.set_wakeup_fd", "sys.stdout.write"} - handlers
                    ), (
                        path,
                        name,
                    )
