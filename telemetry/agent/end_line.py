"""The lines that the agent writes to stderr: where metrics and logs are, and at the end what the run lost most to."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from telemetry.diagnosis.verdict import (
    HEALTHY,
    NO_STEPS,
    STALLED,
    UNKNOWN,
    UNMEASURED,
    RankStall,
    RankWaits,
    find,
    healthy_share,
    lost_seconds,
    other_cause,
    recommended,
)
from telemetry.records import COMPUTE, DATA_WAIT, stuck_in_words
from telemetry.util.errors import say
from telemetry.util.text import rough_duration, rounded_percent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from telemetry.agent.accounting import Accounting
    from telemetry.agent.hangs import Hang
    from telemetry.agent.job_hang import JobHang
    from telemetry.agent.log import EventLog
    from telemetry.agent.restarts import AttemptLog
    from telemetry.agent.stalls import StallMonitor
    from telemetry.agent.totals import TotalsBuilder
    from telemetry.config import Config
    from telemetry.diagnosis.verdict import RunFinding
    from telemetry.node.peers import PeerPaces
    from telemetry.records import RankPace, Totals
    from telemetry.util.processes import Identity


def say_start(identity: Identity, *, metrics_url: str | None, trouble: str, logs: str) -> bool:
    """Print where the metrics and the logs are. Returns whether stderr could be written.

    Args:
        identity: the identity of this process.
        metrics_url: the URL of the metrics; None without an endpoint.
        trouble: why there is no endpoint; empty if that is unknown.
        logs: where the logs are, or why there are no logs.
    """
    where = f"metrics at {metrics_url}" if metrics_url else "no metrics endpoint" + f" ({trouble})" * bool(trouble)
    return say(f"telemetry: run {identity.run}, rank {identity.rank}: {where}, {logs}")


def absolute(folder: Path) -> Path:
    """The absolute path of a folder, so that the script may change its working folder.

    Raises:
        OSError: the path is relative, and the working folder no longer exists.
    """
    try:
        return folder.absolute()
    except FileNotFoundError:
        text = f"the working folder has been removed, so there is no {folder}: set run_dir to an absolute path"
        raise OSError(text) from None


_MIN_SHARE: Final = 0.005
"""Categories with a smaller share of the wall clock are not in the ledger of the line."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """What is known when a run ends.

    Attributes:
        own: the waits of this rank.
        totals: of this rank.
        stall: its stall that cost most, as in the log; None without one.
        peers: the last paces of other ranks, also of ended ones; if a rank runs, it is at most a few seconds old.
            ``world_size``: of the job.
        hang: if the rank was stuck until the end; else None. ``job_hang``: why the whole job was, if that is known.
        children: processes that the script has started with multiprocessing.
    """

    own: RankWaits
    totals: Totals
    stall: dict[str, Any] | None = None
    peers: tuple[RankPace, ...] = ()
    world_size: int = 1
    hang: Hang | None = None
    job_hang: str = ""
    children: int = 0

    @property
    def ranks(self) -> list[RankWaits]:
        """The waits of the ranks of which they are known."""
        peers = [peer for peer in self.peers if peer.run_exposed_seconds is not None]
        return [
            self.own,
            *(
                RankWaits(
                    rank=peer.rank,
                    steps=peer.last_step,
                    wait_seconds=peer.run_wait_seconds,
                    compute_seconds=peer.run_loop_seconds - peer.run_wait_seconds,
                    first_wait_seconds=peer.run_first_wait_seconds,
                    exposed_seconds=peer.run_exposed_seconds,
                    starved_ratio=self.own.starved_ratio,
                )
                for peer in peers
            ),
        ]

    @property
    def stalls(self) -> list[RankStall]:
        """The costliest stall of each rank of which one is known."""
        own = [RankStall(self.own.rank, self.stall["cause"], lost_seconds(self.stall))] if self.stall else []
        return own + [RankStall(p.rank, p.run_cause, p.run_lost_seconds) for p in self.peers if p.run_cause]


def end_line(end: RunEnd, run_dir: Path | None) -> str:
    """The line, without its line break."""
    see = "" if run_dir is None else f"; see: telemetry report {shlex.quote(str(run_dir))}"
    return f"telemetry: {_finding(end)}{see}"


def _finding(end: RunEnd) -> str:
    if end.hang is not None:
        return _stuck(end, end.hang)
    found = find(end.ranks, end.stalls)
    if found.kind == NO_STEPS:
        # A process that this one has started may have trained, with an agent of its own: then the report knows.
        return f"no training step has ended{' in this process, which has started others' if end.children else ''}"
    worst = found.worst
    if found.kind == UNKNOWN or worst is None:
        return _unknown(end, found)
    if found.kind == UNMEASURED:
        why = f": {worst.unmeasured}" if worst.unmeasured else ""
        return f"{_spent(end, worst, worst.wait_ratio)}; how much of that the GPU felt was not measured{why}"
    return _measured(end, found, worst)


def _measured(end: RunEnd, found: RunFinding, worst: RankWaits) -> str:
    if found.kind == STALLED and found.stalled is not None:
        return f"not starved, but {_who(end, found.stalled.rank)} stalled{_why(end, found.stalled)}"
    if found.kind == HEALTHY:
        return f"healthy: {_at_most(end, found, worst)}; {_ledger(end.totals)}"
    spent = _spent(end, worst, worst.exposed_ratio or 0.0)
    if 1 < end.world_size == found.starving:
        spent = f"every rank waits for data; the worst, rank {worst.rank}, {spent.removeprefix(f'rank {worst.rank} ')}"
    stall = next((stall for stall in end.stalls if stall.rank == worst.rank), None)
    return spent if stall is None else spent + _why(end, stall)


def _stuck(end: RunEnd, hang: Hang) -> str:
    if end.job_hang:
        return f"hung before its end: {end.job_hang}"
    doing = f"was {stuck_in_words(hang.category)} for {rough_duration(hang.seconds)}"
    at = f" at {hang.at}" if hang.at else ""
    return f"stuck before its end: {_who(end, end.own.rank)} {doing} ({hang.cause}){at}"


def _unknown(end: RunEnd, found: RunFinding) -> str:
    rank, text = found.unseen, "not known whether this run waits for data: "
    if rank is None:
        text += "the training thread requested no batch that is seen"
    else:
        text += f"the batches of {min(rank.steps, rank.unseen_steps)} of {rank.steps} steps were not seen"
    text += "; put telemetry.watch() around what the training loop takes its batches from"
    if found.stalled is not None:
        text += f"; {_who(end, found.stalled.rank)} stalled{_why(end, found.stalled)}"
    return text


def _who(end: RunEnd, rank: int) -> str:
    return f"rank {rank}" if end.world_size > 1 else "it"


def _share(end: RunEnd, worst: RankWaits, ratio: float) -> str:
    """What another rank has said is some seconds old."""
    return rounded_percent(ratio) if worst.rank == end.own.rank else f"about {rounded_percent(ratio)}"


def _spent(end: RunEnd, worst: RankWaits, ratio: float) -> str:
    share = _share(end, worst, ratio)
    if end.world_size == 1:
        return f"{share} of the training loop waited for data"
    return f"rank {worst.rank} spent {share} of its training loop waiting for data"


def _at_most(end: RunEnd, found: RunFinding, worst: RankWaits) -> str:
    ratio, after = healthy_share(worst)
    share = _share(end, worst, ratio)
    if end.world_size == 1:
        return f"{share} of the training loop waited for data{after}"
    who = "no rank lost more than" if found.measured >= end.world_size else f"rank {worst.rank} lost"
    return f"{who} {share} of its training loop waiting for data{after}"


def _why(end: RunEnd, found: RankStall) -> str:
    """The cause of a rank's stall, and its first advice where the stall is this rank's own."""
    stall = end.stall
    if stall is None or found.rank != end.own.rank:
        return f" ({found.cause})"
    other = other_cause(stall)
    also = "" if other is None else f", and {other['cause']} {rounded_percent(other.get('share_ratio', 0.0))}"
    return f" ({stall['cause']}{also}){_advice(stall['advice'])}"


def _advice(advices: Sequence[dict[str, Any]]) -> str:
    for advice in advices[:1]:
        change = recommended(advice)
        if change.typed and change.gain:
            return f"; {change.typed} is predicted to give {change.gain}x steps/s"
        predicted = f", predicted to give {change.gain}x steps/s" if change.gain else ""
        return f"; try {change.typed}" if change.typed else f"; {advice.get('action')}{predicted}"
    return ""


def _ledger(totals: Totals) -> str:
    wall = totals.wall_seconds
    shares = {c: seconds / wall for c, seconds in totals.ledger_seconds.items()} if wall > 0 else {}
    large = sorted(((share, c) for c, share in shares.items() if share >= _MIN_SHARE), reverse=True)
    parts = ", ".join(f"{rounded_percent(share)} {category.replace('_', ' ')}" for share, category in large)
    steps = f"{totals.steps} step{'' if totals.steps == 1 else 's'}"
    return f"{steps} in {rough_duration(wall)}: {parts}"


class EndLine:
    """Makes the line from the parts of the agent, on the agent thread.

    Attributes:
        text: the line; empty before `make`, and if there is nothing to write.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        accounting: Accounting,
        builder: TotalsBuilder,
        stalls: StallMonitor,
        job_hang: JobHang,
        event_log: EventLog,
        attempt: AttemptLog,
        peers: PeerPaces,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._accounting = accounting
        self._builder = builder
        self._stalls = stalls
        self._job_hang = job_hang
        self._event_log = event_log
        self._attempt = attempt
        self._peers = peers
        self.text = ""

    def make(self, identity: Identity, *, wanted: bool, logged: bool) -> None:
        """Make the line of rank 0. Without a step there is one only if the process ends: a script may stop early.

        Args:
            identity: of this rank.
            wanted: False for a trial of ``telemetry tune``.
            logged: whether the end of the run is in the log.
        """
        totals, stalls = self._builder.current(), self._stalls
        if not (wanted and self._config.end_line and identity.rank == 0):
            return
        if not totals.steps and not self._attempt.end.process_ends:
            return
        end = RunEnd(
            own=self._waits(identity.rank, totals),
            totals=totals,
            stall=stalls.costliest,
            peers=tuple(peer for peer in self._peers.of_run if peer.rank != identity.rank),
            world_size=identity.world_size,
            hang=self._hang,
            job_hang=self._job_hang.sentence,
            children=self._event_log.child_processes,
        )
        self.text = end_line(end, self._run_dir if logged else None)

    def log_fields(self) -> dict[str, Any]:
        """For the last line of the log: for how long the rank was stuck when it ended; empty if it was not."""
        hang = self._hang
        return {} if hang is None else {"stuck_for_seconds": round(hang.seconds, 3)}

    @property
    def _hang(self) -> Hang | None:
        """The hang of this rank, if no step has ended since."""
        ended = self._builder.current().steps - self._accounting.ledger.step_is_open
        return self._stalls.hang_at_end(ended)

    def _waits(self, rank: int, totals: Totals) -> RankWaits:
        spent = totals.ledger_seconds
        return RankWaits(
            rank=rank,
            steps=totals.steps,
            wait_seconds=spent.get(DATA_WAIT, 0.0),
            compute_seconds=spent.get(COMPUTE, 0.0),
            first_wait_seconds=totals.first_wait_seconds,
            exposed_seconds=totals.exposed_wait_seconds,
            unseen_steps=totals.unseen_steps,
            starved_ratio=self._config.stall_enter_ratio,
            unmeasured=self._accounting.exposed_absent or "",
        )
