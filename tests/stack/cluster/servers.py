"""Real servers during a test: Prometheus, Alertmanager, VictoriaMetrics, and a webhook that receives alerts."""

import json
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from stack.cluster import shipped
from stack.jobs import Prometheus, get, must_have, wait_for
from tests.free_ports import free_ports

LOGS = {}
"""The output file of each server. It is shown if a test fails."""

STOP_SECONDS = 10.0


def must_have_one_of(*commands):
    """The path of the first program that exists: its name differs between distributions."""
    found = [path for command in commands if (path := shutil.which(command))]
    return found[0] if found else must_have(commands[0])


def stop(processes):
    """End processes, the youngest first."""
    for process in reversed(processes):
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)


class Webhook:
    """The receiver of Alertmanager's notifications. A notification is kept as one entry for each alert in it."""

    def __init__(self):
        self.told = []
        told = self.told

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                told.extend(body["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="webhook", daemon=True).start()

    def alerts(self, status, name=None, **labels):
        """The received alerts with this status, and with these labels if any are given, oldest first."""
        wanted = labels | ({"alertname": name} if name else {})
        return [alert for alert in self.told if alert["status"] == status and wanted.items() <= alert["labels"].items()]

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class Monitoring:
    """The servers of a site: the shipped configuration of all three, and a folder for target files."""

    def __init__(self, launch, folder):
        self.webhook = Webhook()
        self.folder = folder
        self.targets = folder / "targets"
        first = free_ports(3)
        self.prometheus, self._alertmanager, self.store = Prometheus(first), first + 1, Prometheus(first + 2)
        self._launch = launch
        self._processes = []

    def start(self):
        configuration = shipped.prometheus(self.folder, self._alertmanager, remote_write=self.store.port)
        alertmanager = shipped.alertmanager(self.folder, self.webhook.port)
        data = self.folder / "data"
        self._start(
            "victoria-metrics", self.store.port, "/health",
            must_have_one_of("victoria-metrics", "victoria-metrics-prod"), f"-storageDataPath={data}/store",
            f"-httpListenAddr=127.0.0.1:{self.store.port}", "-loggerLevel=WARN",
            # By default it answers for the time half a minute ago, because samples may come late. Here they do not.
            "-search.latencyOffset=1s", "-search.disableCache",
        )  # fmt: skip
        self._start(
            "alertmanager", self._alertmanager, "/-/ready",
            must_have_one_of("prometheus-alertmanager", "alertmanager"), f"--config.file={alertmanager}",
            f"--storage.path={data}/alertmanager", f"--web.listen-address=127.0.0.1:{self._alertmanager}",
            "--cluster.listen-address=", "--log.level=warn",
        )  # fmt: skip
        self._start(
            "prometheus", self.prometheus.port, "/-/ready",
            must_have("prometheus"), f"--config.file={configuration}", f"--storage.tsdb.path={data}/prometheus",
            f"--web.listen-address=127.0.0.1:{self.prometheus.port}", "--log.level=warn",
        )  # fmt: skip

    def _start(self, name, port, path, *command):
        process = self._launch(command, f"cluster-{name}")
        self._processes.append(process)
        LOGS[name] = self._launch.folder / f"cluster-{name}.stderr"

        def ready():
            assert process.poll() is None, LOGS[name].read_text()
            get(f"http://127.0.0.1:{port}{path}")
            return True

        wait_for(name, ready)

    def stop(self):
        stop(self._processes)  # Prometheus before the store: otherwise it would retry for a minute
        self.webhook.close()

    def api(self, path):
        """The data in an answer of Prometheus."""
        return json.loads(get(f"http://127.0.0.1:{self.prometheus.port}/api/v1/{path}"))["data"]

    def told(self, what, status, name, seconds=60.0, **labels):
        """Wait until a matching alert has been received. Returns all matching alerts, oldest first."""
        try:
            return wait_for(what, lambda: self.webhook.alerts(status, name, **labels), seconds, every=0.2)
        except pytest.fail.Exception as failed:
            raise pytest.fail.Exception(f"{failed}\n{self.state()}") from None

    def state(self):
        """Information for a failed test: targets, rules with an error, alerts, and received notifications."""
        targets = [(t["scrapeUrl"], t["health"], t["lastError"]) for t in self.api("targets")["activeTargets"]]
        rules = [rule for group in self.api("rules")["groups"] for rule in group["rules"]]
        errors = [(rule["name"], rule["lastError"]) for rule in rules if rule.get("lastError")]
        alerts = [(alert["labels"], alert["state"], alert["value"]) for alert in self.api("alerts")["alerts"]]
        told = [(alert["status"], alert["labels"]) for alert in self.webhook.told]
        return "\n".join(
            f"{name}: {found}"
            for name, found in (("targets", targets), ("errors", errors), ("alerts", alerts), ("told", told))
        )
