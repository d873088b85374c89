"""Which files start first: those that take long, so that at the end no process works alone for long.

Some mostly wait, others mostly compute. Where only such as wait run at the same time, the cores have nothing to do.
"""

from __future__ import annotations

LONG = """
    stack/cluster faults/test_job_hangs stack/job faults/test_attempts faults/test_exits test_alerts test_tune stack/
    faults/test_stuck faults/test_snapshots test_samples faults/test_stack_requests
    test_demo faults/test_ranks zoo/test_zoo faults/test_forks test_report_logs faults/test_disks
    faults/test_blocked_agent unnoticed/ faults/test_memory test_workers faults/test_signals faults/test_standard_streams
    test_stalls test_agent faults/test_footprint faults/test_takeover faults/test_names_and_settings test_html
    frameworks/test_resume test_benchmarks test_lines_run
    test_trace_ faults/test_unnoticed faults/test_seams faults/test_files_removed faults/test_endpoint
    test_compare test_sinks test_run_counts test_unseen_loops test_commands
""".split()
"""How their paths in this folder begin: 15 s and more where several processes share two cores, about by length."""


def start_order(file: str) -> int:
    """The place of a file of tests, from the root of the repository."""
    path = file.removeprefix("tests/")
    return next((place for place, name in enumerate(LONG) if path.startswith(name)), len(LONG))
