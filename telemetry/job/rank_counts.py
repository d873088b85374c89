"""What one attempt of a rank leaves for its next one: its steps, and the samples and tokens that it has trained on.

Each rank writes a small file when it starts and when it ends. The heartbeat of the same process is newer, should it be
killed in between.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from telemetry.util.files import dump_object, parse_object

MAX_BYTES = 4096

_LARGEST = 1 << 62


def name_of(rank: int) -> str:
    """The file of a rank, in the folder ``attempts``."""
    return f"rank-{rank}.json"


@dataclass(frozen=True, slots=True)
class RankCounts:
    """The counts of a rank.

    Attributes:
        run: name of the run.
        life: the agent that wrote this, whose heartbeat may be newer.
        samples_before, tokens_before, steps_before: of the attempts before. One that did not know its own has added
            nothing.
        samples, tokens, steps: of this attempt; 0 if they are not known, or not yet.
    """

    run: str
    life: str = ""
    samples_before: int = 0
    tokens_before: int = 0
    samples: int = 0
    tokens: int = 0
    steps_before: int = 0
    steps: int = 0

    def next(self, life: str) -> RankCounts:
        """What the next attempt begins with. ``life``: its agent."""
        return RankCounts(
            self.run,
            life,
            samples_before=self.samples_before + self.samples,
            tokens_before=self.tokens_before + self.tokens,
            steps_before=self.steps_before + self.steps,
        )

    def encoded(self) -> bytes:
        """As it is written."""
        return dump_object(asdict(self))


def decoded(content: bytes) -> RankCounts | None:
    """The counts in a file; None where the content is nothing like that."""
    value = parse_object(content)
    if value is None or not isinstance(value.get("run"), str) or not isinstance(value.get("life"), str):
        return None
    names = (field.name for field in fields(RankCounts) if field.name not in {"run", "life"})
    numbers = {name: count(value.get(name)) for name in names}
    return RankCounts(value["run"], value["life"], **numbers)


def count(given: object) -> int:
    """A count that another process has written; 0 if it is not a count."""
    return given if type(given) is int and 0 <= given < _LARGEST else 0
