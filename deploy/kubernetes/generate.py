"""Writes the files that are made from other files of the repository: ``python deploy/kubernetes/generate.py``.

``prometheusrule.yaml`` has the rule files with their comments. ``dashboards.yaml`` has one ConfigMap per dashboard.
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
RULES = ("telemetry.recording.rules.yml", "telemetry.alerts.rules.yml")
RULES_HEAD = """\
# Made by generate.py from deploy/prometheus/*.rules.yml: change those and regenerate.
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

DASHBOARDS = HERE.parents[1] / "grafana" / "dashboards"
DASHBOARDS_HEAD = "# Made by generate.py from grafana/dashboards/*.json: change what generates those and regenerate.\n"
CONFIG_MAP = """\
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: telemetry-dashboard-{name}
  namespace: monitoring
  labels:
    grafana_dashboard: "1" # what the sidecar of the Grafana chart looks for
  annotations:
    grafana_folder: Training
data:
  telemetry-{name}.json: |
    {content}
"""


def prometheus_rule() -> str:
    """The manifest. In each rule file, a list that is already indented by two follows ``groups:``."""
    parts = [RULES_HEAD]
    for name in RULES:
        groups = (HERE.parent / "prometheus" / name).read_text().split("\ngroups:\n", 1)[1]
        parts += [f"  {line}".rstrip() + "\n" for line in groups.splitlines()]
    return "".join(parts)


def dashboards() -> str:
    """The manifests, without white space: ``kubectl apply`` keeps a copy in an annotation of at most 256 KiB."""
    parts = [DASHBOARDS_HEAD]
    for path in sorted(DASHBOARDS.glob("*.json")):
        content = json.dumps(json.loads(path.read_text()), separators=(",", ":"), ensure_ascii=False)
        parts.append(CONFIG_MAP.format(name=path.stem, content=content))
    return "".join(parts)


if __name__ == "__main__":
    (HERE / "prometheusrule.yaml").write_text(prometheus_rule())
    (HERE / "dashboards.yaml").write_text(dashboards())
