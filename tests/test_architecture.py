"""What may be imported where, and what code that runs in the training process must not do."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from telemetry.seams.table import SEAMS

PACKAGE = Path(__file__).parents[1] / "telemetry"
FILES = sorted(PACKAGE.rglob("*.py"))
COMMANDS = {"snapshot/snapshot_command.py"}
OFFLINE = {"cli", "compare", "demo", "doctor", "launch", "report", "top", "trace", "tune"}

TRAIN = """
import sys
import telemetry
from torch.utils.data import DataLoader
telemetry.start({folder!r}, port="off")
for batch in DataLoader(range(8)):
    pass
telemetry.stop()
print(*sys.modules)
"""


def modules_after(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    return set(done.stdout.split())


def test_the_training_process_imports_nothing_offline(tmp_path):
    loaded = modules_after(TRAIN.format(folder=str(tmp_path)))
    assert "telemetry.agent.agent" in loaded
    assert not {
        name
        for name in loaded
        if name.split(".")[0] == "telemetry" and name.split(".")[1:2] and name.split(".")[1] in OFFLINE
    }
    assert not {name.split(".")[0] for name in loaded} & {
        "rich",
        "textual",
        "bokeh",
        "jinja2",
        "prometheus_client",
        "duckdb",
        "pydantic",
    }


def test_the_report_imports_no_torch():
    loaded = modules_after("import sys, telemetry.report.report_command; print(*sys.modules)")
    assert "telemetry.report.report_command" in loaded
    assert not {name for name in loaded if name.split(".")[0] == "torch"}


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every module and object that a file imports: at the top, inside functions and for type checking."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def test_no_file_imports_itself_through_others():
    names = {".".join(("telemetry", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in FILES}
    graph = {name: imports(path) & names.keys() for name, path in names.items()}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way, module))
        if module not in done:
            for use in graph[module]:
                visit(use, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


ROOMS = {
    "_version": "",
    "util/clock": "",
    "safety": "util/clock",
    "util": "safety",
    "config": "safety",
    "model": "util",
    "log/lines": "util safety model",
    "sources/collector": "util model",
    # what measures
    "seams": "util safety model log/lines sources/collector",
    "sources": "util safety model log/lines seams",
    "loop": "util safety config model seams sources",
    # what judges, and what shows it
    "trace": "util safety",
    "diagnosis": "util model log/lines sources trace",
    "log": "util safety model diagnosis",
    "node": "util safety model diagnosis",
    "sinks": "util safety config model node",
    "snapshot": "util safety config model log/lines seams sources diagnosis node",
    # the tick, which asks them all
    "agent": "_version util safety config model seams sources loop diagnosis log node sinks snapshot",
    # what reads a run later
    "report": "util safety model sources trace diagnosis log",
    "top": "util safety model diagnosis log report",
}
"""What each room may import: only rooms that stand before it. A file that stands here by itself is below the rest of
its folder. All that has no line is a command or an interface to the user, which may import anything."""
COMMANDS_IN_ROOMS = {"snapshot/snapshot_command.py"}
FOR_ITS_TYPE = {("log/reader.py", "report"), ("seams/profilers.py", "snapshot"), ("snapshot/control.py", "agent")}
"""Files that get an object of a room above them."""


def room_of(module: str) -> str:
    _, first, *rest = *module.split("."), ""
    file = f"{first}/{rest[0]}"
    return file if file in ROOMS else first


def test_each_room_imports_only_what_its_line_allows():
    modules = {".".join(("telemetry", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in FILES}
    for path in FILES:
        file = str(path.relative_to(PACKAGE))
        room = room_of(f"telemetry.{file.removesuffix('.py').replace('/', '.')}")
        if room not in ROOMS or file in COMMANDS_IN_ROOMS:
            continue
        allowed = {room, *ROOMS[room].split()} | {other for place, other in FOR_ITS_TYPE if place == file}
        used = {room_of(module) for module in imports(path) & modules}
        assert not {each for each in used if not {each, each.split("/")[0]} & allowed}, file


def test_a_room_is_allowed_only_rooms_before_it():
    for place, (room, allowed) in enumerate(ROOMS.items()):
        assert {*allowed.split()} <= {*[*ROOMS][:place]}, room


OTHERS = {"torch", "tensorboard"}
BEFORE_THE_SCRIPT = {"__init__.py", "api.py", "safety/imports.py"}


def test_where_training_runs_nothing_is_imported_or_found_by_its_name_in_a_function():
    """By then a project's module may have that name. msgspec looks up a record's annotations in the module of its name."""
    for path in where_training_runs():
        name = str(path.relative_to(PACKAGE))
        functions = [node for node in nodes(path) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
        for node in (inner for function in functions for inner in ast.walk(function)):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and name not in BEFORE_THE_SCRIPT | COMMANDS:
                modules = [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
                assert {module.split(".")[0] for module in modules} <= OTHERS, (name, ast.unparse(node))
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("msgspec."):
                assert "type" not in {key.arg for key in node.keywords}, (name, ast.unparse(node))


def where_training_runs() -> list[Path]:
    return [
        path for path in FILES if path.relative_to(PACKAGE).parts[0].removesuffix(".py") not in OFFLINE | {"__main__"}
    ]


LOOK_UPS = {"getattr", "own_value", "get", "around", "replace"}


def test_private_names_of_others_are_in_the_table_of_seams():
    """Where training runs. What another library has under a name with an underscore may be gone in its next version."""
    listed = {part: seam.module for seam in SEAMS for name in (seam.module, *seam.names) for part in name.split(".")}
    ours: set[str] = set()
    used: dict[object, set[str]] = defaultdict(set)
    for path in where_training_runs():
        room = path.relative_to(PACKAGE).parts[0]
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                ours.add(node.attr if isinstance(node, ast.Attribute) else node.id)
            elif isinstance(node, ast.Attribute):
                used[node.attr].add(room)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in LOOK_UPS:
                for each in node.args:
                    if isinstance(each, ast.Constant):
                        used[each.value].add(room)
    private = {name for name in used if isinstance(name, str) and re.match(r"_[a-zA-Z]", name)} - ours
    assert private - listed.keys() == {"_replace", "_fields"}, "not in telemetry/seams/table.py"
    torch = {name for name in private & listed.keys() if listed[name].startswith("torch")}
    assert {"_BaseDataLoaderIter", "_prepare_trace"} < torch
    assert {name: used[name] for name in torch if used[name] != {"seams"}} == {}, "torch's private names are for seams/"


UNSEEN = {
    *("print", "sys.stdout.write"),
    *("signal.signal", "signal.set_wakeup_fd", "signal.setitimer", "faulthandler.register"),
    *("os.kill", "os.killpg", "signal.pthread_kill", "signal.raise_signal"),
}


def test_nothing_is_printed_signalled_or_registered_where_training_runs():
    for path in where_training_runs():
        for node in nodes(path):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in UNSEEN, (path, ast.unparse(node.func))


def test_clocks_and_sleeps_come_from_one_place_where_training_runs():
    """A script may replace those of `time`. `snapshot/snapshot_command.py` runs in a process of its own."""
    users = {str(path.relative_to(PACKAGE)) for path in where_training_runs() if "time" in imports(path)}
    assert users <= {"util/clock.py", "util/identity.py", "safety/processes.py"} | COMMANDS


OWN_GENERATORS = {
    "random": {"Random", "SystemRandom"},
    "numpy.random": {"Generator", "default_rng"},
    "torch.random": set(),
}
"""What a file may use of a module that also has a global generator: what makes a generator of one's own."""
TORCH_DRAWS = {"bernoulli", "manual_seed", "multinomial", "normal", "rand", "randint", "randn", "randperm", "seed"}


@pytest.mark.parametrize("path", where_training_runs(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_random_number_of_the_training_is_drawn(path):
    """The training must draw the same numbers as without the agent."""
    called = {}  # the full name of each module or object that is imported, by what the file calls it
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.split(".")[0]
                called[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom):
            called |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    used = set(called.values())
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if first in called:
                used.add(".".join([called[first], *rest]))
    for module, allowed in OWN_GENERATORS.items():
        drawn = {name.removeprefix(f"{module}.").split(".")[0] for name in used if name.startswith(f"{module}.")}
        assert drawn <= allowed, module
    assert not used & {f"torch.{name}" for name in TORCH_DRAWS}
