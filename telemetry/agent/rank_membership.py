"""Follows the rank of this process while it runs: the rank that it claims, and the number that it is shown under."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.util.processes import adopt

if TYPE_CHECKING:
    from telemetry.publish.node import NodeService
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity

_REMEDY: Final = (
    "give each process RANK and WORLD_SIZE, or call torch.distributed.init_process_group; a separate job needs a "
    "run folder of its own"
)


class Membership:
    """Follows the identity of this process.

    Args:
        identity: the identity at the start.
        errors: reports that another process claims the same rank.

    Attributes:
        claim: the identity that this process claims.
    """

    def __init__(self, identity: Identity, errors: ErrorLog) -> None:
        self.claim = identity
        self._errors = errors
        self._seen: int | None = None

    def look(self, node: NodeService | None, *, steps: int) -> Identity:
        """The current identity of this process.

        The rank comes from torch.distributed once that is initialised. If another living process of this node already
        has this rank, this process is shown under a free number.

        Args:
            node: knows the other processes; None if there is no board.
            steps: steps that have ended. A process without steps gets its number without a message in the log.
        """
        with self._errors.contained("rank"):
            self.claim, self._seen = adopt(self.claim, self._seen)
        claim, number = self.claim, self.claim.rank
        with self._errors.contained("board"):
            if node is not None:
                number = node.rank_for(claim.rank, rank_given=claim.rank_given, world_size=claim.world_size)
        if number == claim.rank:
            return claim
        if steps:
            others = f"another process of this node is rank {claim.rank} too"
            self._errors.tell("rank", f"{others}; this one is shown as {number}: {_REMEDY}")
        return replace(claim, rank=number, rank_source="assigned")
