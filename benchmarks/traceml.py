"""TraceML: its environment, and the same loops under it, as its users run it."""

from __future__ import annotations

import json
import socket
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks import child
from benchmarks.tool_environment import ToolEnvironment

VERSION: Final = "0.5.0"
TRACEML: Final = "TraceML"
BARE: Final = "bare"
_STEPS_A_SECOND: Final = 600
"""Hot steps are paced to this: TraceML's queue holds 2048, and its sampler empties it every two seconds."""


def _packages() -> list[str]:
    import torch

    return [f"torch=={str(torch.__version__).partition('+')[0]}", f"traceml-ai=={VERSION}"]


ENVIRONMENT: Final = ToolEnvironment(
    tool="traceml-ai",
    package="traceml-ai",
    version=VERSION,
    variable="TRACEML_PYTHON",
    folder=".venv-traceml",
    packages=_packages,
)


def run(interpreter: Path, parameters: dict[str, Any], measure: str = "traceml.measure") -> dict[str, Any]:
    """Measure in TraceML's environment, under its own launcher.

    Args:
        interpreter: interpreter of that environment.
        parameters: arguments of the measurement.
        measure: a function of this package, with its module.

    Raises:
        ChildError: the measurement could not be taken.
    """
    with tempfile.TemporaryDirectory(prefix="traceml-bench-") as folder:
        script, answer = Path(folder) / "train.py", Path(folder) / "answer.json"
        arguments = [json.dumps(parameters), str(answer)]
        module = measure.partition(".")[0]
        script.write_text(f"from benchmarks import child, {module}\nchild.answer({measure}, {arguments!r})\n")
        variables = child.environment() | {"TRACEML_ON_MISSING_AGGREGATOR": "raise"}
        ports = ["--aggregator-port", str(_free_port()), "--master-port", str(_free_port())]
        launcher = [str(interpreter), "-m", "traceml_ai.launcher.cli", "run", str(script), "--mode", "summary", *ports]
        return child.collect(launcher, answer, variables, cwd=folder)


def measure(*, hot_rounds: int, hot_steps: int, cold_rounds: int, cold_steps: int) -> dict[str, Any]:
    """TraceML's side of the comparison. Runs in its environment.

    Its documentation recommends ``init`` in its automatic mode and ``trace_step`` around each step.
    """
    import torch
    import traceml_ai  # type: ignore[import-not-found,unused-ignore]
    from torch.optim import optimizer as torch_optimizer

    from benchmarks import loops

    torch.set_num_threads(1)
    places = [
        (torch.nn.Module, "__call__"),
        (torch.Tensor, "backward"),
        (torch.autograd, "backward"),
        (torch.Tensor, "to"),
    ]
    native = [(owner, name, getattr(owner, name)) for owner, name in places]
    config = traceml_ai.init(mode="auto")
    loop = loops.ColdLoop("cpu", sites=("next", "around", "forward", "backward", "optimizer"))
    loader = loops.EndlessLoader(loop.images)
    model, optimizer = loops.Idle(), loops.IdleOptimizer()
    with traceml_ai.trace_step(loop.net):  # places its optimizer hooks
        pass
    traced = loops.Instrument(
        TRACEML,
        iter(loader),
        step=traceml_ai.trace_step,
        pre_hooks=list(torch_optimizer._global_optimizer_pre_hooks.values()),
        post_hooks=list(torch_optimizer._global_optimizer_post_hooks.values()),
        attributes=[(owner, name, getattr(owner, name)) for owner, name in places],
    )
    bare = loops.Instrument(BARE, loader._get_iterator(), attributes=native)
    hot = loops.take_turns(
        [bare, traced],
        lambda each: loops.hot_block(each, model, optimizer, hot_steps),
        rounds=hot_rounds,
        pause_seconds=hot_steps / _STEPS_A_SECOND,
    )
    cold = loops.take_turns([bare, traced], lambda each: loop.block(each, cold_steps), rounds=cold_rounds)
    return {"hot": hot, "cold": cold, "running": not config.disabled}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
