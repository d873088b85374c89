"""transformers' Trainer with the callback: what a logger of ``report_to`` gets, and what is marked."""

import json
import tempfile

import transformers
from sentences import BY_EPOCH, Sentences, arguments, network

from telemetry.integrations.transformers_callback import TelemetryTrainerCallback


class Logger(transformers.TrainerCallback):
    """Stands where the callbacks of ``report_to`` do: before all others of the script."""

    rows: list = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append({"step": state.global_step} | dict(logs))


def main():
    with tempfile.TemporaryDirectory() as folder:
        settings = arguments(
            folder, num_train_epochs=2, logging_steps=5, include_num_input_tokens_seen=True, **BY_EPOCH
        )
        data = {"train_dataset": Sentences(160), "eval_dataset": Sentences(40)}
        trainer = transformers.Trainer(network(), settings, callbacks=[Logger()], **data)
        TelemetryTrainerCallback.add_to(trainer)
        trainer.train()
    found = {"rows": Logger.rows, "steps": trainer.state.global_step, "tokens": trainer.state.num_input_tokens_seen}
    print("RESULT " + json.dumps(found))


main()
