"""A loop of accelerate with the helper: what a tracker gets, and what is marked."""

import json
import tempfile

import accelerate
import common
import torch
from accelerate.tracking import GeneralTracker
from torch.utils.data import DataLoader

import telemetry
from telemetry.integrations.accelerate_helper import AccelerateTelemetry


class Tracker(GeneralTracker):
    name = "rows"
    requires_logging_directory = False
    rows: list = []

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        self.rows.append({"step": step} | values)


def main():
    with tempfile.TemporaryDirectory() as folder:
        accelerator = accelerate.Accelerator(cpu=True, log_with=Tracker())
        accelerator.init_trackers("test")
        helper = AccelerateTelemetry(accelerator, every_steps=5)
        model = common.network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader, check = DataLoader(common.Slow(160), 4), DataLoader(common.Slow(40), 4)
        model, optimizer, loader, check = accelerator.prepare(model, optimizer, loader, check)
        step = 0
        for _ in range(2):
            for inputs, targets in loader:
                common.train_step(model, optimizer, inputs, targets)
                step += 1
                helper.log(step)
            with telemetry.phase("evaluation"):
                for inputs, _ in check:
                    model(inputs)
            helper.save_state(folder)
    print("RESULT " + json.dumps({"rows": Tracker.rows, "steps": step, "tokens": None}))


main()
