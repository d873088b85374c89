"""Scripts and namespaces for the tests of hostile environments."""

from __future__ import annotations

QUIET = {"TELEMETRY_START_LINE": "off", "TELEMETRY_INTERVAL_SECONDS": "0.1", "TELEMETRY_LOG_INTERVAL_SECONDS": "0.1"}

# Trains until it is told to end. Reports what the training itself has seen.
TRAINING = """
    import json, sys, telemetry
    agent = telemetry.start(sys.argv[1], run="r")
    print(agent.metrics_url, flush=True)
    seen = []
    for command in telemetry.watch(iter(sys.stdin.readline, "end\\n")):
        for batch in telemetry.watch(list(range(100))):
            seen.append(batch)
        with telemetry.phase("checkpoint"):
            pass
    telemetry.stop()
    print(json.dumps([len(seen), agent.errors.counts, agent.event_log.log.file.dropped]), flush=True)
"""
