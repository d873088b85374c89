"""The time between two loops: after an epoch's last batch, and before the first batch of the next one."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import telemetry
from telemetry.agent import step_monitor
from telemetry.diagnosis.loop_gaps import LoopGaps
from telemetry.model.totals import EpochTotals, Totals
from telemetry.util.profiles import StackProfile, StackTime
from telemetry.util.stacks import STANDARD_LIBRARY, Spot
from tests.sampled_thread import often

SAVE = Spot("/home/me/train.py", 40, "save", "__main__")
KEYS = SAVE._replace(line=38)
LOOP = Spot("/home/me/train.py", 60, "main", "__main__")
LINEAR = Spot(f"{STANDARD_LIBRARY}site-packages/torch/nn/modules/linear.py", 134, "forward", "torch.nn.modules.linear")
SAMPLE = Spot(f"{STANDARD_LIBRARY}random.py", 456, "sample", "random")


def gaps_of(*seconds: float, loop: float = 1.0) -> LoopGaps:
    """A run with so long gaps after its epochs of one second."""
    gaps, other = LoopGaps(), 0.0
    for number, each in enumerate(seconds, 1):
        other += each
        ledger = {"startup": 50.0, "compute": number * loop, "other": other}
        gaps.add(Totals(ledger_seconds=ledger, epochs=EpochTotals(boundaries=number)))
    return gaps


def sampled(*stacks: tuple[tuple[Spot, ...], int]) -> StackProfile:
    profile = StackProfile()
    for stack, samples in stacks:
        profile.add(stack, StackTime(samples * 1_000_000, samples * 1_000_000), samples)
    return profile


SAVING = sampled(((SAVE, LOOP), 40), ((KEYS, LOOP), 10))


def test_a_gap_that_grows_is_told_with_its_line_and_what_it_costs():
    finding = gaps_of(*(0.02 * number for number in range(100))).finding(SAVING)
    assert finding.share_ratio == pytest.approx(0.4975, abs=1e-3)
    assert finding.text == (
        "50 % of the run is between the epochs, 100 % of it in save at train.py:40, and it grows: 330.0 ms for each "
        "epoch at first, 1.65 s now"
    )
    assert [line.line for line in finding.lines] == [40, 38]
    (advice,) = finding.advice
    assert "do only what is new: append" in advice.action
    assert advice.predicted_speedup == pytest.approx(1.99)


@pytest.mark.parametrize(
    ("profile", "action", "low"),
    [
        (SAVING, "make save at train.py:40 cheaper, do it after several epochs", None),
        (sampled(((SAMPLE, SAVE, LOOP), 50)), "Random.sample at train.py:40: draw from a list", None),
        (sampled(((SAVE, LOOP), 40), ((LOOP,), 40)), "make save at train.py:40 cheaper", 1.2),
    ],
)
def test_a_gap_that_does_not_grow_is_not_said_to(profile, action, low):
    finding = gaps_of(*[0.5] * 20).finding(profile)
    assert "grows" not in finding.text
    (advice,) = finding.advice
    assert advice.action.startswith(action)
    assert (advice.predicted_low, advice.predicted_speedup) == (low, 1.5)


@pytest.mark.parametrize(
    ("seconds", "profile"),
    [
        ([0.05] * 20, SAVING),  # they are short
        ([0.5] * 2, SAVING),  # two are no habit
        ([0.5] * 20, None),
        ([0.5] * 20, sampled(((SAVE, LOOP), 10))),  # too few samples
        ([0.5] * 20, sampled(((SAVE, LOOP), 40), ((LINEAR, LOOP), 20))),  # it evaluates, or collects data
    ],
)
def test_what_is_not_told(seconds, profile):
    assert gaps_of(*seconds).finding(profile) is None


def test_the_memory_is_bounded_and_a_long_run_still_shows_its_growth():
    gaps = gaps_of(*(0.001 * number for number in range(2000)))
    assert len(gaps._marks) <= 100
    assert "it grows: 33" in gaps.finding(SAVING).text


def write_all(rows: int) -> None:
    ",".join(str(number) for number in range(rows))


def test_a_run_names_what_it_does_after_each_epoch(tmp_path, monkeypatch):
    often(monkeypatch)
    monkeypatch.setattr(step_monitor, "_EVERY_SECONDS", 1.0)
    agent = telemetry.start(tmp_path, port="off", interval_seconds=0.25, start_line=False, end_line=False)
    loader = DataLoader(TensorDataset(torch.zeros(160, 4)), batch_size=10)
    try:
        for _ in range(400):
            for (x,) in loader:
                x.square().sum()
            write_all(150_000)
            if any(one.kind == "between_loops" for one in agent.findings.newest):
                break
    finally:
        telemetry.stop()
    (finding,) = [one for one in agent.findings.newest if one.kind == "between_loops"]
    assert finding.lines[0].line == write_all.__code__.co_firstlineno + 1
    assert "write_all at test_loop_gaps.py:" in finding.text
