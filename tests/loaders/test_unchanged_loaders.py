"""Loaders and watched sources do the same under the agent as without it, and leave the same behind."""

from __future__ import annotations

import pytest

from tests.loaders import torch_cases, watch_cases
from tests.loaders.observations import ATTACHED, BARE, observed

GROUPS = {"torch_cases": torch_cases.CASES, "watch_cases": watch_cases.CASES}


@pytest.fixture(scope="module")
def observations(tmp_path_factory):
    return observed(GROUPS, tmp_path_factory.mktemp("groups"))


@pytest.mark.parametrize("group,case", [(group, case) for group, cases in GROUPS.items() for case in cases])
def test_a_job_sees_the_same(observations, group, case):
    bare, attached = (observations[group, disabled]["cases"][case] for disabled in (BARE, ATTACHED))
    assert attached == bare


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_fails_inside_and_stop_leaves_nothing(observations, group):
    bare, attached = (observations[group, disabled] for disabled in (BARE, ATTACHED))
    assert attached["batches"] > 1000 > bare["batches"] == 0, "with the agent, and without it"
    assert attached["last error"] is None
    assert attached["errors"] == 0
    for what in ("stopped", "stderr", "status"):
        assert attached[what] == bare[what]


@pytest.mark.parametrize("group", GROUPS)
def test_the_bare_run_leaves_nothing_behind_either(observations, group):
    """Otherwise there would be nothing to compare."""
    left = {name: case["descriptors left"] for name, case in observations[group, BARE]["cases"].items()}
    assert left == dict.fromkeys(left, 0)
