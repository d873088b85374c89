"""The counter of the OOM killer in the cgroup of a process, read from files as the kernel has them."""

from __future__ import annotations

import pytest

from telemetry.sources.cgroup import OomCounter, group_id


def tree(tmp_path, version: int, groups: dict[str, tuple[str, int]]):
    """``groups``: limit and kills by folder, from the root of the mount; the process is in ``job/step``."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("0123abcd-4567-89ab-cdef-0123456789ab\n")
    (proc / "self" / "cgroup").write_text("0::/job/step\n" if version == 2 else "4:memory:/job/step\n")
    root = mount if version == 2 else mount / "memory"
    for folder in ("", "job", "job/step"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        limit, kills = groups.get(folder, ("max", 0))
        if version == 1:
            (root / folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        elif folder:  # the root of version 2 has no such files
            (root / folder / "memory.max").write_text(f"{limit}\n")
            (root / folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 7\noom 2\noom_kill {kills}\n")
    return OomCounter(proc, mount), root


@pytest.mark.parametrize(
    ("version", "groups", "of", "kills"),
    [
        (2, {"job/step": ("max", 3)}, "job/step/memory.events", 3),
        (2, {"job/step": ("max", 1), "job": ("1000", 4)}, "job/memory.events", 4),  # the tasks of a job share the limit
        (2, {"job/step": ("900", 1), "job": ("1000", 4)}, "job/step/memory.events", 1),
        (1, {"job/step": ("max", 3), "job": ("1000", 0)}, "job/step/memory.oom_control", 3),
    ],
)
def test_the_group_whose_counter_tells(tmp_path, version, groups, of, kills):
    counter, root = tree(tmp_path, version, groups)
    assert counter.path == str(root / of)
    assert counter.count() == kills
    assert counter.group == f"0123abcd-{(root / of).parent.stat().st_ino:x}"


def test_the_counter_is_read_again_each_time(tmp_path):
    counter, root = tree(tmp_path, 2, {})
    (root / "job/step/memory.events").write_text("oom 1\noom_kill 1\n")
    assert counter.count() == 1
    (root / "job/step/memory.events").unlink()
    assert counter.count() is None


def test_a_kernel_that_does_not_count_gives_no_figure(tmp_path):
    counter, _ = tree(tmp_path, 2, {})
    assert counter.head_fields()
    for path in (tmp_path / "cgroup").rglob("memory.events"):
        path.write_text("oom 1\n")
    without = OomCounter(tmp_path / "proc", tmp_path / "cgroup")
    assert (without.count(), without.head_fields()) == (None, {})


def test_a_group_of_the_same_name_on_another_boot_is_another_group(tmp_path):
    counter, root = tree(tmp_path, 2, {})
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("ffffffff-4567\n")
    assert group_id(root / "job/step", tmp_path / "proc") != counter.group
