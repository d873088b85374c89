"""Which rank this process is, followed while it runs: what it claims, and the number it is shown under."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.core.identity import adopt

if TYPE_CHECKING:
    from telemetry.core.errors import ErrorLog
    from telemetry.core.identity import Identity
    from telemetry.publish.node import NodeService

_REMEDY: Final = (
    "give each process RANK and WORLD_SIZE, or call torch.distributed.init_process_group; a job of its own wants a "
    "run folder of its own"
)


class Membership:
    """Follows the identity of this process.

    Args:
        identity: as read at the start.
        errors: told when another process claims the same rank.

    Attributes:
        claim: who this process takes itself to be.
    """

    def __init__(self, identity: Identity, errors: ErrorLog) -> None:
        self.claim = identity
        self._errors = errors
        self._seen: int | None = None

    def look(self, node: NodeService | None, *, steps: int) -> Identity:
        """Who this process is by now.

        It is the rank that torch.distributed says once it is initialised, and a number of its own where another
        living process of this node holds that rank.

        Args:
            node: knows the other processes; None where there is no board.
            steps: that have ended. A process that does not train is numbered without a word.
        """
        with self._errors.contained("rank"):
            self.claim, self._seen = adopt(self.claim, self._seen)
        claim, number = self.claim, self.claim.rank
        with self._errors.contained("board"):
            if node is not None:
                number = node.rank_for(claim.rank, told=claim.told, world_size=claim.world_size)
        if number == claim.rank:
            return claim
        if steps:
            others = f"another process of this node is rank {claim.rank} too"
            self._errors.tell("rank", f"{others}; this one is shown as {number}: {_REMEDY}")
        return replace(claim, rank=number, rank_source="assigned")
