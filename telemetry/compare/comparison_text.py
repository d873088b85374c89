"""A comparison as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from telemetry.compare.comparison import FASTER, NO_DIFFERENCE, NOT_COMPARABLE
from telemetry.records import CATEGORIES, COMPUTE, DATA_WAIT
from telemetry.util.text import duration, percent, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MIN_SHOWN_SECONDS: Final = 5e-7
"""Half a microsecond per step: less is not shown."""

_MIN_SHOWN_RATIO: Final = 0.001
_SAME_LOAD_RATIO: Final = 0.01

_MORE_PAIRS: Final = (
    "To see a smaller difference, run both once more, in the other order, and add --again RUN_A RUN_B: further pairs "
    "make the interval shorter."
)
_LOAD_UNKNOWN: Final = (
    "The load of other programs is not known of all runs, so it is left out of none. If it was in all runs of one "
    "side, it looks like a difference."
)
_QUIETER: Final = "To see more, run both on a machine that nobody else uses."

_LOOP: Final = (DATA_WAIT, COMPUTE)


def render(result: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """What differs in the settings, the verdict, and two tables: by category of the ledger and by cause.

    Args:
        result: as `compare_runs` returns it.
        notes: lines on the runs themselves.
    """
    steps = result["steps"]
    several = len(result["pairs"]) > 1
    counted = "; {} steps in all" if several else ", {} steps"
    lines = [f"{which.upper()}: {result[which]}{counted.format(steps[which])}" for which in ("a", "b")]
    lines += [*notes, ""]
    if result["differences"]:
        rows = [[each["what"], str(each["a"]), str(each["b"])] for each in result["differences"]]
        lines += [*table(["settings and environment", "A", "B"], rows, names_first=True), ""]
    else:
        lines += ["No recorded setting differs, and no recorded part of the environment.", ""]
    lines.append(sentence(result))
    if result["verdict"] == NO_DIFFERENCE:
        load_decides = result["why"] is not None or _loads_differ(result)
        lines.append(_QUIETER if load_decides else _MORE_PAIRS)
    compared = result["verdict"] != NOT_COMPARABLE
    if several and compared and result["load"] is None:
        lines.append(_LOAD_UNKNOWN)
    if _left_out(result):
        lines += _of_others(result, "on average " if several else "")
    if several and compared:
        rows = [
            [f"{number}: {each['a']}, {each['b']}", f"{each['ratio']:.3f}", _range(each)]
            for number, each in enumerate(result["pairs"], 1)
        ]
        lines += ["", *table(["pair", "ratio", "95 % interval"], rows, names_first=True)]
    rows = [_row(name, pair) for name, pair in result["per_step_seconds"].items() if _shown(pair)]
    if rows:
        lines += ["", *table(["seconds for each step", "A", "B", "difference"], rows, names_first=True)]
    rows = [_row(name, pair) for name, pair in result["causes"].items() if _shown(pair)]
    if rows:
        lines += ["", *table(["lost in stalls, for each step", "A", "B", "difference"], rows, names_first=True)]
    return "\n".join(lines) + "\n"


def sentence(result: Mapping[str, Any]) -> str:
    """The verdict, its figures, and the category that differs most."""
    if result["verdict"] == NOT_COMPARABLE:
        return f"Not comparable: {result['why']}."
    left_out = _left_out(result)
    given = "without the time in which other programs held them up, B would do" if left_out else "B does"
    figures = f"{result['ratio']:.3f} times the steps per second of A ({_interval(result)})"
    measured = f" As measured, it did {result['measured']['ratio']:.3f} times ({_interval(result['measured'])})."
    measured = measured if left_out else ""
    if result["verdict"] == NO_DIFFERENCE:
        return f"No difference that can be told from chance: {given} {figures}.{measured}"
    word = "faster" if result["verdict"] == FASTER else "slower"
    most = "" if _loads_differ(result) else _most(result["per_step_seconds"], slower=word == "slower")
    return f"B is {word}: {given if left_out else 'it does'} {figures}.{measured}{most}"


def _interval(figures: Mapping[str, Any]) -> str:
    return f"95 % interval: {_range(figures)}"


def _range(figures: Mapping[str, Any]) -> str:
    low, high = figures["interval"]
    return f"{low:.3f} to {high:.{3 if high < 100 else 0}f}"


def _left_out(result: Mapping[str, Any]) -> bool:
    """Whether time in which other programs held the runs up is left out of the ratio, so much that it shows."""
    return result["load"] is not None and max(result["load"]["held_up_ratio"].values()) >= _MIN_SHOWN_RATIO


def _loads_differ(result: Mapping[str, Any]) -> bool:
    """Whether a part of the seconds per step, which are as measured, is other programs'."""
    if result["load"] is None:
        return False
    held_up = result["load"]["held_up_ratio"]
    return bool(abs(held_up["b"] - held_up["a"]) > _SAME_LOAD_RATIO)


def _of_others(result: Mapping[str, Any], how: str) -> list[str]:
    """How much of the cores other programs used, and how long they held the runs up."""
    held_up, others = result["load"]["held_up_ratio"], result["load"]["others_ratio"]
    return [
        f"Other programs {how}used {percent(others['a'], 0)} and {percent(others['b'], 0)} of the cores.",
        f"They {how}held up {percent(held_up['a'])} of A's training loop and {percent(held_up['b'])} of B's.",
    ]


def _most(per_step: Mapping[str, Mapping[str, float | None]], *, slower: bool) -> str:
    """Where the difference is: in the wait for data, or in the compute. Empty if the means of the runs do not tell."""
    found = {name: per_step[name]["difference"] or 0.0 for name in _LOOP}
    total = sum(found.values())
    name = max(found, key=lambda name: found[name] * (1 if total > 0 else -1))
    if not total or (total > 0) != slower or found[name] / total < 0.5:
        return ""
    share = min(1.0, found[name] / total)
    return f" {percent(share, 0)} of the difference is {name.replace('_', ' ')}: {_signed(found[name])} a step."


def _shown(pair: Mapping[str, float | None]) -> bool:
    return any(value is not None and abs(value) >= _MIN_SHOWN_SECONDS for value in pair.values())


def _row(name: str, pair: Mapping[str, float | None]) -> list[str]:
    a, b = pair["a"], pair["b"]
    heading = name.replace("_", " ") if name in CATEGORIES else name
    return [heading, duration(a), duration(b), _signed(None if a is None or b is None else b - a)]


def _signed(seconds: float | None) -> str:
    return "-" if seconds is None else f"{'+' if seconds > 0 else ''}{duration(seconds)}"
