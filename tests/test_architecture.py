"""Imports go one way, only named files import a third-party library, and the rules for sizes and names."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "telemetry"
TESTS = Path(__file__).parent
MAX_TEST_NAME = 69

BASE = {"core", "config", "_version"}
FOLDERS = {"attach", "collect", "diagnose", "job", "publish", "snapshot", "trace"}
"""Siblings: none of them imports another one. `agent` hands them what they need of each other."""
ABOVE = {"agent"}
FACE = {"__init__", "__main__", "api", "cli", "launch"}
BESIDE = {"integrations"}
"""What scripts import for a framework. It uses the public face alone."""
OFFLINE = {"compare", "demo", "doctor", "report", "top", "tune"}
REPORT_MAY = {"core", "report", "trace"}
COMPARE_MAY = {"compare", "core", "report"}

OWNERS = {
    "pynvml": {"collect/nvml/driver.py"},
    "psutil": {"collect/host.py"},
    "structlog": {"publish/jsonl.py"},
    "prometheus_client": set(),
    "torch": {
        "attach/worker_probe.py",
        "demo/train.py",
        "doctor/gpu_checks.py",
        "snapshot/session.py",
    },  # else attach/ works on the modules that the script has imported
    "bokeh": {"report/html/bokeh_charts.py"},
    "jinja2": {"report/html/page.py"},
    "markupsafe": {"report/html/page.py"},
    "tensorboard": {"publish/sinks/tensorboard_sink.py"},
    "transformers": {"integrations/transformers_callback.py"},
    "lightning": {"integrations/lightning_callback.py"},
    "pytorch_lightning": {"integrations/lightning_callback.py"},
    "accelerate": set(),
    "wandb": set(),  # the sinks use the modules that the script has imported
    "mlflow": set(),
    "PIL": {"demo/pictures.py", "demo/train.py", "demo/command.py"},
    "rich": {"top/painter.py"},
    "orjson": {
        "compare/command.py",
        "job/node_report.py",
        "publish/jsonl.py",
        "report/log_lines.py",
        "report/command.py",
        "trace/json_scanner.py",
        "trace/command.py",
    },
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Each file is parsed once for all tests."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All parts of a file. Each file is gone through once for all tests."""
    return tuple(ast.walk(parsed(path)))


@functools.cache
def imports(path: Path, *, at_runtime: bool = False) -> frozenset[str]:
    """Every module that a file imports: at the top, inside functions and for type checking.

    ``at_runtime``: at the top alone, without those for type checking.
    """
    found = set()
    for node in parsed(path).body if at_runtime else nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def ours(path: Path, *, at_runtime: bool = False) -> set[str]:
    found = set()
    for name in imports(path, at_runtime=at_runtime):
        if name.startswith("telemetry."):
            rest = name.removeprefix("telemetry.")
            if (PACKAGE / (rest.replace(".", "/") + ".py")).exists() or (PACKAGE / rest.replace(".", "/")).is_dir():
                found.add(rest)
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    folder = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    used = {name.split(".")[0] for name in ours(path)}
    if folder == "report":
        assert used <= REPORT_MAY
    elif folder == "compare":
        assert used <= COMPARE_MAY
    elif folder == "trace":
        assert used <= {"core", "trace"}
    elif folder in BASE:
        assert used <= BASE
    elif folder in FOLDERS:
        assert used <= BASE | {folder}
    elif folder in BESIDE:
        assert used <= {"api", folder}
    else:
        assert not used & BESIDE
    if folder in ABOVE:
        assert used <= BASE | FOLDERS | ABOVE


TYPES_OF_EACH_OTHER = {
    "attach.gc_timer",
    "attach.resume_state",
    "attach.sampler_timer",
    "attach.optimizer_hook",
    "attach.graph_captures",
}
"""Parts of the step tracker. Their functions get the tracker's state, which is made of them."""


@pytest.mark.parametrize("at_runtime", [True, False], ids=["at run time", "types too"])
def test_no_file_imports_itself_through_others(at_runtime):
    graph = {
        module_of(path): set(ours(path, at_runtime=at_runtime))
        for path in FILES
        if at_runtime or module_of(path) not in TYPES_OF_EACH_OTHER
    }
    state: dict[str, int] = {}

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert state.get(module) != 1, " -> ".join((*way, module))
        if state.get(module) == 2:
            return
        state[module] = 1
        for use in graph.get(module, ()):
            visit(use, (*way, module))
        state[module] = 2

    for module in graph:
        visit(module, ())


def test_file_names_are_unique():
    names = Counter(path.name for path in FILES)
    assert {name for name, count in names.items() if count > 1} <= {"command.py", "__init__.py"}


def test_class_names_are_unique():
    classes = Counter(node.name for path in FILES for node in parsed(path).body if isinstance(node, ast.ClassDef))
    assert {name for name, count in classes.items() if count > 1} == set()


def test_names_of_tests_fit_on_a_line():
    names = [
        node.name
        for path in sorted(TESTS.rglob("test_*.py"))
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    ]
    assert len(names) > 1000
    assert [name for name in names if len(name) > MAX_TEST_NAME] == []


def test_limits_are_named_max_and_min():
    """``MAX_BYTES``, not ``MOST_BYTES``; a field of a record likewise."""
    limits = []
    for path in (*FILES, *sorted(TESTS.rglob("*.py"))):
        for node in nodes(path):
            if isinstance(node, ast.AnnAssign):
                named = re.match(r"_?(MOST|LEAST)(_|\b)|(most|least)_", ast.unparse(node.target))
            else:
                named = isinstance(node, ast.Assign) and re.match(r"_?(MOST|LEAST)(_|\b)", ast.unparse(node.targets[0]))
            if named:
                limits.append((path.name, node.lineno))
    assert limits == []


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


def test_every_file_is_in_a_known_folder():
    folders = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert folders <= BASE | FOLDERS | ABOVE | FACE | BESIDE | OFFLINE


def test_the_top_level_holds_the_face_alone():
    assert len(list(PACKAGE.glob("*.py"))) <= 8


UNSEEN = {
    *("print", "sys.stdout.write"),
    *("signal.signal", "signal.set_wakeup_fd", "signal.setitimer", "faulthandler.register"),
    *("os.kill", "os.killpg", "signal.pthread_kill", "signal.raise_signal"),
}


def test_nothing_is_printed_signalled_or_registered_where_training_runs():
    """No signal, signal handler or output of ours: only the command line prints, and the start line."""
    for path in FILES:
        folder = path.relative_to(PACKAGE).parts[0]
        if folder in {"attach", "collect", "diagnose", "publish", "snapshot", "agent"}:
            for node in nodes(path):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    assert name not in UNSEEN, (path, name)


def test_clocks_and_sleeps_come_from_one_place_where_training_runs():
    """A script may replace those of `time`. `snapshot/command.py` runs in a process of its own."""
    users = {str(path.relative_to(PACKAGE)) for path in FILES if "time" in imports(path)}
    offline = {user for user in users if user.partition("/")[0] in OFFLINE | {"trace"}}
    assert users - offline == {"core/clock.py", "core/identity.py", "snapshot/command.py"}


OWN_GENERATORS = {
    "random": {"Random", "SystemRandom"},
    "numpy.random": {"Generator", "default_rng"},
    "torch.random": set(),
}
"""What a file may use of a module that also has a global generator: what makes a generator of one's own."""
TORCH_DRAWS = {"bernoulli", "manual_seed", "multinomial", "normal", "rand", "randint", "randn", "randperm", "seed"}


TRAINS = PACKAGE / "demo" / "train.py"
"""A training script itself."""


@pytest.mark.parametrize("path", [p for p in FILES if p != TRAINS], ids=lambda p: str(p.relative_to(PACKAGE)))
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
