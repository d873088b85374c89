"""Which files start first: those that take long, so that at the end no process works alone for long."""

from __future__ import annotations

LONG = """
    stack/cluster faults/test_job_hangs stack/job test_tune faults/test_attempts stack/ faults/test_identity_processes
    faults/test_last_line test_demo faults/test_space faults/test_snapshot faults/test_leaks zoo/test_zoo
    test_fleet_benchmark
    faults/test_stopped_leader faults/test_restart faults/test_blocked_agent faults/test_exits faults/test_budget
    faults/test_ends_from_outside faults/test_no_space_no_right faults/test_fork_loader faults/test_not_stuck
    faults/test_oom_killer loaders/test_unchanged_loaders frameworks/test_resume frameworks/test_loader_epochs
    frameworks/ test_compare test_attach_workers test_descriptor_leaks test_lines_run test_line_samples
    test_collect_workers test_benchmarks
""".split()
"""How their paths in this folder begin, the longest first: 15 s and more where several processes share two cores."""


def start_order(file: str) -> int:
    """The place of a file of tests, from the root of the repository."""
    path = file.removeprefix("tests/")
    return next((place for place, name in enumerate(LONG) if path.startswith(name)), len(LONG))
