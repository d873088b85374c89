"""Whether this rank stalls, and why: slices of time in, stalls with a cause and advice out."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from telemetry.callback import StallCallback
from telemetry.collect.proc import is_running
from telemetry.collect.whereabouts import Whereabouts
from telemetry.diagnose.advice import advise
from telemetry.diagnose.gather import HELD_BACK
from telemetry.diagnose.stall import LEAST_STEPS_OF_A_RUN, StallMachine
from telemetry.diagnose.straggler import held_up_by, mostly_in_sync, straggler
from telemetry.diagnose.stuck import paused
from telemetry.records import CAUSES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, STARTUP, Slice, StallView
from telemetry.watchdog import Watchdog

_WORKING: Final = 0.5
"""A GPU that runs something for this share of the time has the clock it works with."""

_WORTH_TIMING: Final = 0.02
_TIMED_WAITS: Final = 32
"""Where waits take this share of the loop, so many of the next batches are timed in parts, and not one: a sampler may
do its work once in a few batches. At 5 µs each that is less than a fifth of a millisecond in a second."""

_LOOK_SECONDS: Final = 0.1
_CLOSE_LOOK_SECONDS: Final = 0.02
"""How far apart looks at the training thread are: usually, and while one rank holds the others up. A look costs the
agent thread 0.12 ms, its wake-up included. From ten a second, what a rank that pauses for 60 ms of a step of 71 costs
is known so roughly that predictions were up to 42 % off; with fifty a second, up to 15 %."""

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.accounts import Accounts
    from telemetry.attach.steps import StepTracker
    from telemetry.config import Config
    from telemetry.diagnose.stall import Stall
    from telemetry.faults import Faults
    from telemetry.records import GpuSample, RankPace, WorkersSample
    from telemetry.sampling import Sampler
    from telemetry.watchdog import Stuck


class Judge:
    """Follows one rank through its stalls.

    Args:
        config: window and ratios.
        tracker: knows where batches come from, and what garbage collection took.
        sampler: has the newest samples.
        faults: told when the user's callback fails, or is still busy.
        emit: writes a line of the log.
        timestamp: of now, ISO-8601.
        rank: whose stalls these are.
        peers: the newest of the other ranks of this node.
    """

    def __init__(
        self,
        config: Config,
        tracker: StepTracker,
        sampler: Sampler,
        *,
        faults: Faults,
        emit: Callable[[str, dict[str, Any]], Any],
        timestamp: Callable[[], str],
        rank: int = 0,
        peers: Callable[[], tuple[RankPace, ...]] = tuple,
    ) -> None:
        self._machine = StallMachine(
            config.stall_window_seconds, config.stall_enter_ratio, config.stall_exit_ratio, rank
        )
        self._peers = peers
        self._whereabouts = Whereabouts(
            lambda: tracker.thread,
            lambda: tracker.stepping and not tracker.waiting_since,
            lambda: tracker.device is None and tracker.accelerator is None and is_running(tracker.native_thread),
        )
        self._watchdog = Watchdog(config, tracker)
        self._stuck: Stuck | None = None
        self._phase: str | None = None
        self._usual_clock: float | None = None
        self._one_is_slow = False
        self._still = 0.0
        self._still_looks = [0, 0]
        self._interval = config.interval_seconds
        self._tracker = tracker
        self._sampler = sampler
        self._faults = faults
        self._callback = StallCallback(config.on_stall, faults)
        self._emit = emit
        self._timestamp = timestamp
        self._before: dict[str, float] = {}
        self._exposed_before: float | None = 0.0
        self._first_wait_to_come = 0.0
        self._opened = ""
        self._stalls = dict.fromkeys(CAUSES, 0)
        self._lost = dict.fromkeys(CAUSES, 0.0)

    def tick(self, accounts: Accounts) -> None:
        """Take in what happened since the last tick; log a stall that opens or closes."""
        self._callback.note_failures()
        piece, stats = self._slice(accounts), accounts.stats
        stood_still = paused(piece.seconds, self._interval, piece.process_cpu)
        self._phase = accounts.ledger.category if accounts.ledger.category in {CHECKPOINT, EVALUATION} else None
        if not piece.steps and not stood_still:
            stood_still = any(peer.phase for peer in piece.peers) or self._watchdog.in_debugger()
        self._stand(piece)
        stuck = self._stuck = self._watchdog.tick(piece, accounts.ledger, stats, stood_still=stood_still)
        if stuck is not None and stuck.kind != "held":
            self._take_stuck(stuck, piece, accounts.steps_total)
        elif not stood_still:
            self._take(piece, accounts.steps_total)
        stall = self._machine.stall
        self._one_is_slow = "straggler" in {stall and stall.cause, *(peer.cause for peer in piece.peers)}

    def _stand(self, piece: Slice) -> None:
        if piece.steps:
            self._still, self._still_looks = 0.0, [0, 0]
            return
        self._still += piece.seconds - piece.startup
        self._still_looks[0] += piece.samples
        self._still_looks[1] += piece.in_sync

    def _take(self, piece: Slice, steps: int) -> None:
        before = self._machine.stall
        change = self._machine.update(piece)
        if change is None:
            return
        self._count_lost(change.stall, before)
        if change.kind == "opened":
            self._opened_now(change.stall)
        elif change.kind == "closed":
            self._close(change.stall, steps)

    def _take_stuck(self, stuck: Stuck, piece: Slice, steps: int) -> None:
        """One stall at a time: a run that is stuck takes the place of what was open."""
        before = self._machine.stall
        if before is not None:
            self._close(before, steps)
        if stuck.kind == "closed":
            self._machine.close_stuck()
            return
        pace = self.pace()
        missing = held_up_by(pace, piece.peers) if stuck.cause == "unknown" and pace is not None else None
        if missing is not None:
            stuck = self._stuck = self._watchdog.blame(stuck, missing)
        stall = self._machine.open_stuck(stuck.cause, stuck.seconds, piece)
        self._count_lost(stall, None)
        self._opened_now(stall, with_stacks=True)

    def adopt(self, rank: int) -> None:
        """The rank of this process is another one than was known so far."""
        self._machine.rank = rank

    def end(self, steps: int) -> None:
        """The run ends, and with it the stall that is open."""
        change = self._machine.last()
        if change is not None:
            self._count_lost(change.stall, None)
            self._opened_now(change.stall)
        stall = self._machine.stall
        if stall is not None:
            self._close(stall, steps)

    def wait_for_callback(self, seconds: float) -> None:
        """Let the user's callback come to its end, for so many seconds at most."""
        self._callback.wait(seconds)

    def look(self) -> None:
        """See where the training thread is, where there are other ranks to compare with."""
        self._whereabouts.look()

    @property
    def look_seconds(self) -> float:
        """How long after one look to take the next, on average.

        Sooner while this rank waits for a slow one, or a peer does: the slow one is looked at as closely.
        """
        return _CLOSE_LOOK_SECONDS if self._one_is_slow else _LOOK_SECONDS

    def pace(self) -> RankPace | None:
        """What the other ranks of this node may know of this one."""
        pace = self._machine.pace()
        if pace is None:
            return None
        together = mostly_in_sync(*self._still_looks)
        return replace(pace, phase=self._phase, still=self._still, still_in_sync=together)

    def view(self) -> StallView:
        """For the endpoint."""
        stall = self._machine.stall
        cause = None if stall is None else stall.cause
        return StallView(cause, dict(self._stalls), dict(self._lost), None if stall is None else self._slow_rank(stall))

    def lost(self) -> dict[str, float]:
        """Seconds lost in stalls so far, by cause; those that cost nothing are left out."""
        return {cause: seconds for cause, seconds in self._lost.items() if seconds}

    def stall_fields(self) -> dict[str, Any] | None:
        """Fields of the stall that is open, as in the log; None without one."""
        stall = self._machine.stall
        return None if stall is None else self._fields(stall) | {"opened": self._opened}

    def _slow_rank(self, stall: Stall) -> int | None:
        """The rank that this one waits for, while that is what it loses its time to."""
        if stall.cause != "straggler":
            return None
        if stall.stuck:
            return self._stuck.missing.rank if self._stuck is not None and self._stuck.missing is not None else None
        slow = straggler(stall.evidence.pace, stall.evidence.peers)
        return None if slow is None else slow.rank

    def _count_lost(self, stall: Stall, before: Stall | None) -> None:
        for cause, seconds in stall.lost.items():
            self._lost[cause] += seconds - (before.lost.get(cause, 0.0) if before is not None else 0.0)

    def _opened_now(self, stall: Stall, *, with_stacks: bool = False) -> None:
        self._opened = self._timestamp()
        self._stalls[stall.cause] += 1
        fields = self._fields(stall) | {"opened": self._opened}
        if with_stacks:
            with self._faults.contained("stacks"):
                fields["evidence"]["stacks"] = self._watchdog.stacks()
        self._emit("stall_open", fields)
        self._callback.tell(fields)

    def _close(self, stall: Stall, steps: int) -> None:
        when = {"opened": self._opened, "closed": self._timestamp()}
        self._emit("stall_close", self._fields(stall) | when | {"last_step": steps})

    def _fields(self, stall: Stall) -> dict[str, Any]:
        lost = {cause: round(seconds, 3) for cause, seconds in stall.lost.items()}
        ratio, stuck = stall.exposed_ratio, self._stuck if stall.stuck else None
        evidence = stall.evidence.as_log_field() | {"lost_seconds": lost}
        slow = self._slow_rank(stall)
        if slow is not None:
            evidence["straggler_rank"] = slow
        advice = advise(stall.cause, stall.evidence)
        if stuck is not None:
            evidence |= stuck.evidence()
            advice = advice if stall.cause == "worker_stuck" else stuck.advice()
        return {
            "cause": stall.cause,
            "first_step": stall.opened_step,
            "exposed_wait_ratio": None if ratio is None else round(ratio, 4),
            "evidence": evidence,
            "advice": [
                {
                    "action": a.action,
                    "setting": a.setting,
                    "value": a.value,
                    "predicted_speedup": a.predicted_speedup,
                    "because": a.because,
                }
                for a in advice
            ],
        }

    def _slice(self, accounts: Accounts) -> Slice:
        ledger, stats = accounts.ledger, accounts.stats
        spent = ledger.seconds()
        process, workers = self._sampler.newest("process"), self._sampler.newest("workers")
        pressure, gpu = self._sampler.newest("pressure"), self._sampler.newest("nvml")
        runnable = None if process is None else process.runnable_seconds
        host, looks = self._sampler.newest("host"), self._whereabouts.take()
        seconds = self._since("wall", ledger.wall_seconds)
        counted = workers is not None and workers.busy_ratio is not None
        fetches = 0.0 if workers is None else self._since("fetches", workers.fetches_total)  # of a tick, counted or not
        source = accounts.take_source()
        first_wait = ledger.first_wait_ns / 1e9
        self._tracker.freeing.read()
        piece = Slice(
            seconds=seconds,
            wait=self._since("wait", spent[DATA_WAIT] - first_wait),
            exposed=self._exposed_since(accounts.exposed.seconds, self._since("first_wait", first_wait), stats.steps),
            edge_wait=self._since("edge_wait", ledger.edge_wait_ns / 1e9),
            edges=int(self._since("edges", ledger.edges)),
            left=int(self._since("left", ledger.left)),
            around_edges=self._change("around_edges", ledger.around_edges_ns / 1e9),
            compute=self._since("compute", spent[COMPUTE]),
            evaluation=self._since("evaluation", spent[EVALUATION]),
            checkpoint=self._since("checkpoint", spent[CHECKPOINT]),
            garbage=self._since("garbage", self._tracker.garbage_ns / 1e9),
            steps=int(self._since("steps", accounts.steps_total)),
            batches=int(self._since("batches", ledger.batches)),
            late_wait=self._since("late_wait", stats.late_wait_seconds),
            checkpoint_steps=int(self._since("checkpoint_steps", stats.checkpoint_steps)),
            checkpoint_steps_compute=self._since("checkpoint_compute", stats.checkpoint_steps_compute_seconds),
            source=None if source is None else source.kind,
            process_cpu=None if process is None else self._since("process_cpu", process.cpu_seconds),
            fetches=int(fetches) if counted else None,
            fetch_busy=workers.busy_ratio * workers.training_workers * seconds if counted else None,
            startup=self._since("startup", spent[STARTUP] + first_wait),
            own_runnable=None if runnable is None else self._since("runnable", runnable),
            **self._deliveries(workers),
            timed_fetch=self._since("timed_fetch", self._tracker.timed_fetch_ns / 1e9),
            timed_fetch_cpu=self._since("timed_fetch_cpu", self._tracker.timed_fetch_cpu_ns / 1e9),
            freeing=self._since("freeing", self._tracker.freeing.ns / 1e9),
            freed=int(self._since("freed", self._tracker.freeing.freed)),
            **self._inside(),
            samples=looks.samples,
            in_sync=looks.in_sync,
            where=looks.where,
            peers=self._peers(),
            workers=workers,
            settings={} if source is None else source.settings,
            cores=_cores(pressure.cgroup_cpu_limit if pressure is not None else None),
            host_cpu_ratio=None if host is None else host.cpu_ratio,
            host_cores=0 if host is None else host.cpu_count,
            quota=None if pressure is None else pressure.cgroup_cpu_limit,
            quota_used=None if pressure is None else pressure.cgroup_cpu_used,
            throttled_ratio=None if pressure is None else pressure.cgroup_throttled_ratio,
            gpu_utilization_ratio=None if gpu is None else gpu.utilization_ratio,
            gpu_clock_ratio=self._clock_ratio(gpu),
            gpu_throttled=(gpu.throttled or ()) if gpu is not None else (),
        )
        waits = piece.wait >= _WORTH_TIMING * (piece.wait + piece.compute) > 0
        self._tracker.time_next_batch(_TIMED_WAITS if waits else 1)
        return piece

    def _inside(self) -> dict[str, Any]:
        """What the training thread did itself while it asked for batches."""
        inside = self._tracker.inside
        return {
            "timed_waits": int(self._since("timed_waits", inside.batches)),
            "timed_sampler": self._since("timed_sampler", inside.sampler_ns / 1e9),
            "timed_sampler_cpu": self._since("timed_sampler_cpu", inside.sampler_cpu_ns / 1e9),
            "timed_receiving_cpu": self._since("timed_receiving_cpu", inside.receiving_cpu_ns / 1e9),
            "edge_sampler": self._since("edge_sampler", inside.edge_sampler_ns / 1e9),
            "edge_sampler_cpu": self._since("edge_sampler_cpu", inside.edge_sampler_cpu_ns / 1e9),
            "garbage_wait": self._since("garbage_wait", inside.garbage_ns / 1e9),
            "edge_garbage": self._since("edge_garbage", inside.edge_garbage_ns / 1e9),
        }

    def _clock_ratio(self, gpu: GpuSample | None) -> float | None:
        """The GPU's clock relative to what it is in this run where nothing holds it back; its maximum before that."""
        if gpu is None or gpu.sm_clock_hertz is None or not gpu.sm_clock_max_hertz:
            return None
        if not HELD_BACK & {*(gpu.throttled or ())} and (gpu.utilization_ratio or 0.0) >= _WORKING:
            before = self._usual_clock
            self._usual_clock = gpu.sm_clock_hertz if before is None else 0.9 * before + 0.1 * gpu.sm_clock_hertz
        return min(1.0, gpu.sm_clock_hertz / (self._usual_clock or gpu.sm_clock_max_hertz))

    def _deliveries(self, workers: WorkersSample | None) -> dict[str, Any]:
        if workers is None:
            return {}
        return {
            "late": self._since("late", workers.late_seconds_total),
            "moved": self._since("moved", workers.moved_seconds_total),
            "moved_from_busy": self._since("moved_from_busy", workers.moved_from_busy_seconds_total),
            "moved_from_long": self._since("moved_from_long", workers.moved_from_long_seconds_total),
            "head_of_line": self._since("head_of_line", workers.head_of_line_seconds_total),
            "matched": int(self._since("matched", workers.matched_total)),
            "from_busy": int(self._since("from_busy", workers.from_busy_total)),
        }

    def _exposed_since(self, exposed: float | None, first_wait: float, steps: int) -> float | None:
        """The exposed wait since the last call, without the wait for the first batch.

        The GPU's clock is read some steps after a wait is over, so that one's exposed wait may be yet to come; but not
        any more when the run has steps enough to be judged.
        """
        before, self._exposed_before = self._exposed_before, exposed
        if exposed is None or before is None:
            return None
        added = max(0.0, exposed - before)
        self._first_wait_to_come += first_wait
        first = min(added, self._first_wait_to_come)
        self._first_wait_to_come = self._first_wait_to_come - first if steps < LEAST_STEPS_OF_A_RUN else 0.0
        return added - first

    def _since(self, name: str, value: float) -> float:
        return max(0.0, self._change(name, value))

    def _change(self, name: str, value: float) -> float:
        before = self._before.get(name, 0.0)
        self._before[name] = value
        return value - before


def _cores(limit: float | None) -> float:
    """Cores this process may use: its affinity, and its cgroup's limit."""
    allowed = float(len(os.sched_getaffinity(0)))
    return min(allowed, limit) if limit is not None else allowed
