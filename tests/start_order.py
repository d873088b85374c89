"""Which files start first: those that take long, so that at the end no process works alone for long.

Some mostly wait, others mostly compute. Where only such as wait run at the same time, the cores have nothing to do.
"""

from __future__ import annotations

LONG = """
    stack/cluster faults/test_job_hangs stack/job test_tune faults/test_attempts stack/ faults/test_identity_processes
    faults/test_last_line test_demo faults/test_leaks faults/test_space test_fleet_benchmark faults/test_snapshot
    test_tokens faults/test_stopped_leader zoo/test_zoo faults/test_blocked_agent loaders/test_unchanged_loaders
    test_alerts faults/test_restart test_report_damaged faults/test_exits faults/test_not_stuck test_stall_properties
    faults/test_budget faults/test_ends_from_outside test_html_charts faults/test_no_space_no_right test_html_figures
    faults/test_fork_loader faults/test_oom_killer frameworks/test_resume frameworks/test_loader_epochs frameworks/
    test_compare test_attach_workers test_lines_run test_descriptor_leaks test_line_samples test_collect_workers
    test_benchmarks faults/test_stuck test_fetched_samples test_trace_ test_sink_settings test_run_counts test_terminal
""".split()
"""How their paths in this folder begin: 15 s and more where several processes share two cores, about by length."""


def start_order(file: str) -> int:
    """The place of a file of tests, from the root of the repository."""
    path = file.removeprefix("tests/")
    return next((place for place, name in enumerate(LONG) if path.startswith(name)), len(LONG))
