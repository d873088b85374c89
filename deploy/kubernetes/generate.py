"""Writes prometheusrule.yaml from the rule files, comments and all: ``python deploy/kubernetes/generate.py``."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
RULES = ("telemetry.recording.rules.yml", "telemetry.alerts.rules.yml")
HEAD = """\
# Made by generate.py from deploy/prometheus/*.rules.yml: change those, and make it anew.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: telemetry
  namespace: monitoring
  labels:
    release: prometheus # what your Prometheus object's ruleSelector asks for
spec:
  groups:
"""


def prometheus_rule() -> str:
    """The manifest. What follows ``groups:`` in each rule file is a list already indented by two."""
    parts = [HEAD]
    for name in RULES:
        groups = (HERE.parent / "prometheus" / name).read_text().split("\ngroups:\n", 1)[1]
        parts += [f"  {line}".rstrip() + "\n" for line in groups.splitlines()]
    return "".join(parts)


if __name__ == "__main__":
    (HERE / "prometheusrule.yaml").write_text(prometheus_rule())
