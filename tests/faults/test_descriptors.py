"""Other code closes descriptors or uses all of them: the training's files are not touched, and the agent goes on."""

from __future__ import annotations

from faults.processes import events, run_script


def test_a_reused_descriptor_number_belongs_to_its_new_owner(tmp_path):
    """As a daemon does: all descriptors are closed, and the next files get the numbers of the agent's."""
    done = run_script(
        """
        import os, sys, time, urllib.request
        import telemetry
        from telemetry.util.threads import Wake

        agent = telemetry.start("run", start_line=False, port=0, interval_seconds=0.5, log_interval_seconds=0.5)
        logs = os.listdir("run/logs")

        def waits():
            return sys._current_frames()[agent._thread.ident].f_code is Wake.wait.__code__

        while waits():
            pass
        while not waits():
            pass  # what a tick has open while it reads it has a number too, which no thread can close safely then
        os.closerange(3, 64)
        theirs = [os.open(f"theirs-{number}", os.O_CREAT | os.O_RDWR) for number in range(60)]
        before = os.path.getsize(f"run/logs/{logs[0]}")

        def goes_on():
            try:
                status = urllib.request.urlopen(agent.metrics_url).status
            except OSError:
                return False
            return status == 200 and os.path.getsize(f"run/logs/{logs[0]}") > before

        while not goes_on():
            time.sleep(0.02)
        pid = os.fork()
        if pid == 0:
            raise SystemExit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
        telemetry.stop()
        for number, file in enumerate(theirs):
            assert os.readlink(f"/proc/self/fd/{file}") == os.path.abspath(f"theirs-{number}")
            assert os.fstat(file).st_size == 0
        """,
        tmp_path,
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert len(events(tmp_path / "run", "run_start")) == 1
    assert len(events(tmp_path / "run", "run_end")) == 1
