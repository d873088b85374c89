"""What a run that was stuck has lost: each second once, and no counter falls, whatever the process was doing."""

from __future__ import annotations

import itertools
import json
import os
import time

import pytest

from telemetry.agent.run_losses import RunLosses
from telemetry.job.run_state import LOST, RunState, decoded
from telemetry.util.errors import ErrorLog
from telemetry.util.processes import Identity
from tests.test_run_losses import BEAT, AttemptNow


class Hung:
    """260 s of a loop in which a process is stuck for 100 s, from second 50 on, as `RunLosses` sees it every 10 s.

    Attributes:
        stuck_in: in which category. Only the loop's own are part of the loop.
        first_wait: how long the first batch takes; ``replay``: how long the batches after it are only drawn.
        saves: checkpoints. When one is noticed, and where it began, in seconds of the loop.
    """

    def __init__(self, folder, *, stuck_in="compute", first_wait=0.0, replay=0.0, saves=()):
        self.folder, self.stuck_in, self.first_wait, self.replay, self.saves = (
            folder,
            stuck_in,
            first_wait,
            replay,
            saves,
        )
        self.attempt = AttemptNow()
        self.losses = RunLosses(folder, self.attempt, "ab", ErrorLog())
        self.seen: list[dict[str, float]] = []
        self.in_heartbeat: list[float] = []  # seconds stuck, at each of these views

    def run(self, last=260):
        """Returns itself. The newest view is the last of ``seen``."""
        for second in range(0, last + 1, 10):
            in_hang = min(100, max(0, second - 50))
            loop = second if self.stuck_in in {"data_wait", "compute"} else second - in_hang
            for noticed, began in self.saves:
                if second == noticed:
                    self.attempt.saves_completed, self.attempt.kept_seconds = self.attempt.saves_completed + 1, began
            self.attempt.replay_seconds = self.replay if loop > self.first_wait + self.replay else 0.0
            self.in_heartbeat.append(0.0 if self.attempt.stuck is None else self.attempt.stuck.seconds)
            self.losses.tick(
                Identity("run", 0, 0, 1, "n", os.getpid(), "plain"),
                {"startup": 5.0, "data_wait": 0.0, "compute": float(loop)},
                min(float(loop), self.first_wait),
                has_batch=loop > self.first_wait,
                stuck_for_seconds=float(in_hang) if 30 <= in_hang and second <= 150 else 0.0,
                stuck_in=self.stuck_in,
            )
            self.seen.append(self.losses.view().lost_seconds)
        return self

    def ended(self) -> RunState:
        """The state that the process leaves when it ends by itself."""
        self.losses.end(finished=False)
        return decoded((self.folder / "run.json").read_bytes())


@pytest.mark.parametrize(
    ("saves", "redone"),
    [
        ([], 160),
        ([(40, 35.0)], 125),
        ([(200, 200.0)], 60),
        ([(40, 35.0), (200, 200.0)], 60),
        ([(160, 45.0)], 115),  # an asynchronous one, which was complete after the hang
    ],
)
def test_a_hang_before_the_newest_checkpoint_makes_redone_no_less(tmp_path, saves, redone):
    state = Hung(tmp_path, saves=saves).run().ended()
    assert state.own["stuck"] == pytest.approx(100)
    assert state.next(process="next", life="cd", started=time.time()).carried["redone"] == pytest.approx(redone)


@pytest.mark.parametrize("stuck_in", ["evaluation", "checkpoint"])
def test_a_hang_beside_the_loop_takes_nothing_from_it(tmp_path, stuck_in):
    state = Hung(tmp_path, stuck_in=stuck_in, first_wait=8.0, saves=[(40, 35.0)]).run().ended()
    assert state.lost() == dict.fromkeys(LOST, 0.0) | {"startup": 13.0, "stuck": 100.0}
    assert state.next(process="next", life="cd", started=time.time()).carried["redone"] == pytest.approx(160 - 35)


HANGS = [
    (0.0, 0.0, {"startup": 5, "replay": 0}),
    (160.0, 0.0, {"startup": 65, "replay": 0}),  # it was stuck while it waited for its first batch
    (10.0, 150.0, {"startup": 15, "replay": 50}),
]


@pytest.mark.parametrize(("first_wait", "replay", "lost"), HANGS)
def test_a_hang_in_the_first_wait_or_in_the_replay_counts_once(tmp_path, first_wait, replay, lost):
    hung = Hung(tmp_path, first_wait=first_wait, replay=replay).run()
    assert all(after[name] >= before[name] for before, after in itertools.pairwise(hung.seen) for name in LOST)
    assert hung.seen[-1] == dict.fromkeys(LOST, 0.0) | lost | {"stuck": 100}
    assert hung.ended().lost() == hung.seen[-1]


def test_a_hang_is_shown_once_the_heartbeat_has_it(tmp_path):
    """A process that is killed between the two would leave a counter that falls."""
    hung = Hung(tmp_path).run()
    assert [view["stuck"] for view in hung.seen] == hung.in_heartbeat
    assert max(hung.in_heartbeat) == 100


@pytest.mark.parametrize("second", [90, 130, 260])
@pytest.mark.parametrize(("first_wait", "replay", "lost"), HANGS)
def test_no_counter_falls_when_a_hung_process_is_killed(tmp_path, first_wait, replay, lost, second):
    """The next attempt has the state as it was written long before, and the newest heartbeat."""
    hung = Hung(tmp_path, first_wait=first_wait, replay=replay).run(second)
    (tmp_path / "ab.beat").write_text(json.dumps(
        BEAT | {"unix_seconds": time.time() + 1, "ledger_total_seconds": {"startup": 5, "data_wait": 0, "compute": second},
                "first_wait_seconds": min(second, first_wait), "seconds_before": 0, "kept_seconds": 0, "saves_completed": 0,
                "resumption": {"replay_seconds": hung.attempt.replay_seconds},
                "stuck": json.loads(hung.attempt.stuck.encoded())}))  # fmt: skip
    after = RunLosses(tmp_path, AttemptNow(), "cd", ErrorLog())
    after.tick(Identity("run", 0, 0, 1, "n", 1, "plain"), dict.fromkeys(("startup", "data_wait", "compute"), 0.0), 0.0,
               has_batch=False, stuck_for_seconds=0.0, stuck_in=None)  # fmt: skip
    now = after.view().lost_seconds
    assert all(now[name] >= seconds for name, seconds in hung.seen[-1].items()), (hung.seen[-1], now)
    of_attempt = sum(now[name] for name in ("startup", "stuck", "replay", "redone"))
    assert of_attempt == pytest.approx(5 + second), "each second once"


@pytest.mark.parametrize(("kept", "redone"), [(100.0, 60), (100.0000004, 60), (150.0, 110)])
def test_a_checkpoint_in_the_heartbeat_alone_was_after_the_hang(kept, redone):
    before = RunState("run", 0, "p", "ab", 1.0, loop_seconds=200.0, kept_seconds=100.0, stuck_since_kept=100.0)
    beat = RunState("run", 0, "", "ab", 2.0, loop_seconds=260.0, kept_seconds=kept)
    assert before.newer(beat).next(process="q", life="cd", started=2.0).carried["redone"] == pytest.approx(redone)
