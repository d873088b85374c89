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

from telemetry.integrations.marked_phase import MarkedPhase, prefixed, tell_tokens


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

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002, D102
        self._tokens_told = state.num_input_tokens_seen  # of the attempts before this one

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002, D102
        self._phase.end()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002, D102
        self._phase.end()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
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

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: D102
        self.on_step_end(args, state, control, **kwargs)

    def on_log(  # noqa: D102
        self,
        args: Any,  # noqa: ARG002
        state: Any,
        control: Any,  # noqa: ARG002
        logs: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        due, self._log_due = self._log_due, False
        if due and logs is not None and state.is_world_process_zero:
            logs.update(prefixed())

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002, D102
        self._phase.end()
        if control.should_save:
            self._phase.begin("checkpoint")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002, D102
        self._phase.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002, D102
        self._phase.end()
