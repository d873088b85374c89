"""Figures and tables in the output of the commands, and the small JSON objects that processes exchange."""

from __future__ import annotations

import pytest

from telemetry.util.files import parse_object
from telemetry.util.text import (
    binary_size,
    byte_size,
    duration,
    percent,
    plain_number,
    rounded_percent,
    shortened,
    table,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (2.5e-6, "2.5 us"),
        (0.9999e-3, "999.9 us"),
        (0.0125, "12.5 ms"),
        (-0.0125, "-12.5 ms"),
        (1.0, "1.00 s"),
    ],
)
def test_durations_in_the_unit_that_suits_them(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1e3, "1 KB"), (2.4e6, "2 MB"), (3.2e10, "32.0 GB")]
)
def test_sizes_in_decimal_units(size, text):
    assert byte_size(size) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (300 << 20, "300 MiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_in_binary_units(size, text):
    assert binary_size(size) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.234, "1.23"), (30.0, "30"), (999.4, "999"), (999.6, "1000"), (123_456.4, "123456"), (1.2e-5, "0.000012"),
     (-123_456.4, "-123456"), (1.2345e-9, "0.00000000123")],
)  # fmt: skip
def test_a_plain_number_is_no_power_of_ten(value, text):
    assert plain_number(value) == text


def test_percents():
    assert (percent(None), percent(0.1234), percent(0.1234, 0)) == ("-", "12.3 %", "12 %")
    assert [rounded_percent(ratio) for ratio in (0.0, 0.0994, 0.0996, 0.5)] == ["0 %", "9.9 %", "10 %", "50 %"]


def test_a_table_has_columns_of_equal_width():
    rows = [["a kernel", "1"], ["b", "1000"]]
    assert table(["name", "calls"], rows) == ["    name  calls", "a kernel      1", "       b   1000"]
    assert table(["name", "calls"], rows, names_first=True) == ["name      calls", "a kernel      1", "b          1000"]


def test_a_long_name_is_shortened_to_its_width():
    assert shortened("x" * 10, 10) == "x" * 10
    assert shortened("x" * 11, 10) == "x" * 7 + "..."


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"[1]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_content_that_is_not_a_json_object(content):
    assert parse_object(content) is None
