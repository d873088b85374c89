"""The colours of the page and the dashboards can be told apart, also with colour blindness, and are seen on their paper.

Colour blindness is simulated at full severity after Machado, Oliveira and Fernandes (2009). Two colours differ by their
distance in CIE L*a*b* (delta E of 1976).
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from grafana import colours
from telemetry.diagnosis.causes import CAUSES
from telemetry.report.html import charts, palette

MACHADO = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.95047, 1.0, 1.08883)
LEAST_DIFFERENCE, LEAST_CONTRAST = 12.0, 2.3
OF_THE_PAGE = {name: value for name, value in vars(palette).items() if re.fullmatch("#[0-9A-F]{6}", str(value))}


def times(matrix, vector):
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)


def linear(colour):
    values = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)


def lab(colour, vision):
    seen = [min(1.0, max(0.0, value)) for value in times(MACHADO[vision], linear(colour))]
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (value / white for value, white in zip(times(XYZ, seen), WHITE, strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(one, other, vision):
    return sum((a - b) ** 2 for a, b in zip(lab(one, vision), lab(other, vision), strict=True)) ** 0.5


def too_close(chart):
    return [
        (one, other, vision, round(found, 1))
        for (one, first), (other, second) in itertools.combinations(chart.items(), 2)
        for vision in MACHADO
        if (found := difference(first, second, vision)) < LEAST_DIFFERENCE
    ]


def contrast(one, other):
    low, high = sorted(times(XYZ, linear(colour))[1] + 0.05 for colour in (one, other))
    return high / low


def test_the_simulation_knows_what_is_hard_to_tell_apart():
    assert difference("#000000", "#FFFFFF", "deuteranopia") == pytest.approx(100, abs=0.1)
    assert difference("#CC79A7", "#8A8F98", "deuteranopia") < 5 < 25 < difference("#CC79A7", "#8A8F98", "normal")
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)


def test_any_two_colours_of_the_page_can_be_told_apart():
    assert len(OF_THE_PAGE) >= 8
    assert too_close(OF_THE_PAGE) == []


@pytest.mark.parametrize("name", ["CATEGORIES", "GOODPUT", "TRACE", "MARKS"])
def test_a_chart_has_each_colour_of_the_palette_once(name):
    chart = getattr(palette, name)
    assert len(set(chart.values())) == len(chart)
    assert set(chart.values()) <= set(OF_THE_PAGE.values())


def test_two_lines_of_a_chart_differ_in_their_colour():
    for chart in (*charts.GPU, *charts.WORKERS, *charts.HOST):
        lines = [curve.colour for curve in chart.curves]
        assert len(set(lines)) == len(lines), chart.key
        assert set(lines) <= set(OF_THE_PAGE.values())


def too_faint(chart, papers):
    return [
        (name, paper, round(contrast(colour, paper), 2))
        for name, colour in chart.items()
        for paper in papers
        if contrast(colour, paper) < LEAST_CONTRAST
    ]


def test_each_colour_is_seen_on_light_and_on_dark_paper():
    style = (Path(palette.__file__).parent / "page.css").read_text()
    papers = set(re.findall(r"--paper: (#[0-9a-f]{6})", style))
    assert len(papers) == 2
    assert too_faint(OF_THE_PAGE, papers) == []


def test_the_dashboards_have_the_colours_of_the_page():
    assert palette.CATEGORIES == colours.CATEGORIES
    assert {name: palette.GOODPUT[name] for name in colours.LOST} == colours.LOST
    for chart in (colours.WAITS, colours.WAITED_FOR, colours.WORKERS, colours.PRESSURE):
        assert len(set(chart.values())) == len(chart)
        assert set(chart.values()) <= set(OF_THE_PAGE.values())


def test_any_two_causes_of_the_dashboards_can_be_told_apart():
    states = {"no stall": colours.NO_STALL} | colours.CAUSES
    assert set(colours.CAUSES) == set(CAUSES)
    assert too_close(states) == []
    assert too_faint(states, ("#ffffff", "#181b1f")) == []  # Grafana's panels
