"""``trains_on_command.py RUN_DIR``: prints its URL, and makes 100 steps for each line on stdin until ``end``."""

import json
import sys

import telemetry

agent = telemetry.start(sys.argv[1], run="r")
print(agent.metrics_url, flush=True)
seen = []
for _ in telemetry.watch(iter(sys.stdin.readline, "end\n")):
    for batch in telemetry.watch(list(range(100))):
        seen.append(batch)
    with telemetry.phase("checkpoint"):
        pass
telemetry.stop()
print(json.dumps(len(seen)), flush=True)
