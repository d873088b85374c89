"""A loop that logs to W&B and MLflow itself, in runs of its own, and has forked workers."""

import json
import os
import sys
import time
from pathlib import Path

import common
import mlflow
import torch
import wandb
from torch.utils.data import DataLoader

import telemetry

STEPS = 60
EVERY = 7


def main():
    if telemetry.metrics():  # not without an agent
        from telemetry.sinks.writers import MlflowSink

        MlflowSink.gather_seconds = 0.3  # the run is shorter than the time for which rows are gathered
    folder = Path(sys.argv[1])
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    run = wandb.init(mode="offline", dir=str(folder), project="sinks")
    active = mlflow.start_run()
    model, loader = common.network(), DataLoader(common.Slow(4 * STEPS), 4, num_workers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, targets) in enumerate(loader):
        common.train_step(model, optimizer, inputs, targets)
        if step % EVERY == 0:
            # In two parts, as scripts do: W&B drops the second if the row's number has gone by.
            run.log({"loss": float(step)}, step=step)
            time.sleep(0.15)  # long enough for a window of the agent
            run.log({"rate": 0.1}, step=step)
            mlflow.log_metric("loss", float(step), step=step)
    child = os.fork()
    if child == 0:
        figures = telemetry.metrics()
        telemetry.stop()
        (folder / "child.json").write_text(json.dumps(figures))
        sys.exit(0)  # with the interpreter's own end, at which files are closed
    os.waitpid(child, 0)
    time.sleep(0.3)
    figures = telemetry.metrics()
    telemetry.stop()
    mlflow.end_run()
    run.finish()
    print("RESULT " + json.dumps({"wandb": run.id, "mlflow": active.info.run_id, "figures": figures}))


main()
