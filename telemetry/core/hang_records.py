"""What each rank of a job does while the job hangs, and what was decided about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from telemetry.core.rank_ranges import ranges

ALIVE: Final = "alive"
STOPPED: Final = "stopped"
GONE: Final = "gone"

LEFT: Final = "left"
"""In the place of a category of the ledger: the training loop is over, the process is there."""
ENDED: Final = "ended"
"""The same: the agent has ended by itself, as at the end of the script."""

SILENT: Final = "its agent does not answer"
NODE_SILENT: Final = "nothing comes from its node"
"""In the place of what the kernel says of the thread."""

RANK_GONE: Final = "rank_gone"
RANK_STOPPED: Final = "rank_stopped"
RANK_LEFT: Final = "rank_left"
FETCH: Final = "fetch"
IN_COMPUTE: Final = "compute"
PHASE: Final = "phase"
MISMATCH: Final = "mismatch"
UNKNOWN: Final = "unknown"

HANG_KINDS: Final = (RANK_GONE, RANK_STOPPED, RANK_LEFT, FETCH, IN_COMPUTE, PHASE, MISMATCH, UNKNOWN)
"""Why a job hangs: the values of the ``kind`` label."""


@dataclass(frozen=True, slots=True)
class Collective:
    """The newest collective of a rank.

    Attributes:
        name: such as ``all_reduce``; empty where only its number is known.
        sequence: its number in its process group; None where nothing counts.
        group: name of the process group; empty where that is not known.
        shapes: of its tensors, as text; empty where that is not known.
    """

    name: str
    sequence: int | None = None
    group: str = ""
    shapes: str = ""


@dataclass(frozen=True, slots=True)
class HangState:
    """One rank while the job hangs.

    Attributes:
        rank: its number. ``node``: name of its node.
        doing: a category of the ledger, or `LEFT`, or `ENDED`.
        process: `ALIVE`, `STOPPED` or `GONE`.
        stuck: whether it has ended no step for ``stuck_seconds``.
        seconds: since its training thread last went on.
        waits: whether it waits for other ranks: in a collective, or for one that it has entered.
        where: file and line of the user's own code, such as ``data.py:88``. ``call``: the function called there.
        state: what the kernel says of the thread, in words.
        stack: a hash of the stack, the same on ranks that are at the same place.
        steps: that have ended.
        collective: the newest one that it has entered.
    """

    rank: int
    node: str
    doing: str
    process: str = ALIVE
    stuck: bool = False
    seconds: float = 0.0
    waits: bool = False
    where: str | None = None
    call: str | None = None
    state: str = ""
    stack: str = ""
    steps: int = 0
    collective: Collective | None = None


@dataclass(frozen=True, slots=True)
class HangSuspect:
    """A rank that the others wait for. ``doing`` continues "rank 3 is ..."."""

    rank: int
    node: str
    where: str | None
    doing: str


@dataclass(frozen=True, slots=True)
class WaitingRanks:
    """Ranks that wait in the same collective."""

    ranks: tuple[int, ...]
    collective: str | None
    sequence: int | None
    shapes: str = ""


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Why a job hangs.

    Attributes:
        kind: from `HANG_KINDS`.
        suspects: the ranks that the others wait for, at most `MAX_SUSPECTS`; ``suspects_total``: how many there are.
        waiting: the ranks that wait, by collective, the largest group first.
        seconds: how long the job has hung.
        silent: ranks of the job of which nothing is known.
        sentence: all of it in one sentence.
    """

    kind: str
    suspects: tuple[HangSuspect, ...]
    suspects_total: int
    waiting: tuple[WaitingRanks, ...]
    seconds: float
    silent: tuple[int, ...]
    sentence: str = ""

    def fields(self) -> dict[str, Any]:
        """For the log, in the words of ``report --json``; ranks as ranges, with the first and the last of each."""
        return {
            "verdict": self.sentence,
            "kind": self.kind,
            "suspects": [{"rank": s.rank, "node": s.node, "where": s.where, "doing": s.doing} for s in self.suspects],
            "suspects_total": self.suspects_total,
            "waiting": [
                {"ranks": ranges(w.ranks), "collective": w.collective, "sequence": w.sequence}
                for w in self.waiting[:MAX_SUSPECTS]
            ],
            "silent_ranks": len(self.silent),
        }


MAX_SUSPECTS: Final = 16
"""That are named. Of more, the number is told."""
