"""A callback for Trainer of transformers.

    from telemetry.integrations.transformers_callback import TelemetryTrainerCallback

    trainer = Trainer(...)
    TelemetryTrainerCallback.add_to(trainer)

It adds the figures to what Trainer logs, at Trainer's own ``logging_steps``, and marks evaluations and checkpoints.
``telemetry run`` works without it.
"""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import DefaultFlowCallback, TrainerCallback

from telemetry.integrations import MarkedPhase, prefixed, tell_tokens


class TelemetryTrainerCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Without an agent it does nothing.

    Callbacks are called in their order, and those of ``report_to`` come before the script's own. So in
    ``Trainer(callbacks=[...])`` this one is too late for them: use `add_to`.
    """

    def __init__(self) -> None:
        self._phase = MarkedPhase()
        self._log_due = False
        self._tokens_told = 0

    @classmethod
    def add_to(cls, trainer: Any) -> TelemetryTrainerCallback:
        """Add a callback to a trainer, in front of those that write logs. Returns the callback."""
        callback = cls()
        callbacks = trainer.callback_handler.callbacks
        flow = [at for at, other in enumerate(callbacks) if isinstance(other, DefaultFlowCallback)]
        # Behind the one that decides when Trainer logs, evaluates and saves.
        callbacks.insert(flow[0] + 1 if flow else 0, callback)
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tokens_told = state.num_input_tokens_seen  # of the attempts before this one

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase.end()

    on_epoch_begin = on_save = on_train_end = on_step_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a phase: Trainer now logs, evaluates and saves, in this order, but its callbacks only see the ends."""
        self._log_due = bool(control.should_log)
        # Trainer counts those of all ranks, where `include_num_input_tokens_seen` is set. The rest comes next time.
        share = max(0, state.num_input_tokens_seen - self._tokens_told) // max(1, args.world_size)
        self._tokens_told += share * max(1, args.world_size)
        tell_tokens(share)
        if control.should_evaluate:
            self._phase.begin("evaluation")
        elif control.should_save:
            self._phase.begin("checkpoint")

    on_epoch_end = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        due, self._log_due = self._log_due, False
        if due and logs is not None and state.is_world_process_zero:
            logs.update(prefixed())

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase.end()
        if control.should_save:
            self._phase.begin("checkpoint")
