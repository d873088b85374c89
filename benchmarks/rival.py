"""TraceML, the closest rival: its environment, and the same loops with it as its users run it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks import child

VERSION: Final = "0.5.0"
TRACEML: Final = "TraceML"
BARE: Final = "bare"
PYTHON_VARIABLE: Final = "TRACEML_PYTHON"

_VENV: Final = child.ROOT / ".venv-traceml"
_INSTALL_SECONDS: Final = 900.0
_STEPS_A_SECOND: Final = 600
"""Hot steps are paced to this: its queue holds 2048, and its sampler empties it every other second."""


class RivalError(RuntimeError):
    """The rival cannot be had; the text says why, in one line."""


def python(*, install: bool) -> Path:
    """The interpreter of an environment with the rival in it, made if need be.

    Args:
        install: whether to make it where it is missing.

    Raises:
        RivalError: there is none, and none can be made.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    interpreter = Path(named) if named else _VENV / "bin" / "python"
    if not named and install and _version(interpreter) is None:
        _install(interpreter)
    found = _version(interpreter)
    if found != VERSION:
        raise RivalError(f"no environment with traceml-ai {VERSION}" + (f" ({found} is there)" if found else ""))
    return interpreter


def run(interpreter: Path, parameters: dict[str, Any], measure: str = "rival.measure") -> dict[str, Any]:
    """Measure in the rival's environment, under its own launcher.

    Args:
        interpreter: of its environment.
        parameters: of the measurement.
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
    """The rival's side of the comparison; runs in its environment.

    ``init`` in its automatic mode and ``trace_step`` around each step are what its documentation says to write.
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


def _version(interpreter: Path) -> str | None:
    code = "import importlib.metadata as m; print(m.version('traceml-ai'))"
    try:
        done = subprocess.run([interpreter, "-c", code], capture_output=True, timeout=60, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _install(interpreter: Path) -> None:
    import torch

    print(f"making {_VENV.name} with traceml-ai {VERSION} (minutes; once)", flush=True)
    packages = [f"torch=={str(torch.__version__).partition('+')[0]}", f"traceml-ai=={VERSION}"]
    commands = (
        [sys.executable, "-m", "venv", str(_VENV)],
        [str(interpreter), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages],
    )
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_INSTALL_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            raise RivalError(f"its environment cannot be made ({type(error).__name__})") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
