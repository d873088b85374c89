"""The programs, what each is like, and what is to be said of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

SCRIPTS: Final = Path(__file__).resolve().parent / "scripts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A small program with the loop of a real one.

    Attributes:
        name: its script in `SCRIPTS`, if ``file`` is not. ``like``: the kind of program, in a few words.
        verdict: a regular expression for the report's verdict. ``advice``: for the setting and action of the first
            advice; empty if none is asked. ``unsaid``: what the text of the report must not have.
        unknown: figures that cannot be known of it, so the report must have none.
        needs: a package that it imports. ``seconds``: length of the training.
        exit_status: with which it ends.
    """

    name: str
    like: str
    verdict: str = "^Healthy"
    advice: str = ""
    unsaid: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    file: str = ""
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    needs: str = ""
    seconds: float = 20.0
    exit_status: int = 0

    @property
    def script(self) -> Path:
        """Path of its script."""
        return SCRIPTS / f"{self.file or self.name}.py"


ALL: Final = (
    Program(name="digits", like="a small network on digits, one worker, a test after each epoch"),
    Program(
        name="photos",
        like="training of an image classifier with meters, validation and checkpoints; one worker is too few",
        verdict="workers_cpu_bound",
        advice="^num_workers",
    ),
    Program(
        name="molecules",
        like="small graphs joined by an own loader, no workers; with a worker it is half as fast",
        verdict="loader_on_training_thread",
        advice="__getitems__",
    ),
    Program(name="endless_loader", like="detection: a loader that never ends, epochs counted by the trainer"),
    Program(name="accumulated", like="image models: four batches for an update, averaged weights, mixed batches"),
    Program(
        name="get_batch",
        like="a language model without a loader: batches from a function, the loss estimated now and then",
        verdict=r"[nN]ot known.*with telemetry\.phase\(\"get_batch\"\): around get_batch\.py:\d+",
        unsaid=("stalled",),
    ),
    Program(
        name="by_hand",
        like="a recurrent language model that updates its parameters itself",
        verdict=r"[nN]ot known.*about \d+ steps, by stack samples.*with telemetry\.step\(\)",
        unsaid=("No training step",),
    ),
    Program(
        name="rollouts",
        like="reinforcement learning: rollouts, then epochs of small batches",
        verdict=r"[nN]ot known.*\d+ % in collect_rollouts at rollouts\.py:\d+",
        unsaid=("stalled", "slower: "),
    ),
    Program(
        name="trainer",
        like="fine-tuning with transformers' Trainer, gradients accumulated, evaluations in mid-epoch",
        needs="transformers",
        unsaid=(r"trainer\.py:\d+ +main",),
    ),
    Program(
        name="lit",
        like="a LightningModule with a sanity check, validation in mid-epoch and accumulated gradients",
        needs="lightning",
        unsaid=(r"lit\.py:\d+ +main",),
    ),
)
