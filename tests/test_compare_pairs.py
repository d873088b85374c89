"""`telemetry compare RUN_A RUN_B --again RUN_A RUN_B`: several pairs of runs of the same two versions."""

from __future__ import annotations

import json
import math

import pytest

from telemetry.cli import main
from telemetry.compare.pace_interval import RatioInterval, Z
from telemetry.compare.repeated_pairs import mean_ratio
from tests.test_compare import noisy
from tests.test_compare import run_of as plain_run
from tests.test_compare_load import Load
from tests.test_compare_load import run_of as loaded_run


def compared(capsys, pairs, *options):
    """The exit status, the result, and the text."""
    first, *others = [[str(folder) for folder in pair] for pair in pairs]
    command = ["compare", *first, *(part for pair in others for part in ("--again", *pair)), *options]
    status = main([*command, "--json"])
    result = json.loads(capsys.readouterr().out)
    main(command)
    return status, result, capsys.readouterr().out


def pairs_of(folder, ratios, *, scatter=0.01, **options):
    """A pair of runs for each ratio, which no other pair shares."""
    folder.mkdir(exist_ok=True)
    found = []
    for number, ratio in enumerate(ratios):
        paces = {"a": 100.0, "b": 100.0 * ratio}
        found.append(
            [
                plain_run(folder / f"{name}{number}", noisy(10 * number + ord(name), pace, scatter=scatter), **options)
                for name, pace in paces.items()
            ]
        )
    return found


def half(result):
    low, high = result["interval"]
    return math.log(high / low) / 2


def test_several_pairs_show_what_one_does_not(tmp_path, capsys):
    pairs = pairs_of(tmp_path, (0.968, 0.97, 0.972))
    assert compared(capsys, pairs[:1])[1]["verdict"] == "no difference"
    status, result, text = compared(capsys, pairs, "--fail-over", "0.5")
    assert (result["verdict"], status) == ("slower", 1)
    assert result["ratio"] == pytest.approx(0.97, abs=0.004)
    assert result["interval"][0] < 0.97 < result["interval"][1]
    assert [each["ratio"] for each in result["pairs"]] == pytest.approx([0.968, 0.97, 0.972], abs=0.006)
    assert (result["a"], result["b"]) == ("r, r, r", "r, r, r")
    assert "A: r, r, r; " in text
    assert f"2: r, r  {result['pairs'][1]['ratio']:.3f}" in text


def test_each_further_pair_makes_the_interval_shorter(tmp_path, capsys):
    pairs = pairs_of(tmp_path, (1.0,) * 4)
    halves = [half(compared(capsys, pairs[:count])[1]) for count in (1, 2, 3, 4)]
    assert halves == sorted(halves, reverse=True)
    assert halves[0] / 2.2 < halves[3] < halves[0] / 1.5  # about the root of their number


def test_pairs_that_scatter_tell_nothing(tmp_path, capsys):
    """Runs of one version differ by more than their windows show, and so do their pairs."""
    even = compared(capsys, pairs_of(tmp_path / "even", (0.95, 0.95, 0.95)))[1]
    uneven = compared(capsys, pairs_of(tmp_path / "uneven", (0.87, 1.03, 1.04)))[1]
    assert even["verdict"] == "slower"
    assert uneven["verdict"] == "no difference"
    assert half(uneven) > 1.5 * half(even)


def test_a_disturbed_pair_weighs_less(tmp_path, capsys):
    calm = pairs_of(tmp_path / "calm", (1.0, 1.0))
    disturbed = pairs_of(tmp_path / "disturbed", (0.8,), scatter=0.2)
    result = compared(capsys, [*calm, *disturbed])[1]
    assert result["pairs"][2]["ratio"] == pytest.approx(0.8, abs=0.08)
    assert result["ratio"] == pytest.approx(1, abs=0.02)


def test_what_others_cost_is_as_unknown_as_in_one_pair(tmp_path, capsys):
    """In each pair B runs beside a heavy load, and no number of pairs tells what that costs beyond the delay."""
    calm, busy = Load(held_up=0.01, others=0.1), Load(held_up=0.3, others=4.0)
    pairs = [
        [
            loaded_run(tmp_path / f"{name}{number}", 100.0, load, seed=2 * number + (name == "b"))
            for name, load in (("a", calm), ("b", busy))
        ]
        for number in range(6)
    ]
    one, six = (compared(capsys, pairs[:count])[1] for count in (1, 6))
    assert 0.6 * half(one) < half(six) < half(one)
    assert six["load"]["held_up_ratio"]["b"] == pytest.approx(0.3, abs=0.04)
    assert six["verdict"] == "no difference"
    assert "but other programs on average held up" in six["why"]


@pytest.mark.parametrize("scatter", [0.0, 0.1])
def test_what_is_unknown_counts_once(scatter):
    """It does not become smaller, and it does not make pairs differ: how much these scatter says the same without it."""

    def half(doubt):
        half = Z * math.hypot(0.02, doubt)
        ratios = [math.exp(scatter * sign) for sign in (-1, 0, 1)]
        found = mean_ratio(
            [RatioInterval(each, each * math.exp(-half), each * math.exp(half), doubt) for each in ratios]
        )
        return math.log(found.high / found.ratio)

    assert half(0.05) == pytest.approx(math.hypot(half(0.0), Z * 0.05))


def test_a_pair_without_figures_of_others_leaves_all_as_measured(tmp_path, capsys):
    busy = Load(held_up=0.2, others=2.0)
    pairs = [
        [
            loaded_run(tmp_path / "a", 100.0, Load()),
            loaded_run(tmp_path / "b", 100.0, busy, seed=2),
        ],
        [
            loaded_run(tmp_path / "a2", 100.0, Load(known=False), seed=3),
            loaded_run(tmp_path / "b2", 80.0, Load(known=False), seed=4),
        ],
    ]
    assert compared(capsys, pairs[:1])[1]["ratio"] == pytest.approx(1, abs=0.03)
    _, result, text = compared(capsys, pairs)
    assert result["load"] is None
    assert result["measured"] == {"ratio": result["ratio"], "interval": result["interval"]}
    assert result["pairs"][0]["ratio"] == pytest.approx(0.8, abs=0.03)
    assert "not known of all runs" in text


def test_a_run_in_two_pairs_is_refused(tmp_path, capsys):
    (a, b), (other, _) = pairs_of(tmp_path, (1.0, 1.0))
    spelt_otherwise = b.parent / "." / ".." / b.parent.name / b.name
    for again in ((other, spelt_otherwise), (b, other), (other, other)):
        assert main(["compare", str(a), str(b), "--again", *map(str, again), "--json"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "is named twice" in err
    assert str(other) in err


def test_a_pair_that_cannot_be_compared_is_named(tmp_path, capsys):
    pairs = pairs_of(tmp_path, (1.0,))
    short = [plain_run(tmp_path / f"short{name}", noisy(1, count=2)) for name in "ab"]
    status, result, text = compared(capsys, [*pairs, short])
    assert (status, result["verdict"]) == (2, "not comparable")
    assert [(each["a"], each["ratio"], each["interval"]) for each in result["pairs"]] == [("r", None, None)] * 2
    assert result["why"].startswith("pair 2: A has")
    assert "pair 2" in text
    assert "A: r, r; " in text


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    (a, b), _ = pairs_of(tmp_path, (1.0, 1.0))
    assert main(["compare", str(a), str(b), "--again", str(tmp_path / "none"), str(b.parent / "b1")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_the_tables_are_of_all_runs(tmp_path, capsys):
    """The second pair is four times as long, and counts as much as the first one, as in the ratio."""
    pairs = pairs_of(tmp_path, (1.0,), scatter=0.001, wait=0.1)
    pairs += pairs_of(tmp_path / "longer", (1.0,), scatter=0.001, wait=0.6, seconds=8.0)
    result = compared(capsys, pairs)[1]
    assert result["per_step_seconds"]["data_wait"]["a"] == pytest.approx((0.1 + 0.6) / 2 / 100, rel=0.05)
    alone = [compared(capsys, [pair])[1]["steps"]["b"] for pair in pairs]
    assert result["steps"]["b"] == pytest.approx(sum(alone), abs=1)


def test_causes_are_means_of_the_runs(tmp_path, capsys):
    lost = {"stall_lost_total_seconds": {"workers_cpu_bound": 80.0}}
    pairs = pairs_of(tmp_path, (1.0,), scatter=0.001) + pairs_of(tmp_path / "stalls", (1.0,), scatter=0.001)
    path = next((pairs[1][1] / "logs").iterdir())
    last = json.loads(path.read_text().splitlines()[-1]) | lost
    path.write_text(path.read_text() + json.dumps(last) + "\n")
    assert compared(capsys, pairs)[1]["causes"] == {
        "workers_cpu_bound": {"a": 0, "b": pytest.approx(80.0 / 8000 / 2, rel=0.02)}
    }


def test_no_category_is_named_if_the_means_go_the_other_way(tmp_path, capsys):
    """The clear pair says that B is faster. The means of seconds are those of slow runs, which say little."""
    (a, b), (slow_a, slow_b) = (
        [plain_run(tmp_path / f"{name}{scatter}", noisy(3, pace, scatter=scatter)) for name, pace in each]
        for scatter, each in ((0.01, (("a", 100.0), ("b", 130.0))), (0.5, (("a", 20.0), ("b", 16.0))))
    )
    _, result, text = compared(capsys, [(a, b), (slow_a, slow_b)])
    assert result["verdict"] == "faster"
    assert result["per_step_seconds"]["compute"]["difference"] > 0
    assert "B is faster" in text
    assert "of the difference is" not in text


def test_settings_of_all_runs_are_compared(tmp_path, capsys):
    pairs = pairs_of(tmp_path, (1.0,), python_version="3.12.1")
    pairs += pairs_of(tmp_path / "new", (1.0,), python_version="3.13.0")
    pairs[1][0] = plain_run(tmp_path / "old", noisy(5), python_version="3.12.1")
    _, result, text = compared(capsys, pairs)
    assert result["differences"] == [{"what": "python_version", "a": "3.12.1", "b": "3.12.1, 3.13.0"}]
    assert "the runs of B differ in python_version" in text
    assert "the runs of A differ" not in text


def test_notes_tell_of_which_pair_they_are(tmp_path, capsys):
    pairs = pairs_of(tmp_path, (1.0, 1.0))
    with next((pairs[1][0] / "logs").iterdir()).open("a") as file:
        file.write('{"event": "window", "wall_sec')
    assert "A of pair 2 has 1 torn line" in compared(capsys, pairs)[2]


def test_no_difference_says_how_to_see_a_smaller_one(tmp_path, capsys):
    pairs = pairs_of(tmp_path, (1.0, 0.8))
    assert "add --again RUN_A RUN_B" in compared(capsys, pairs[:1])[2]
    assert "--again" not in compared(capsys, pairs[1:])[2]


def test_a_pair_beside_other_programs_does_not_spoil_a_calm_one(tmp_path, capsys):
    calm, busy = Load(held_up=0.01, others=0.1), Load(held_up=0.3, others=4.0)
    pairs = [
        [
            loaded_run(tmp_path / f"a{number}", 100.0, calm, seed=number),
            loaded_run(tmp_path / f"b{number}", 100.0, load),
        ]
        for number, load in ((2, calm), (3, busy))
    ]
    alone, both = (compared(capsys, pairs[:count])[1] for count in (1, 2))
    assert half(both) < 1.15 * half(alone)
    assert both["ratio"] == pytest.approx(alone["ratio"], abs=0.02)


def started(folder, minute):
    """The run, as if it had started so many minutes after eleven in the evening before."""
    path = next((folder / "logs").iterdir())
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    lines[0]["started"] = f"2025-12-31T23:{minute:02}:00.000Z"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


@pytest.mark.parametrize(
    ("minutes", "turns"),
    [
        (((0, 10), (2, 12), (4, 14)), 1),
        (((10, 0), (12, 2), (14, 4)), 1),
        (((0, 10), (2, 12), (4, 14), (18, 16)), 2),
        (((0, 2), (6, 4), (8, 10)), 3),
        (((0, 2), (4, 6), (8, 10)), 5),
    ],
)
def test_pairs_only_help_if_their_runs_took_turns(tmp_path, capsys, minutes, turns):
    """All of A and then all of B: what is slower for many minutes may be in all runs of B."""
    pairs = [
        [started(folder, minute) for folder, minute in zip(pair, times, strict=True)]
        for pair, times in zip(pairs_of(tmp_path, (1.0,) * len(minutes)), minutes, strict=True)
    ]
    shortest = min(half(compared(capsys, [pair])[1]) for pair in pairs)
    _, result, text = compared(capsys, pairs)
    assert result["turns"] == turns
    if turns < len(pairs):
        assert half(result) == pytest.approx(shortest / math.sqrt(turns), rel=0.001)
        assert f"{len(pairs)} pairs count as {turns}" in text
    else:
        assert half(result) < shortest / math.sqrt(len(pairs) - 1)
        assert "turns" not in text


def test_pairs_of_other_work_are_refused(tmp_path, capsys):
    pairs = [
        *pairs_of(tmp_path / "small", (1.0,), noise_of={"loader": {"batch_size": 8}}),
        *pairs_of(tmp_path / "large", (1.0,), noise_of={"loader": {"batch_size": 16}}),
    ]
    status, result, _ = compared(capsys, pairs)
    assert status == 2
    assert "batch_size is 8 in pair 1 and 16 in pair 2" in result["why"]
    unknown = pairs_of(tmp_path / "unknown", (1.0,))
    assert "batch_size is 8 in pair 2 and 16 in pair 3" in compared(capsys, [*unknown, *pairs])[1]["why"]


def test_a_load_that_decides_asks_for_a_quieter_machine(tmp_path, capsys):
    calm, busy = Load(held_up=0.02, others=0.1), Load(held_up=0.2, others=1.4)
    pair = [loaded_run(tmp_path / "a", 100.0, calm), loaded_run(tmp_path / "b", 100.0, busy, seed=2)]
    _, result, text = compared(capsys, [pair])
    assert (result["verdict"], "held up" in result["why"]) == ("no difference", True)
    assert "on a machine that nobody else uses" in text
    assert "--again" not in text


def test_loads_that_differ_ask_for_a_quieter_machine(tmp_path, capsys):
    """The verdict is the same with and without them, but what they cost makes the interval long."""
    pair = [loaded_run(tmp_path / f"a{load.held_up}", 100.0, load) for load in (Load(), Load(held_up=0.02))]
    _, result, text = compared(capsys, [pair])
    assert (result["verdict"], result["why"]) == ("no difference", None)
    assert "on a machine that nobody else uses" in text
