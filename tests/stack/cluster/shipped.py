"""The files of deploy/prometheus and deploy/alertmanager, set up to run beside a test.

Nothing is written by hand: the files are read, their ports and paths are replaced, and every duration is divided by one
constant. So what takes half an hour in production takes two minutes here.
"""

import re
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
SPEED = 15
"""The shipped scrape interval of 15 s becomes 1 s. All other durations are divided by the same number."""

SCRAPE_SECONDS = 0.015
"""The CPU time that the answer to a scrape may cost. Scrapes come more often here, and so the agents' budget is larger."""

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_BARE = re.compile(r"(run_rank:training_last_step_age:seconds > |predict_linear\([^()]*\[[^]]*\], )(\d+)\b")
"""Seconds that are plain numbers in an expression."""

_BUDGET = re.compile(r"""(:telemetry_overhead_seconds:rate5m\{thread="agent"\} > )([\d.]+)""")
"""The share of a core that the agents' own threads may cost."""


def faster(duration):
    """``5m`` is ``20s``. The files use no sum of units (``1h30m``)."""
    match = re.fullmatch(r"(\d+)(ms|s|m|h|d)", duration)
    if match is None:
        raise ValueError(f"no duration of one unit: {duration!r}")
    milliseconds = round(int(match[1]) * _UNITS[match[2]] / SPEED)
    return f"{milliseconds}ms" if milliseconds % 1000 else f"{milliseconds // 1000}s"


def faster_expression(expression):
    """An expression with its ranges, and the seconds that it compares ages with, divided."""
    hastened = re.sub(r"\[(\w+)\]", lambda match: f"[{faster(match[1])}]", expression)
    hastened = _BUDGET.sub(lambda match: f"{match[1]}{float(match[2]) + SCRAPE_SECONDS * (1 - 1 / SPEED):g}", hastened)
    return _BARE.sub(lambda match: f"{match[1]}{int(match[2]) / SPEED:g}", hastened)


def faster_rules(document):
    """A rule file's document, with every duration divided."""
    groups = []
    for group in document["groups"]:
        rules = []
        for rule in group["rules"]:
            times = {key: faster(rule[key]) for key in ("for", "keep_firing_for") if key in rule}
            rules.append({**rule, "expr": faster_expression(rule["expr"]), **times})
        interval = {"interval": faster(group["interval"])} if "interval" in group else {}
        groups.append({**group, **interval, "rules": rules})
    return {"groups": groups}


def prometheus(folder, alertmanager, remote_write=None):
    """Write the shipped configuration and rules into a folder, with an empty folder ``targets`` in it.

    Args:
        alertmanager: its port.
        remote_write: port of the VictoriaMetrics that all samples are forwarded to.

    Returns:
        The configuration file.
    """
    shipped = DEPLOY / "prometheus"
    text = (shipped / "prometheus.yml").read_text()
    if remote_write is not None:  # as the header of the file says: both in one file
        text += (shipped / "remote-write.victoriametrics.yml").read_text()
    document = yaml.safe_load(text)
    times = document["global"]
    for key in ("scrape_interval", "evaluation_interval"):
        times[key] = faster(times[key])
    document["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{alertmanager}"]
    for job in document["scrape_configs"]:
        job["scrape_timeout"] = times["scrape_interval"]  # a larger part than in production: this machine is not faster
        for discovery in job["file_sd_configs"]:
            discovery["refresh_interval"] = faster(discovery["refresh_interval"])
    for store in document.get("remote_write", []):
        store["url"] = re.sub(r":\d+/", f":{remote_write}/", store["url"])
    for name in document["rule_files"]:
        rules = yaml.safe_load((shipped / name).read_text())
        (folder / name).write_text(yaml.safe_dump(faster_rules(rules), sort_keys=False, width=1000))
    (folder / "targets").mkdir()
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def alertmanager(folder, webhook):
    """Write the shipped configuration into a folder, with the webhook at a port of the test.

    Returns:
        The configuration file.
    """
    document = yaml.safe_load((DEPLOY / "alertmanager" / "alertmanager.yml").read_text())
    for route in (document["route"], *document["route"]["routes"]):
        for key in ("group_wait", "group_interval", "repeat_interval"):
            if key in route:
                route[key] = faster(route[key])
    (receiver,) = document["receivers"]
    for hook in receiver["webhook_configs"]:
        hook["url"] = re.sub(r":\d+/", f":{webhook}/", hook["url"])
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path
