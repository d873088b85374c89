"""TraceML's verdict on the same scripts, with the calls that its documentation recommends for a custom loop.

These are ``init(mode="auto")`` at the start, ``trace_step(model)`` around the body of each training step, and
``wrap_dataloader_fetch`` around a source that is not a DataLoader. Every step is in a function ``train_step``, of the
script or of what all scripts share. So the calls are inserted into the syntax tree, and nothing else changes.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks import traceml as benchmarked
from benchmarks.tool_environment import ToolError
from tests.campaign import RunError, environment, runner

if TYPE_CHECKING:
    from tests.campaign.specimen import Specimen

_INSTALL_SECONDS: Final = 300.0
_NEEDED: Final = {"PIL": "pillow", "numpy": "numpy"}

_INSTEAD_OF_TELEMETRY: Final = '''"""Stands for telemetry: TraceML's call if it has a similar one, else nothing."""
import contextlib
import traceml_ai
watch = traceml_ai.wrap_dataloader_fetch
step = phase = contextlib.nullcontext
'''


def python() -> Path:
    """The interpreter of an environment with TraceML and with what the scripts import.

    Raises:
        ToolError: the environment cannot be made.
    """
    interpreter = benchmarked.ENVIRONMENT.python(install=True)
    for module, package in _NEEDED.items():
        if subprocess.run([interpreter, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0:
            continue
        if os.environ.get(benchmarked.ENVIRONMENT.variable):
            raise ToolError(f"{package} is missing in the environment that {benchmarked.ENVIRONMENT.variable} names")
        command = [str(interpreter), "-m", "pip", "install", "-q", "--disable-pip-version-check", package]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_INSTALL_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            raise ToolError(f"{package} cannot be installed beside it ({type(error).__name__})") from None
    return interpreter


def verdict(interpreter: Path, specimen: Specimen) -> str:
    """Run a specimen under TraceML's launcher. Returns the primary diagnosis of its summary, or why it is missing."""
    with tempfile.TemporaryDirectory(prefix=f"zoo-traceml-{specimen.name}-") as name:
        folder = Path(name)
        script = folder / specimen.script.name
        for name in (script.name, "common.py"):
            source = specimen.script.with_name(name).read_text(encoding="utf-8")
            (folder / name).write_text(rewritten(source), encoding="utf-8")
        (folder / "telemetry.py").write_text(_INSTEAD_OF_TELEMETRY, encoding="utf-8")
        ports = ["--aggregator-port", str(benchmarked._free_port()), "--master-port", str(benchmarked._free_port())]
        command = [str(interpreter), "-m", "traceml_ai.launcher.cli", "run", str(script), "--logs-dir", "logs"]
        command += ["--run-name", "zoo", "--nproc-per-node", str(specimen.ranks), *ports, "--args"]
        arguments = runner.arguments_of(specimen, folder / "pace.json")
        paths = os.pathsep.join((str(folder), str(specimen.script.parent)))
        variables = environment(PYTHONPATH=paths, TRACEML_ON_MISSING_AGGREGATOR="raise")
        try:
            runner.to_its_end(specimen, [*command, *arguments], folder, variables)
        except RunError as error:
            return f"did not run: {error}"
        try:
            said = json.loads((folder / "logs" / "zoo" / "final_summary.json").read_text(encoding="utf-8"))
            primary = said["primary_diagnosis"]
            return f"{primary['status']}: {primary['summary']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "left no summary"


def rewritten(source: str) -> str:
    """A script of the zoo with TraceML's calls in it."""
    tree = _WithCalls().visit(ast.parse(source))
    return ast.unparse(ast.fix_missing_locations(tree))


class _WithCalls(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:  # noqa: N802 - the visitor's name for it
        self.generic_visit(node)
        if node.name != "train_step":
            return node
        model = "self.model" if node.args.args[0].arg == "self" else "model"
        around = ast.parse(f"with traceml_ai.trace_step({model}): pass").body[0]
        assert isinstance(around, ast.With)
        around.body = node.body
        node.body = [ast.parse("import traceml_ai").body[0], around]
        return node

    def visit_If(self, node: ast.If) -> ast.AST:  # noqa: N802
        if ast.unparse(node.test) == "__name__ == '__main__'":
            node.body = [*ast.parse("import traceml_ai\ntraceml_ai.init(mode='auto')").body, *node.body]
        return node
