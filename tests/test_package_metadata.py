"""What pyproject.toml says of the package is what the doctor and the documentation say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from telemetry.doctor import package_checks

tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST, NEWEST = package_checks.PYTHONS


def test_each_supported_python_has_its_classifier():
    assert OLDEST[0] == NEWEST[0] == 3
    assert PROJECT["requires-python"] == f">=3.{OLDEST[1]},<3.{NEWEST[1] + 1}"
    stated = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert stated == [f"3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]


def test_the_needed_packages_are_those_that_the_doctor_looks_for():
    needed = {re.match(r"[\w-]+", requirement)[0]: requirement for requirement in PROJECT["dependencies"]}
    assert needed.pop("torch") == "torch>={}.{}".format(*package_checks.OLDEST_TORCH)
    assert set(needed) == set(package_checks.NEEDED)


@pytest.mark.parametrize("page", ["docs/quickstart.md", "docs/production.md", "docs/versions.md"])
def test_the_pages_say_the_supported_versions(page):
    text = (ROOT / page).read_text()
    assert f"Python 3.{OLDEST[1]} to 3.{NEWEST[1]}" in text
    assert "torch {}.{} or newer".format(*package_checks.OLDEST_TORCH) in text
