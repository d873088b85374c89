"""The report of a run that has only just begun, and of one with little to say."""

from __future__ import annotations

from report_logs import START, line, window, write

from telemetry.report.command import report


def text_of(folder, capsys):
    assert report(str(folder), as_json=False) == 0
    return capsys.readouterr().out


def test_a_wait_that_has_not_ended_is_no_share_of_the_loop(tmp_path, capsys):
    write(tmp_path, 0, line("run_start", **START), window(wait=0.1, compute=0.0, steps=0))
    text = text_of(tmp_path, capsys)
    assert "No training step has ended yet." in text
    rows = [row.split() for row in text.splitlines() if row.startswith("   0 ")]
    assert rows[0][4:12] == ["-"] * 8, "steps, waits, exposed, the agent's cost of a step"


def test_each_section_has_one_empty_line_above_it(tmp_path, capsys):
    ended = window(wait=0.1, compute=9.0, steps=9, seconds=[1.0]) | {"samples_total": 90}
    write(tmp_path, 0, line("run_start", **START), ended)
    text = text_of(tmp_path, capsys)
    assert "\n\nthroughput: 90 samples" in text
    assert "\n\nrank 0 (pid 10) did not end by itself" in text
    assert "\n\n\n" not in text
