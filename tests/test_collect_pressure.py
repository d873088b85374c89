"""What the cgroups above this process let it use, and how often they have held it back."""

from __future__ import annotations

import pytest

from telemetry.sources.cgroup import PressureSource


def tree(tmp_path, version: int, limits: dict[str, str]):
    """Files as the kernel has them: ``limits`` by folder, from the root of the mount."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    for folder in ("proc/self", "proc/pressure"):
        (tmp_path / folder).mkdir(parents=True)
    controllers = "" if version == 2 else "cpu"
    (proc / "self" / "cgroup").write_text(f"{0 if version == 2 else 1}:{controllers}:/job/step\n")
    root = mount if version == 2 else mount / "cpu"
    for folder in ("", "job", "job/step"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        quota = limits.get(folder)
        if version == 2 and folder:
            (root / folder / "cpu.max").write_text(f"{quota or 'max'} 100000\n")
        elif version == 1:
            (root / folder / "cpu.cfs_quota_us").write_text(f"{quota or -1}\n")
            (root / folder / "cpu.cfs_period_us").write_text("100000\n")
        (root / folder / "cpu.stat").write_text("nr_periods 0\nnr_throttled 0\n")
    return PressureSource(proc, mount), root


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({}, None),
        ({"job/step": "150000"}, 1.5),
        ({"job": "200000"}, 2.0),  # ours says nothing: the one above it does
        ({"job": "200000", "job/step": "400000"}, 2.0),
    ],
)
def test_the_least_quota_of_all_groups_above_is_the_limit(tmp_path, version, limits, cores):
    source, _ = tree(tmp_path, version, limits)
    assert source.read().cgroup_cpu_limit == cores


@pytest.mark.parametrize("version", [1, 2])
def test_how_often_the_quota_was_used_up_is_told_by_the_group_that_has_it(tmp_path, version):
    source, root = tree(tmp_path, version, {"job": "200000"})
    source.read()
    (root / "job" / "cpu.stat").write_text("nr_periods 40\nnr_throttled 30\nthrottled_usec 5\n")
    assert source.read().cgroup_throttled_ratio == 0.75


@pytest.mark.parametrize("version", [1, 2])
def test_what_all_of_the_group_has_used_of_its_quota(tmp_path, version, monkeypatch):
    """Other ranks of a pod share it: two cores of three, over ten seconds."""
    source, root = tree(tmp_path, version, {"job": "300000"})
    now = [1_000_000_000]
    monkeypatch.setattr("telemetry.sources.cgroup.now_ns", lambda: now[0])

    def use(seconds):
        if version == 2:
            (root / "job" / "cpu.stat").write_text(f"usage_usec {seconds * 10**6}\nnr_periods 0\nnr_throttled 0\n")
        else:
            (root / "job" / "cpuacct.usage").write_text(f"{seconds * 10**9}\n")

    use(5)
    assert source.read().cgroup_cpu_used is None
    use(25)
    now[0] += 10_000_000_000
    assert source.read().cgroup_cpu_used == 2.0
