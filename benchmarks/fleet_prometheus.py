"""A real Prometheus with the shipped configuration and rules: its cost according to the kernel, and its query times.

A query can also be rewritten without recording rules, to compare.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any, Final

import psutil

from benchmarks import child

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

SHIPPED: Final = child.ROOT / "deploy" / "prometheus"
_READY_SECONDS: Final = 30.0
_ANSWER_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 30.0


class QueryError(RuntimeError):
    """A query was not answered; the text is one line."""


def recording_rules() -> dict[str, str]:
    """The shipped recording rules: expression by name."""
    import yaml

    document = yaml.safe_load((SHIPPED / "telemetry.recording.rules.yml").read_text(encoding="utf-8"))
    return {rule["record"]: rule["expr"] for group in document["groups"] for rule in group["rules"]}


def write_configuration(folder: Path, targets: list[dict[str, Any]]) -> Path:
    """Copy the shipped configuration, with the target file and without Alertmanager. Returns the path."""
    for path in SHIPPED.glob("telemetry.*.rules.yml"):
        shutil.copy(path, folder)
    text = (SHIPPED / "prometheus.yml").read_text(encoding="utf-8")
    configuration = folder / "prometheus.yml"
    configuration.write_text(re.sub(r"^alerting:\n(?: .*\n)+", "", text, flags=re.MULTILINE), encoding="utf-8")
    (folder / "targets").mkdir()
    (folder / "targets" / "fleet.json").write_text(json.dumps(targets), encoding="utf-8")
    return configuration


class Prometheus:
    """The server, on a loopback port.

    Raises:
        ChildError: it is not installed, or does not start.
    """

    def __init__(self, configuration: Path, port: int) -> None:
        binary = shutil.which("prometheus")
        if binary is None:
            raise child.ChildError("prometheus is not installed (Debian's package prometheus has it)")
        self._url = f"http://127.0.0.1:{port}"
        self._log = configuration.with_name("prometheus.log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    binary,
                    f"--config.file={configuration}",
                    f"--storage.tsdb.path={configuration.parent}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                    f"--query.timeout={_ANSWER_SECONDS:g}s",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )
        self._of_process = psutil.Process(self._process.pid)
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + _READY_SECONDS
        while True:
            try:
                self._get("/-/ready")
            except OSError:
                if self._process.poll() is not None or time.monotonic() > end:
                    self.stop()
                    said = self._log.read_text(errors="replace").strip().splitlines() or ["nothing in its log"]
                    raise child.ChildError(f"prometheus does not start: {said[-1][:160]}") from None
                time.sleep(0.1)
            else:
                return

    def stop(self) -> None:
        """Terminate it, and kill it if that times out."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_SECONDS)

    def usage(self) -> tuple[float, float]:
        """CPU seconds so far, and bytes of resident memory now."""
        cpu = self._of_process.cpu_times()
        return cpu.user + cpu.system, float(self._of_process.memory_info().rss)

    def own(self, metric: str) -> float:
        """The sum of one of Prometheus's own metrics."""
        found = re.findall(rf"^{metric}(?:\{{[^}}]*\}})? (\S+)$", self._get("/metrics"), re.MULTILINE)
        return sum(map(float, found))

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query at the current time.

        Raises:
            QueryError: it was not answered.
        """
        result: list[dict[str, Any]] = self._api("query", query=expression)["result"]
        return result

    def rule_seconds(self, period: float) -> dict[str, float]:
        """What each rule takes in so many seconds, by its name, if every evaluation takes as long as the newest one.

        Alerts of one name are added up.
        """
        found: dict[str, float] = {}
        for group in self._api("rules")["groups"]:
            for rule in group["rules"]:
                took = float(rule["evaluationTime"]) * period / float(group["interval"])
                found[rule["name"]] = found.get(rule["name"], 0.0) + took
        return found

    def values(self, label: str, selector: str) -> list[str]:
        """The values of a label on the series of a selector.

        Raises:
            QueryError: it was not answered.
        """
        return list(self._api(f"label/{label}/values", **{"match[]": selector}))

    def timed(self, expression: str, end: float, range_seconds: int, step: int | None) -> tuple[float, int]:
        """Seconds of a query, including reading the answer, and its number of series. ``step`` None: instant query.

        Raises:
            QueryError: it was not answered.
        """
        began = time.perf_counter()
        if step is None:
            data = self._api("query", query=expression, time=end)
        else:
            data = self._api("query_range", query=expression, start=end - range_seconds, end=end, step=step)
        return time.perf_counter() - began, len(data["result"])

    def _api(self, path: str, **parameters: Any) -> Any:
        try:
            text = self._get(f"/api/v1/{path}", urllib.parse.urlencode(parameters).encode() or None)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace").strip().splitlines() or [str(error)]
            raise QueryError(said[0][:240]) from None
        except OSError as error:
            raise QueryError(str(error)) from None
        return json.loads(text)["data"]

    def _get(self, path: str, body: bytes | None = None) -> str:
        if body is not None and path.startswith("/api/v1/label/"):
            path, body = f"{path}?{body.decode()}", None
        with urllib.request.urlopen(self._url + path, body, timeout=_ANSWER_SECONDS) as answer:
            text: str = answer.read().decode()
        return text


# -- queries without recording rules --------------------------------------------------------------------------------

_TOKEN: Final = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<name>[a-zA-Z_:][\w:]*)(?P<matchers>\s*\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\})?(?P<range>\s*\[\w+\])?"""
)


def inlined(expression: str, rules: Mapping[str, str], metrics: Collection[str], interval: str) -> str:
    """An expression that only reads raw metrics.

    Matchers of a recorded name are added to every metric in its expression. A rule that reads its own earlier values
    has no such expression, and stays.

    Args:
        expression: PromQL, with Grafana's variables replaced.
        rules: the recording rules, expression by name.
        metrics: names of the raw metrics.
        interval: how often the rules are evaluated. A range over a recorded name becomes a subquery with this step.
    """

    def replace(name: str, matchers: str, window: str) -> str | None:
        rule = rules.get(name)
        if rule is None or name in rule:
            return None
        narrowed = _replaced(rule, lambda n, m, w: _narrowed(n, m, w, matchers) if n in rules or n in metrics else None)
        return f"({inlined(narrowed, rules, metrics, interval)})" + window.replace("]", f":{interval}]")

    return _replaced(expression, replace)


def _narrowed(name: str, matchers: str, window: str, more: str) -> str:
    both = ", ".join(filter(None, (matchers.strip(" {}\n"), more.strip(" {}\n"))))
    return f"{name}{{{both}}}{window}" if both else name + window


def _replaced(expression: str, replace: Callable[[str, str, str], str | None]) -> str:
    """Replace every name outside of text, with its matchers and its range. If ``replace`` returns None, it stays."""

    def one(match: re.Match[str]) -> str:
        if match["text"] is not None:
            return match[0]
        new = replace(match["name"], match["matchers"] or "", match["range"] or "")
        return match[0] if new is None else new

    return _TOKEN.sub(one, expression)
