"""Which files start first: those that take long, so that at the end no process works alone for long.

Some mostly wait, others mostly compute. Where only such as wait run at the same time, the cores have nothing to do.
"""

from __future__ import annotations

LONG = """
    stack/cluster faults/test_job_hangs stack/job faults/test_space test_alerts test_tune faults/test_attempts stack/
    loaders/test_unchanged_loaders faults/test_last_line test_samples faults/test_identity_processes test_demo
    faults/test_leaks zoo/test_zoo faults/test_not_stuck test_report_logs faults/test_stuck
    faults/test_exits faults/test_snapshot test_workers faults/test_blocked_agent
    test_stalls test_agent faults/test_restart faults/test_agent_seams faults/test_takeover test_html
    faults/test_budget faults/test_ends_from_outside faults/test_oom_killer faults/test_no_space_no_right
     faults/test_fork_loader frameworks/test_resume frameworks/test_loader_epochs frameworks/
    test_sampling test_benchmarks test_lines_run test_trace_ faults/test_unnoticed
    faults/test_standard_streams test_compare test_sinks
    test_run_counts test_commands
""".split()
"""How their paths in this folder begin: 15 s and more where several processes share two cores, about by length."""


def start_order(file: str) -> int:
    """The place of a file of tests, from the root of the repository."""
    path = file.removeprefix("tests/")
    return next((place for place, name in enumerate(LONG) if path.startswith(name)), len(LONG))
