"""The rank of this process: the one that it claims, and the one that it is shown under."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.util.processes import adopt

if TYPE_CHECKING:
    from telemetry.node.board import Board
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity

_REMEDY: Final = (
    "give each process RANK and WORLD_SIZE, or call torch.distributed.init_process_group; a separate job needs a "
    "run folder of its own"
)


class Membership:
    """Follows the rank that this process claims, and the number that it is shown under.

    Args:
        identity: the identity at the start. All parts of the agent share this one record, and `look` updates it.
        errors: reports that another process claims the same rank.
    """

    def __init__(self, identity: Identity, errors: ErrorLog) -> None:
        self._identity = identity
        self._claim = replace(identity)
        self._errors = errors
        self._seen: int | None = None

    def look(self, board: Board | None, *, steps: int) -> bool:
        """Update the identity of this process, and move its file on the board. Returns whether anything has changed.

        The rank comes from torch.distributed once that is initialised. If another living process of this node already
        has this rank, this process is shown under a free number.

        Args:
            board: shows the other processes; None without a board.
            steps: steps that have ended. A process without steps gets its number without a message in the log.
        """
        with self._errors.contained("rank"):
            self._claim, self._seen = adopt(self._claim, self._seen)
        claim, number = self._claim, self._claim.rank
        with self._errors.contained("board"):
            if board is not None:
                number = board.rank_for(claim.rank, rank_given=claim.rank_given, world_size=claim.world_size)
        if number != claim.rank and steps:
            others = f"another process of this node is rank {claim.rank} too"
            self._errors.tell("rank", f"{others}; this one is shown as {number}: {_REMEDY}")
        identity, before = self._identity, replace(self._identity)
        identity.rank, identity.claimed_rank = number, claim.rank
        identity.local_rank, identity.world_size = claim.local_rank, claim.world_size
        identity.rank_source = claim.rank_source if number == claim.rank else "assigned"
        with self._errors.contained("board"):
            if board is not None and before.rank != number:
                board.move(before.rank, number)
        return identity != before
