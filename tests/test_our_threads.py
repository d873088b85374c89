"""What the agent's own threads must not do to the training process: import, write the environment, hold frames."""

from __future__ import annotations

import os
import subprocess
import sys


WATCHED = """
import os, sys, threading, urllib.request
from importlib.abc import MetaPathFinder

class Watch(MetaPathFinder):
    seen = []

    def find_spec(self, name, path, target=None):
        thread = threading.current_thread().name
        if thread.startswith("telemetry-"):
            self.seen.append((thread, name))
        return None

sys.meta_path.insert(0, Watch())
import telemetry

agent = telemetry.start(sys.argv[1], port=0, interval_seconds=0.1, log_interval_seconds=0.2, start_line=False)
agent._sampler._nvml._thread.join()  # there is no GPU, or it is a fake one that ends
for _ in range(3):
    urllib.request.urlopen(agent.metrics_url, timeout=10).read()
    before = agent.accounts.ledger.at_ns
    while agent.accounts.ledger.at_ns == before:
        pass
telemetry.stop()
print(*Watch.seen)
"""


def test_our_threads_import_nothing(tmp_path):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    code = WATCHED if not os.path.exists("/dev/nvidiactl") else WATCHED.replace("._thread.join()", "")
    arguments = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
