"""Which frames of a stack are the user's own code."""

from pathlib import Path

import pytest

import telemetry
from telemetry.util.stacks import is_library

PACKAGE = Path(telemetry.__file__).parent


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_of_the_package_is_the_user_s(path):
    assert is_library(str(path))


@pytest.mark.parametrize("file", [f"{PACKAGE}-runs/train.py", "/home/me/train.py", "train.py"])
def test_a_script_is_the_user_s(file):
    assert not is_library(file)
