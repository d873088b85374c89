"""Loaders of frameworks do the same under the agent as without it, over hundreds of epochs, and leave the same behind."""

from __future__ import annotations

import pytest

from tests.frameworks.test_frameworks import needs
from tests.loaders.framework_cases import CASES, PACKAGES
from tests.loaders.observations import ATTACHED, BARE, observed

GROUP = "framework_cases"
pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def observations(tmp_path_factory):
    return observed([GROUP], tmp_path_factory.mktemp("epochs"))


@pytest.mark.parametrize("case", CASES)
def test_a_loop_sees_the_same_in_every_epoch(case, request):
    needs(PACKAGES[CASES[case]])
    observations = request.getfixturevalue("observations")
    bare, attached = (observations[GROUP, disabled]["cases"][case] for disabled in (BARE, ATTACHED))
    assert isinstance(bare["said"], list), bare["said"]
    assert attached == bare


def test_nothing_fails_inside_and_stop_leaves_nothing(request):
    needs(*PACKAGES.values())
    observations = request.getfixturevalue("observations")
    bare, attached = (observations[GROUP, disabled] for disabled in (BARE, ATTACHED))
    assert attached["batches"] > 1000 > bare["batches"] == 0, "with the agent, and without it"
    assert attached["last error"] is None
    assert attached["errors"] == 0
    for what in ("stopped", "status"):
        assert attached[what] == bare[what]
