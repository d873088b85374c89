"""What pyproject.toml says of the package is what the doctor and the documentation say, and what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from telemetry import doctor
from tests.matrix.__main__ import COMBINATIONS, PAGE, RESULTS, table

tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST = PROJECT["requires-python"].removeprefix(">=")


def test_no_newer_python_is_refused():
    """A Python that is newer than the package was never tried with it, but it works more often than not."""
    assert re.fullmatch(r">=3\.\d+", PROJECT["requires-python"])


def test_the_classifiers_are_the_pythons_that_are_tested():
    stated = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert stated[0] == OLDEST
    assert set(stated) == {combination.partition(":")[0] for combination in COMBINATIONS}


def test_the_needed_packages_are_those_that_the_doctor_looks_for():
    needed = {re.match(r"[\w-]+", requirement)[0]: requirement for requirement in PROJECT["dependencies"]}
    assert needed.pop("torch") == "torch>={}.{}".format(*doctor.OLDEST_TORCH)
    assert set(needed) == set(doctor.NEEDED)


@pytest.mark.parametrize("page", ["docs/quickstart.md", "docs/versions.md"])
def test_the_pages_say_the_supported_versions(page):
    text = (ROOT / page).read_text()
    assert f"Python {OLDEST} or newer" in text
    assert "torch {}.{} or newer".format(*doctor.OLDEST_TORCH) in text


def test_the_table_of_versions_is_that_of_the_results():
    assert table(json.loads(RESULTS.read_text())) in PAGE.read_text()
