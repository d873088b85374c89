"""Whether a rank hangs, and which ranks a hanging job waits for: pure functions of what the ticks have seen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from telemetry.agent.stuck_monitor import (
    Moment,
    StuckDetector,
    limit_seconds,
    never_ends,
    paused,
    phase_seconds,
    stuck_cause,
)
from telemetry.diagnosis.causes import CAUSES
from telemetry.diagnosis.hangs import ENDED, GONE, LEFT, STOPPED, HangState, decide
from telemetry.log.lines import Suspect, WaitingRanges
from telemetry.loop.ledger import StepTimes
from telemetry.model.records import Collective
from telemetry.util.words import named, ranges
from tests.slice_cases import STARVED, a_slice
from tests.slices import Detector

QUICK = StepTimes(p99=0.1, longest=1.0)
NCCL_SECONDS = 600


def moment(seconds=1.0, progress=1, **more) -> Moment:
    return Moment((progress,), seconds, **more)


def still(place: str = "write", progress: int = 1) -> Moment:
    """A second in a checkpoint of this rank."""
    return moment(phase_at=place, progress=progress)


def behind(phase_seconds: float, **more) -> Moment:
    """A second in which another rank is in a checkpoint, without progress for so long."""
    return moment(peer_phase_seconds=phase_seconds, **more)


def dead(stood: float, **more) -> Moment:
    """A second in which all ranks stand in collectives, but not in the same one: this rank for so long."""
    return behind(0.0, phase_at="forward", deadlock_seconds=stood, **more)


class Steps:
    """As much of `StepStats` as is read."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def step_times(self) -> StepTimes:
        return self._times


def ticks(watch: StuckDetector, moments, steps: StepTimes = QUICK) -> list[str | None]:
    return [watch.update(each, Steps(steps)) for each in moments]


# -- whether a rank is stuck: one moment a second ----------------------------------------------------------------------


def test_it_opens_once_and_closes_when_the_run_goes_on():
    watch = StuckDetector(None, 1.0)
    said = ticks(watch, [moment() for _ in range(40)])
    assert said == [None] * 30 + ["opened"] + ["held"] * 9  # the first tick is the one that has seen the progress
    assert watch.seconds == 39
    assert ticks(watch, [moment(progress=2)] * 6) == ["closed"] + [None] * 5
    ticks(watch, [moment()] * 32)
    assert ticks(watch, [moment(over=True)] * 100) == ["closed"] + [None] * 99, "nor does time after the loop count"
    assert ticks(watch, [moment()] * 29) == [None] * 29


OPENS = {
    "a step": (None, [moment()], 30),
    # One of another node's ranks may be in an evaluation, which this node hears of later.
    "a wait for another node": (None, [moment(waits_for_far_ranks=True)], 45),
    "a wait for another node, 1 s set": (1.0, [moment(waits_for_far_ranks=True)], 6),
    "a wait for another node, 60 s set": (60.0, [moment(waits_for_far_ranks=True)], 60),
    "a first step, which compiles": (None, [moment(slow=True)], 510),
    "a first step, 1 s set": (1.0, [moment(slow=True)], 510),
    "a first step, 1000 s set": (1000.0, [moment(slow=True)], 1000),
    "one place of a loop without loaders": (
        None,
        [moment(loop_at=str(n)) for n in range(99)] + [moment(loop_at="")],
        129,
    ),
    # All ranks are in it, so none waits for them in the loop.
    "one place of a checkpoint": (None, [still()], 510),
    "one place of a checkpoint, 5 s set": (5.0, [still()], 30),
    "a checkpoint that moved until lately": (None, [still(str(n)) for n in range(500)] + [still()], 530),
    "a checkpoint of another rank, and then a step": (None, [behind(0.0)] * 400 + [moment()], 429),
    "an evaluation in a collective in which the others are not": (None, [dead(second) for second in range(99)], 30),
    "the same, and the others are behind the loop": (None, [dead(second, over=True) for second in range(99)], 30),
    "the same, with another node": (None, [dead(second, waits_for_far_ranks=True) for second in range(99)], 45),
    "one of another rank, which no longer goes on": (None, [behind(0.0)] * 300 + [behind(510.0)], 300),
}


@pytest.mark.parametrize(("setting", "moments", "seconds"), OPENS.values(), ids=OPENS)
def test_when_a_rank_is_stuck(setting, moments, seconds):
    """The last moment goes on."""
    watch = StuckDetector(setting, 1.0)
    said = ticks(watch, [*moments, *[moments[-1]] * 1100])
    assert said.index("opened") == seconds
    assert {*said[seconds + 1 :]} == {"held"}
    assert watch.seconds == len(said) - 1, "all of it is lost"


NOT_STUCK = {
    "steps end": [moment(progress=number // 20) for number in range(1000)],
    "after the loop": [moment(over=True)] * 1000,
    "a machine that slept": [moment(), moment(90_000.0), moment(progress=2)],
    "rollouts of a loop without loaders": [moment(loop_at=str(n % 7)) for n in range(3000)],
    "its steps, which only samples show": [moment(loop_at=str(n // 400), slow=True) for n in range(3000)],
    "an evaluation without batches": [still(str(n % 7)) for n in range(3000)],
    "a few slow batches": [still("batch", number // 400) for number in range(3000)],
    "a debugger in an evaluation": [moment(0.0, phase_at="pdb")] * 3000,
    "startup, a phase of the user": [moment(0.0)] * 3000,
    "an evaluation of another rank": [behind(seconds % 60) for seconds in range(3000)],
}


@pytest.mark.parametrize("moments", NOT_STUCK.values(), ids=NOT_STUCK)
def test_what_is_not_stuck(moments):
    assert set(ticks(StuckDetector(None, 1.0), moments)) == {None}


@pytest.mark.parametrize(
    ("setting", "p99", "longest", "at_epoch_boundary", "seconds"),
    [
        (None, 0.1, 1.0, False, 30.0),
        (None, 10.0, 12.0, False, 200.0),  # many times the p99
        (None, 60.0, 70.0, False, 510.0),  # but less than NCCL's timeout
        (None, 300.0, 300.0, False, 600.0),  # as long as that is some multiple
        (None, None, None, False, 30.0),
        (7.0, 10.0, 12.0, False, 7.0),
        (7.0, 0.1, 20.0, True, 40.0),  # the first batch of an epoch, where the run's own took 20 s
        (None, 0.1, 50.0, True, 100.0),
    ],
)
def test_how_long_is_too_long(setting, p99, longest, at_epoch_boundary, seconds):
    now = moment(at_epoch_boundary=at_epoch_boundary)
    assert limit_seconds(setting, StepTimes(p99, longest), now) == seconds


@pytest.mark.parametrize(
    ("setting", "p99", "far", "seconds"),
    [(None, 1, False, 510), (None, 10, True, 510), (None, 130, True, 510), (1.0, 10, True, 6), (60.0, 10, True, 360)],
)
@pytest.mark.parametrize("first_steps", [False, True])
def test_a_hang_in_a_checkpoint_of_another_rank_is_noticed_before_nccl_ends_it(setting, p99, far, seconds, first_steps):
    watch = StuckDetector(setting, 1.0)
    moments = [behind(second, waits_for_far_ranks=far, slow=first_steps) for second in range(NCCL_SECONDS)]
    opened = ticks(watch, moments, StepTimes(p99, p99)).index("opened")
    assert opened == (510 if first_steps else seconds)
    assert phase_seconds(setting) + 45 < NCCL_SECONDS - 40, "news of another node are as old"


BARRIER, BROADCAST = Collective("barrier", 7, "0"), Collective("broadcast", 7, "0")


@pytest.mark.parametrize(
    ("own", "others", "ends"),
    [
        (BARRIER, [BROADCAST], False),
        (BARRIER, [BARRIER, BARRIER, replace(BARRIER, sequence=8)], False),
        (Collective("barrier 1a"), [Collective("barrier 2b")], False),  # nothing counts them: two places
        (BARRIER, [BARRIER, BARRIER], True),
        (BARRIER, [BROADCAST, None], True),  # one does something else, such as a checkpoint
        (None, [BROADCAST, BARRIER], True),
        (BARRIER, [replace(BROADCAST, group="1")], True),
        (BARRIER, [], True),
    ],
)
def test_ranks_in_different_collectives_of_one_group_never_end(own, others, ends):
    assert never_ends(own, others) != ends


@pytest.mark.parametrize(
    ("category", "source", "fetching", "cause"),
    [
        ("data_wait", "workers", 31.0, "worker_stuck"),
        ("data_wait", "workers", 1.0, "unknown"),
        ("data_wait", "watched", 0.0, "source_slow"),
        ("data_wait", "training_thread", 31.0, "loader_on_training_thread"),
        ("data_wait", None, 0.0, "unknown"),
        ("data_wait", None, 31.0, "worker_stuck"),
        ("compute", "workers", 31.0, "unknown"),
    ],
)
def test_the_cause(category, source, fetching, cause):
    assert stuck_cause(category, source, fetching, 30.0) == cause
    assert cause in CAUSES


@pytest.mark.parametrize(
    ("seconds", "intervals", "cpu", "stood_still"),
    [
        (1.0, 1, 0.0, False),
        (20.0, 1, 0.01, True),
        (20.0, 1, 15.0, False),
        (20.0, 1, None, False),
        (5.0, 1, 0.01, True),
        (5.0, 5, 0.01, False),  # of a calm loop that waits for a GPU
        (20.0, 5, 0.01, True),
    ],
)
def test_a_late_tick_without_any_cpu_time_is_a_process_that_stood_still(seconds, intervals, cpu, stood_still):
    assert paused(seconds, 1.0, cpu, intervals=intervals) is stood_still


def test_a_stuck_run_replaces_the_open_stall_and_clears_the_window():
    machine = Detector(30, 0.2, 0.1)
    for _ in range(40):
        machine.update(a_slice(source="training_thread", **STARVED))
    assert machine.stall.cause == "loader_on_training_thread"
    piece = a_slice(wait=1.0, compute=0.0, steps=0, source="workers")
    assert machine.open_stuck("worker_stuck", 30.0, piece).cause == "worker_stuck"
    for _ in range(10):
        assert machine.update(piece).kind == "held"
    assert machine.stall.lost_seconds == {"worker_stuck": 10.0}  # the 30 s before stand in the other
    assert machine.stall.exposed_wait_ratio == 1.0
    machine.close_stuck(a_slice())
    assert [machine.update(a_slice()) for _ in range(40)] == [None] * 40


amount = st.floats(0, 1e9) | st.sampled_from([0.0, 1e-9])
moments = st.builds(
    Moment, progress=st.tuples(st.integers(0, 3)), seconds=amount, over=st.booleans(), slow=st.booleans(),
    at_epoch_boundary=st.booleans(), waits_for_far_ranks=st.booleans(),
    phase_at=st.sampled_from([None, None, "a", "b"]), loop_at=st.sampled_from([None, None, "a"]), peer_phase_seconds=st.none() | amount,
)  # fmt: skip
durations = st.builds(StepTimes, p99=st.none() | amount, longest=st.none() | amount)


@given(st.none() | st.floats(1, 604800), st.floats(0.1, 3600), st.lists(st.tuples(moments, durations), max_size=50))
@settings(max_examples=300, deadline=None)
def test_no_input_crashes_it_and_what_it_says_is_in_order(setting, interval, seen):
    watch = StuckDetector(setting, interval)
    opened = False
    for each, steps in seen:
        said = watch.update(each, Steps(steps))
        assert said in ({"held", "closed"} if opened else {"opened", None})
        opened = said in {"opened", "held"}
        assert watch.stuck == opened
        assert not opened or (not each.over and watch.seconds >= (setting or 30.0))


# -- why the job hangs -------------------------------------------------------------------------------------------------

SINCE = "2026-11-24T14:05:12.000Z"


def waits(
    rank: int,
    name: str = "all_reduce",
    sequence: int | None = 81234,
    shapes: str = "",
    group: str = "default",
    **fields,
) -> HangState:
    told = {"where": "train.py:40", "collective": Collective(name, sequence, group, shapes)} | fields
    return HangState(
        rank, f"n{rank // 2 + 1}", **{"doing": "compute", "stuck": True, "seconds": 60.0, "waits": True} | told
    )


def stands(rank: int, doing: str = "compute", where: str | None = "train.py:12", **fields) -> HangState:
    return HangState(rank, f"n{rank // 2 + 1}", doing, **{"stuck": True, "seconds": 70.0} | fields, where=where)


def job(*odd: HangState, ranks: int = 4) -> list[HangState]:
    """All ranks wait in the same collective, but those given."""
    other = {state.rank: state for state in odd}
    return [other.get(rank, waits(rank)) for rank in range(ranks)]


def verdict(states, world_size=0):
    found = decide(states, world_size)
    assert found is not None
    return found


def blamed(found) -> list[int]:
    return [suspect.rank for suspect in found.suspects]


def test_a_rank_in_a_fetch_is_named_with_node_and_line():
    found = verdict(job(stands(3, "data_wait", "data.py:88", call="read")))
    assert found.kind == "fetch"
    assert found.sentence(SINCE) == (
        "ranks 0-2 have waited in all_reduce #81234 since 14:05:12; rank 3 on n2 is in a fetch at data.py:88 (read)"
    )
    line = found.line(SINCE, "")
    assert line.suspects == [Suspect(3, "n2", "data.py:88 (read)", "in a fetch")]
    assert line.waiting == [WaitingRanges([(0, 2)], "all_reduce", 81234)]


CASES = [
    (stands(2, process=GONE), "rank_gone", "is gone: its process has ended"),
    (stands(2, process=STOPPED), "rank_stopped", "is stopped at train.py:12, by a signal or a debugger"),
    (stands(2, state="sleeping in futex_do_wait"), "compute", "is in a step at train.py:12, waiting for a lock"),
    (stands(2, state="running"), "compute", "is in a step at train.py:12, running"),
    (stands(2, "checkpoint", stuck=False), "phase", "is in a checkpoint at train.py:12"),
    (stands(2, "evaluation", stuck=False), "phase", "is in an evaluation at train.py:12"),
    (stands(2, "startup", None, stuck=False), "phase", "is starting up"),
    (stands(2, "other", stuck=False), "phase", "is outside of its training loop at train.py:12"),
    (stands(2, LEFT, stuck=False, steps=90), "rank_left", "is out of its training loop at train.py:12, after 90 steps"),
    (stands(2, ENDED, None, stuck=False), "rank_left", "is at its end: it has left the job by itself"),
    (
        waits(2, "barrier", doing=LEFT, steps=90),
        "rank_left",
        "is out of its training loop at train.py:40, after 90 steps, waiting for the others in barrier",
    ),
]


@pytest.mark.parametrize(("odd", "kind", "says"), CASES, ids=[f"{kind}-{odd.doing}" for odd, kind, _ in CASES])
def test_the_rank_that_does_not_wait_is_the_suspect(odd, kind, says):
    found = verdict(job(odd))
    assert (found.kind, blamed(found)) == (kind, [2])
    assert found.sentence(SINCE) == f"ranks 0-1, 3 have waited in all_reduce #81234 since 14:05:12; rank 2 on n2 {says}"


RESTARTED = [*job(stands(3, "data_wait")), stands(3, process=GONE), stands(2, process=GONE)]
SEVERAL = {
    "one is gone": (job(stands(1, "data_wait"), stands(2, process=GONE), stands(3, process=STOPPED)), "rank_gone", [2]),
    "one was started again": (RESTARTED, "fetch", [3]),
    "one was started again, the other way round": (RESTARTED[::-1], "fetch", [3]),
    "one has left": (job(stands(1, LEFT, stuck=False), stands(2, "data_wait")), "fetch", [2]),
    "one of two has ended": ([stands(0, "data_wait"), stands(1, ENDED, None, stuck=False)], "fetch", [0]),
    "one is not stuck": (
        job(stands(1, stuck=False), stands(2, "data_wait"), stands(3, "data_wait")), "fetch", [2, 3],
    ),
    "all are in a barrier after the loop": ([waits(r, "barrier", doing=LEFT) for r in range(4)], "unknown", []),
    # Without a rank that is seen to wait, as on GPUs, the minority is suspected.
    "one at another place": ([stands(r, stack="b" if r == 5 else "a") for r in range(8)], "compute", [5]),
    "all at one place": ([stands(rank, stack="a") for rank in range(8)], "compute", [*range(8)]),
}  # fmt: skip


@pytest.mark.parametrize(("states", "kind", "ranks"), SEVERAL.values(), ids=SEVERAL)
def test_which_of_several_is_blamed(states, kind, ranks):
    assert (verdict(states).kind, blamed(verdict(states))) == (kind, ranks)


def test_no_rank_is_stuck_no_hang():
    assert decide([]) is None
    assert decide([replace(state, stuck=False) for state in job(stands(1, process=GONE))]) is None


def shapes_of(*shapes: str, name: str = "all_reduce") -> list[HangState]:
    return [waits(rank, name, shapes=shape) for rank, shape in enumerate(shapes)]


def lines_of(*lines: int) -> list[HangState]:
    """Collectives without numbers: only the line tells them apart."""
    return [waits(rank, sequence=None, where=f"train.py:{line}") for rank, line in enumerate(lines)]


def split(tensor_parallel: str = "all_gather", data_parallel: str = "all_reduce", groups: bool = True):
    """The network between ranks 0 and 1 is broken. They wait in their tensor parallel group; the others for them."""
    stand = [waits(rank, tensor_parallel, 9000, group="tp0" if groups else "") for rank in (0, 1)]
    return stand + [waits(rank, data_parallel, 71, group=f"dp{rank % 2}" if groups else "") for rank in range(2, 8)]


AHEAD = waits(2, "broadcast", 81235, "112 Float")
"""Rank 2 has got what rank 0 broadcast, and is in the next step. Rank 1 makes another call in place of that."""

DIFFERENT = "; these are different collectives"
GROUPS = "; these are different process groups, and no rank is elsewhere: look at the network between them"
NETWORK = "ranks 0-3 have waited in all_reduce #81234 since 14:05:12; no rank is elsewhere: look at the network between"

ALL_WAIT = {
    "another order": (
        job(waits(1, "broadcast"), ranks=3), "mismatch", [1],
        f"; rank 1 has waited in broadcast #81234 since 14:05:12{DIFFERENT}, and rank 1 on n1 is the odd one at train.py:40",
    ),
    "another shape": (shapes_of("4x8 Float", "4x8 Float", "4x9 Float"), "mismatch", [2], "all_reduce #81234 of 4x9 Float since"),
    "shapes that may differ": (shapes_of("0 Float", "1 Float", name="all_to_all"), "unknown", [], ""),
    "the one behind": ([waits(0, sequence=10), waits(1, sequence=9)], "mismatch", [1], ""),
    "two abreast": ([waits(0), waits(1, "broadcast")], "mismatch", [0, 1], DIFFERENT),
    "one is ahead of a clash": (
        [waits(0, "broadcast"), waits(1), AHEAD, waits(3, "broadcast")], "mismatch", [1], DIFFERENT
    ),
    "two are ahead, and of two that clash either may be wrong": (
        [waits(0, "broadcast"), waits(1), AHEAD, replace(AHEAD, rank=3)], "mismatch", [0, 1], ""
    ),
    "another line": (lines_of(40, 40, 50, 40), "mismatch", [2], ""),
    # Rank 5 makes another call in its data parallel group. That the others wait elsewhere is not their fault.
    "within a process group": (
        [waits(5, "broadcast", 71, group="dp1") if state.rank == 5 else state for state in split()], "mismatch", [5], ""
    ),
    "unknown process groups": (split(groups=False), "mismatch", [0, 1], ""),
    "an unknown group among known ones": (
        [waits(0, "broadcast", 71, group=""), *(waits(rank, group="0") for rank in (1, 2, 3))], "mismatch", [0], ""
    ),
    "one evaluates, and the others are behind the loop": (
        job(waits(0, "broadcast", doing="evaluation"), *(waits(r, "barrier", doing=LEFT) for r in (1, 2, 3))), "mismatch",
        [0], f"{DIFFERENT}, and rank 0 on n1 is the odd one at train.py:40; rank 0 is in an evaluation at train.py:40: ",
    ),
    "one sends the buffers of DDP": (
        job(waits(0, "broadcast", doing=LEFT, call="_distributed_broadcast_coalesced"), waits(1, "barrier", doing=LEFT), ranks=2),
        "mismatch", [0, 1], "; rank 0 is in the forward pass of DDP at train.py:40 (_distributed_broadcast_coalesced): where",
    ),
    "different process groups": (split(), "unknown", [], GROUPS),
    "different process groups by number": (split("", ""), "unknown", [], GROUPS),
    "one collective": (job(), "unknown", [], NETWORK),
}  # fmt: skip


@pytest.mark.parametrize(("states", "kind", "ranks", "says"), ALL_WAIT.values(), ids=ALL_WAIT)
def test_all_ranks_wait(states, kind, ranks, says):
    found = verdict(states)
    assert found.kind == kind
    assert says in found.sentence(SINCE)
    assert blamed(found) == ranks


def test_ranks_of_which_nothing_is_known_are_told_and_not_accused():
    found = verdict(job(ranks=3), world_size=6)
    assert (found.kind, found.suspects, found.silent) == ("unknown", (), (3, 4, 5))
    assert found.sentence(SINCE).endswith("; nothing is known of ranks 3-5")
    mixed = verdict(job(waits(1, "broadcast"), ranks=3), world_size=6)
    assert mixed.kind == "unknown", "the others may be the ones to blame"


def test_all_in_the_same_fetch():
    found = verdict([stands(rank, "data_wait", "data.py:88", call="read") for rank in range(3)])
    assert (found.kind, blamed(found)) == ("fetch", [0, 1, 2])
    assert found.sentence(SINCE) == (
        "ranks 0-1 on n1 are in a fetch at data.py:88 (read); rank 2 on n2 is in a fetch at data.py:88 (read), since "
        "14:05:12"
    )


def test_very_many_ranks():
    found = verdict(job(stands(777, "data_wait", "data.py:88"), ranks=10_000), 10_000)
    assert (found.kind, blamed(found), len(found.waiting[0].ranks)) == ("fetch", [777], 9_999)
    assert len(found.sentence(SINCE)) < 200
    found = verdict(job(*(stands(rank, "data_wait", "data.py:88") for rank in range(500)), ranks=1000))
    assert (found.kind, len(found.suspects), found.suspects_total) == ("fetch", 16, 500)
    assert found.sentence(SINCE).endswith("; so are 494 more")


GROUP_NAMES = st.sampled_from(["", "tp", "dp"])
STATES = st.builds(
    HangState,
    rank=st.integers(0, 9),
    node=st.sampled_from(["a", "b"]),
    doing=st.sampled_from(["data_wait", "compute", "evaluation", "checkpoint", "other", LEFT, ENDED]),
    process=st.sampled_from(["alive", "alive", STOPPED, GONE]),
    stuck=st.booleans(),
    waits=st.booleans(),
    where=st.sampled_from([None, "a.py:1", "b.py:2"]),
    stack=st.sampled_from(["", "x", "y"]),
    collective=st.none()
    | st.builds(
        Collective, st.sampled_from(["", "all_reduce", "broadcast"]), st.sampled_from([None, 1, 2]), GROUP_NAMES
    ),
)


@given(st.lists(STATES, max_size=12))
def test_any_picture_has_a_verdict_that_accuses_only_ranks_there_are(states):
    found = decide(states, 10)
    if found is None:
        return
    known = {state.rank for state in states}
    assert found.sentence(SINCE)
    assert set(blamed(found)) <= known
    assert {rank for group in found.waiting for rank in group.ranks} | set(found.silent) <= set(range(10))
    assert set(found.silent) == set(range(10)) - known


COLLECTIVES = st.builds(
    waits,
    rank=st.integers(0, 9),
    name=st.sampled_from(["", "all_reduce", "broadcast"]),
    sequence=st.sampled_from([None, 1, 2]),
    group=GROUP_NAMES,
)


@given(st.lists(COLLECTIVES, min_size=1, max_size=12, unique_by=lambda state: state.rank))
def test_a_mismatch_is_of_ranks_in_one_process_group(states):
    found = verdict(states)
    assert found.kind in {"mismatch", "unknown"}
    newest = {state.rank: state.collective.group for state in states}
    groups = [newest[group.ranks[0]] for group in found.waiting]
    if "" not in groups:
        assert (found.kind == "mismatch") is (len(set(groups)) < len(groups))
    if found.kind == "mismatch" and "" not in groups:
        assert {newest[rank] for rank in blamed(found)} <= {group for group in groups if groups.count(group) > 1}


def test_ranges():
    assert ranges([5, 1, 2, 3]) == [(1, 3), (5, 5)]
    assert named([4]) == "rank 4"
    assert named([0, 1, 2, 7]) == "ranks 0-2, 7"
    assert named(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10 and 14 more"
