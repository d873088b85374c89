"""The result: rows with targets, as text, Markdown and JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from benchmarks.spread import Spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

AT_MOST: Final = "<="
BELOW: Final = "<"
AT_LEAST: Final = ">="

NOT_MEASURED: Final = "not measured"
_TITLE: Final = "What the agent costs"


@dataclass(frozen=True, slots=True)
class Target:
    """A limit for a median."""

    relation: str
    limit: float

    def met_by(self, value: float) -> bool:
        """Whether a value meets it."""
        if self.relation == AT_LEAST:
            return value >= self.limit
        return value < self.limit if self.relation == BELOW else value <= self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        section: the section that it belongs to.
        name: what was measured.
        unit: unit of the figure and the target.
        figure: None if it was not measured.
        target: None without a target.
        note: why it was not measured, or what to know about it.
    """

    section: str
    name: str
    unit: str
    figure: Spread | None
    target: Target | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target or a figure."""
        if self.target is None or self.figure is None:
            return None
        return self.target.met_by(self.figure.median)

    def cells(self) -> list[str]:
        """The row as text."""
        return [self.name, *self._figures(), self._target(), self._verdict(), self.note]

    def as_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        figure, target = self.figure, self.target
        return {
            "section": self.section,
            "name": self.name,
            "unit": self.unit,
            "median": figure and figure.median,
            "p10": figure and figure.p10,
            "p90": figure and figure.p90,
            "count": figure and figure.count,
            "target": target and f"{target.relation} {target.limit:g}",
            "met": self.met,
            "note": self.note,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Row:
        """The row of `as_json`."""
        median = row["median"]
        relation, _, limit = str(row["target"] or "").partition(" ")
        return cls(
            row["section"],
            row["name"],
            row["unit"],
            None if median is None else Spread(median, row["p10"], row["p90"], row["count"]),
            Target(relation, float(limit)) if relation else None,
            row["note"],
        )

    def _figures(self) -> list[str]:
        if self.figure is None:
            return [NOT_MEASURED, ""]
        low, high = _number(self.figure.p10), _number(self.figure.p90)
        return [f"{_number(self.figure.median)} {self.unit}", f"{low} .. {high}"]

    def _target(self) -> str:
        return f"{self.target.relation} {self.target.limit:g} {self.unit}" if self.target is not None else ""

    def _verdict(self) -> str:
        if self.target is None:
            return ""
        return {True: "met", False: "NOT MET", None: NOT_MEASURED}[self.met]


_HEADINGS: Final = ("", "median", "p10 .. p90", "target", "", "")


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 0.005 else f"{value:.4f}"


def sections(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by section, in their order."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.section, []).append(row)
    return grouped


def text(machine: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The tables for a terminal."""
    table = [list(_HEADINGS), *(row.cells() for row in rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(5)]
    lines = [_about(machine), ""]
    for section, members in sections(rows).items():
        lines.append(section)
        for cells in (list(_HEADINGS), *(row.cells() for row in members)):
            padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
            lines.append("  " + "  ".join([*padded, cells[-1]]).rstrip())
        lines.append("")
    return "\n".join([*lines, summary(rows)])


def markdown(machine: Mapping[str, Any], rows: Sequence[Row], title: str = _TITLE) -> str:
    """The tables as a Markdown page."""
    lines = [f"# {title}", "", _about(machine), "", summary(rows), ""]
    for section, members in sections(rows).items():
        lines += [f"## {section}", "", "| | median | p10 .. p90 | target | | |", "|---|---|---|---|---|---|"]
        lines += ["| " + " | ".join(row.cells()) + " |" for row in members]
        lines.append("")
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """How many targets are met, missed and not measured."""
    with_target = [row for row in rows if row.target is not None]
    if not with_target:
        return "No targets are set for these figures."
    met, missed = (sum(row.met is verdict for row in with_target) for verdict in (True, False))
    text = f"Targets: {met} met, {missed} not met, {len(with_target) - met - missed} not measured."
    names = [f"{row.section}: {row.name}" for row in with_target if row.met is False]
    return text + (f" Not met: {'; '.join(names)}." if names else "")


def write(
    folder: Path,
    slug: str,
    machine: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    name: str = "overhead",
    title: str = _TITLE,
) -> list[Path]:
    """Write both files. They replace those of an earlier run on the same kind of machine."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = folder / f"{name}-{slug}.json", folder / f"{name}-{slug}.md"
    content = {"machine": dict(machine), "rows": [row.as_json() for row in rows]}
    as_json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    as_markdown.write_text(markdown(machine, rows, title), encoding="utf-8")
    return [as_json, as_markdown]


def replaced(
    folder: Path, slug: str, machine: Mapping[str, Any], rows: Sequence[Row]
) -> tuple[dict[str, Any], list[Row]]:
    """The rows of an earlier full run, with ``rows`` in the place of its own, and its machine.

    Two parts of the benchmark may have rows in one section: those that were not measured again stay.

    Raises:
        OSError: there are no results of an earlier run.
    """
    content = json.loads((folder / f"overhead-{slug}.json").read_text(encoding="utf-8"))
    again = sections(rows)
    about = dict(content["machine"])
    notes = [note for note in about.get("again", ()) if not note.startswith(tuple(again))]
    about["again"] = sorted([*notes, *(f"{section}: {machine['date']}" for section in again)])
    kept = sections([Row.from_json(row) for row in content["rows"]])
    for section, members in again.items():
        measured = {row.name for row in members}
        kept[section] = [*members, *(row for row in kept.get(section, ()) if row.name not in measured)]
    return about, [row for members in kept.values() for row in members]


def _about(machine: Mapping[str, Any]) -> str:
    load = " ".join(str(load) for load in machine["load_average"])
    gpu = machine["gpu"] or "no GPU"
    effort = f", {machine['effort']}" if machine.get("effort") else ""
    again = "".join(f" Measured again by itself: {note}." for note in machine.get("again", ()))
    return (
        f"{machine['date']}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {gpu}; "
        f"{machine['kernel']}, Python {machine['python']}, torch {machine['torch']}; load {load} at the start{effort}."
        f"{again}"
    )
