"""What the sinks cost: the same loop with none and with all of them, in processes that take turns.

In both, the script has an active run of W&B (offline) and of MLflow (a local database): the difference is the writing.
``python -m benchmarks.sink_cost`` measures it alone. The libraries are in the environment of ``make test-frameworks``.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import child, machine, report
from benchmarks.effort import FULL, Effort, Pool
from benchmarks.report import AT_MOST, Row, Target
from benchmarks.spread import paired, spread
from benchmarks.tool_environment import ToolEnvironment, ToolError

if TYPE_CHECKING:
    from benchmarks.spread import Spread

_RESULTS: Final = Path(__file__).resolve().parent / "results"
ALL: Final = "tensorboard,wandb,mlflow"
_SECTION: Final = "The sinks: TensorBoard, W&B and MLflow, every 10 s"
_SLICE_SECONDS: Final = 10.0
"""As long as the log's window, so that each reading has one row of figures."""

_WORKERS: Final = 8
_REQUIREMENTS: Final = child.ROOT / "tests" / "frameworks" / "requirements.txt"


def _version() -> str:
    lines = _REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith("wandb=="))


ENVIRONMENT: Final = ToolEnvironment(
    tool="the sinks' libraries, made by `make test-frameworks`: wandb",
    package="wandb",
    version=_version(),
    variable="SINKS_PYTHON",
    folder=".venv-frameworks",
    packages=list,
)


def measure(*, slices: int, workers: int, sinks: str, slice_seconds: float = _SLICE_SECONDS) -> dict[str, Any]:
    """As `benchmarks.agent_cpu.measure`, with active runs. Runs in the environment of the libraries."""
    import mlflow  # type: ignore[import-not-found,unused-ignore]
    import wandb  # type: ignore[import-not-found,unused-ignore]

    from benchmarks import agent_cpu

    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as folder:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        with wandb.init(mode="offline", dir=folder, project="bench"), mlflow.start_run():
            return agent_cpu.measure(slices=slices, workers=workers, slice_seconds=slice_seconds, sinks=sinks)


def sinks(effort: Effort) -> list[Row]:
    """CPU of all threads but the training's, and the cost of a step, with all sinks and with none."""
    none, everything, why = Pool(), Pool(), ""
    try:
        interpreter = ENVIRONMENT.python(install=False)
    except ToolError as error:
        why = str(error)
    else:
        pools = {"": none, ALL: everything}
        for _ in range(effort.cpu_processes):
            for names in random.sample(list(pools), 2):
                parameters = {"slices": effort.cpu_slices, "workers": _WORKERS, "sinks": names}
                pools[names].add(functools.partial(_run, interpreter, parameters))
    errors = sum(answer["errors"] for answer in everything.answers)
    of_none, of_all = why or none.missing, why or everything.missing
    step, clock = "added to a step on the training thread", "by the agent's own clock"
    cpu_more, step_more = _more(_shares(everything), _shares(none)), _more(_steps(everything), _steps(none))
    more = why or none.missing or everything.missing
    return [
        Row(
            _SECTION, "none: CPU of all threads but the training's", "% of a core", _spread(_shares(none)), note=of_none
        ),
        Row(
            _SECTION,
            "all on: the same",
            "% of a core",
            _spread(_shares(everything)),
            note=of_all or f"{errors} errors of a sink",
        ),
        Row(_SECTION, "all on: more by", "% of a core", cpu_more, Target(AT_MOST, 0.1), more),
        Row(_SECTION, f"none: {step}", "us", _spread(_steps(none)), note=of_none or clock),
        Row(_SECTION, f"all on: {step}", "us", _spread(_steps(everything)), note=of_all or clock),
        Row(_SECTION, f"all on: {step}, more by", "us", step_more, Target(AT_MOST, 1.0), more),
    ]


def _run(interpreter: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as folder:
        answer = Path(folder) / "answer.json"
        command = [str(interpreter), "-m", "benchmarks.sink_cost", json.dumps(parameters), str(answer)]
        return child.collect(command, answer, child.environment() | {"WANDB_SILENT": "true"}, cwd=folder)


def _shares(pool: Pool) -> list[float]:
    return [100 * sum(reading.values()) for answer in pool.answers for reading in answer["slices"]]


def _steps(pool: Pool) -> list[float]:
    return [answer["training_us"] for answer in pool.answers]


def _spread(values: list[float]) -> Spread | None:
    return spread(values) if values else None


def _more(values: list[float], base: list[float]) -> Spread | None:
    """The spread of the differences of what was measured next to each other; None if a part of it is missing."""
    return paired(values, base) if values and len(values) == len(base) else None


def main() -> None:
    """Measure, print, and write the results."""
    about, began = machine.describe(), time.monotonic()
    rows = sinks(FULL)
    about["effort"] = f"{time.monotonic() - began:.0f} s"
    print(report.text(about, rows))
    report.write(_RESULTS, machine.slug(about), about, rows, name="sinks", title="What the sinks cost")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child.answer(measure)
    else:
        main()
