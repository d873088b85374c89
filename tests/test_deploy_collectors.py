"""The configurations for OpenTelemetry's collector and for Grafana Alloy, without their programs.

Their fields are held against the fields that the two publish, as far as they are used here; the scrape job against that of
Prometheus, and with promtool. docs/integrations.md says that neither program was run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
COLLECTOR = DEPLOY / "opentelemetry" / "collector.yaml"
ALLOY = DEPLOY / "alloy" / "config.alloy"


class Strict(yaml.SafeLoader):
    """Refuses a key that is there twice, as the collector does."""


def _mapping(loader, node):
    keys = [loader.construct_object(key) for key, _ in node.value]
    assert len(keys) == len(set(keys)), keys
    return loader.construct_mapping(node, deep=True)


Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def prometheus_job() -> dict:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    return {"scrape_interval": config["global"]["scrape_interval"]} | job


DURATION = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}


def closed(required=(), **properties) -> dict:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


NAMES = {"type": "array", "minItems": 1, "items": {"type": "string"}}

SCHEMA = closed(
    ["receivers", "exporters", "service"],
    receivers=closed(
        ["prometheus"],
        prometheus=closed(
            ["config"],
            config=closed(
                ["scrape_configs"],
                scrape_configs={
                    "type": "array",
                    "minItems": 1,
                    "items": closed(
                        ["job_name"],
                        job_name={"type": "string"},
                        scrape_interval=DURATION,
                        scrape_timeout=DURATION,
                        file_sd_configs={
                            "type": "array",
                            "items": closed(["files"], files=NAMES, refresh_interval=DURATION),
                        },
                        metric_relabel_configs={
                            "type": "array",
                            "items": closed(regex={"type": "string"}, action={"enum": ["labeldrop", "drop", "keep"]}),
                        },
                    ),
                },
            ),
        ),
    ),
    processors=closed(
        memory_limiter=closed(["check_interval", "limit_mib"], check_interval=DURATION, limit_mib={"type": "integer"}),
        batch=closed(),
    ),
    exporters=closed(otlphttp=closed(["endpoint"], endpoint={"type": "string"}, headers={"type": "object"})),
    service=closed(
        ["pipelines"],
        pipelines=closed(
            ["metrics"], metrics=closed(["receivers", "exporters"], receivers=NAMES, processors=NAMES, exporters=NAMES)
        ),
    ),
)


@pytest.fixture(scope="module")
def collector() -> dict:
    return yaml.load(COLLECTOR.read_text(), Strict)


def test_collector_has_known_fields_only(collector):
    jsonschema.validate(collector, SCHEMA)


def test_collector_pipeline_uses_all_that_is_defined(collector):
    pipeline = collector["service"]["pipelines"]["metrics"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == set(collector[kind])
    assert pipeline["processors"][0] == "memory_limiter", "it must come first"


def test_collector_variables_are_explained_and_dollars_are_variables(collector):
    text = COLLECTOR.read_text()
    assert len(re.findall(r"\$", text)) == len(re.findall(r"\$\{env:[A-Z_]+\}", text)), "another $ must be doubled"
    head = text.partition("receivers:")[0]
    for name in re.findall(r"^[^#]*\$\{env:([A-Z_]+)\}", text, re.MULTILINE):
        assert name in head


def same_job(job: dict) -> None:
    """The job of Prometheus, but for the folder of the target files."""
    expected = prometheus_job()
    for key in ("job_name", "scrape_interval", "scrape_timeout", "metric_relabel_configs"):
        assert job[key] == expected[key], key
    (found,), (files,) = job["file_sd_configs"], expected["file_sd_configs"]
    assert found["refresh_interval"] == files["refresh_interval"]
    assert [Path(name).name for name in found["files"]] == [Path(name).name for name in files["files"]]


def test_collector_scrapes_as_prometheus_does(collector):
    (job,) = collector["receivers"]["prometheus"]["config"]["scrape_configs"]
    same_job(job)


def test_promtool_accepts_the_collectors_scrape_job(collector, tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    text = yaml.safe_dump(collector["receivers"]["prometheus"]["config"]).replace("${env:TELEMETRY_TARGETS}", "targets")
    (tmp_path / "prometheus.yml").write_text(text)
    done = subprocess.run(
        [promtool, "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- Alloy -----------------------------------------------------------------------------------------------------------

TOKEN = re.compile(
    r"""\s+|//[^\n]*|(?P<string>"(?:[^"\\]|\\.)*")|(?P<name>[a-zA-Z_]\w*(?:\.[a-zA-Z_]\w*)*)|(?P<mark>[{}\[\](),=+])"""
)


class AlloyParser:
    """Blocks, attributes, and the expressions that are used here. Anything else is an error."""

    def __init__(self, text: str) -> None:
        self.tokens, at = [], 0
        while at < len(text):
            found = TOKEN.match(text, at)
            assert found, f"cannot read: {text[at : at + 40]!r}"
            at = found.end()
            if found.lastgroup:
                self.tokens.append((found.lastgroup, found.group()))
        self.at = 0

    def body(self, *, inner: bool = False) -> list:
        entries = []
        while self.at < len(self.tokens) and self.tokens[self.at] != ("mark", "}"):
            name = self.take("name")
            if self.tokens[self.at] == ("mark", "="):
                self.take("mark", "=")
                entries.append((name, None, self.expression()))
            else:
                label = self.take("string")[1:-1] if self.tokens[self.at][0] == "string" else ""
                self.take("mark", "{")
                entries.append((name, label, self.body(inner=True)))
                self.take("mark", "}")
        assert inner or self.at == len(self.tokens), "a brace too many"
        return entries

    def expression(self):
        value = self.term()
        while self.at < len(self.tokens) and self.tokens[self.at] == ("mark", "+"):
            self.take("mark", "+")
            value = ("+", value, self.term())
        return value

    def term(self):
        kind, text = self.tokens[self.at]
        if kind == "string":
            return self.take("string")[1:-1]
        if (kind, text) == ("mark", "["):
            self.take("mark", "[")
            items = []
            while self.tokens[self.at] != ("mark", "]"):
                items.append(self.expression())
                if self.tokens[self.at] == ("mark", ","):
                    self.take("mark", ",")
            self.take("mark", "]")
            return items
        name = self.take("name")
        if self.at < len(self.tokens) and self.tokens[self.at] == ("mark", "("):
            self.take("mark", "(")
            argument = self.expression()
            self.take("mark", ")")
            return ("call", name, argument)
        return ("reference", name)

    def take(self, kind: str, text: str | None = None) -> str:
        found = self.tokens[self.at]
        assert found[0] == kind and text in (None, found[1]), (found, kind, text)
        self.at += 1
        return found[1]


COMPONENTS = {
    "discovery.file": {"attributes": {"files", "refresh_interval"}, "blocks": {}, "exports": {"targets"}},
    "prometheus.scrape": {
        "attributes": {"targets", "job_name", "scrape_interval", "scrape_timeout", "forward_to"},
        "blocks": {},
        "exports": set(),
    },
    "prometheus.relabel": {
        "attributes": {"forward_to"},
        "blocks": {"rule": {"regex", "action"}},
        "exports": {"receiver"},
    },
    "prometheus.remote_write": {"attributes": set(), "blocks": {"endpoint": {"url"}}, "exports": {"receiver"}},
}
"""What is used of each component, by the names in Alloy's reference."""


def references(value):
    if isinstance(value, list):
        for item in value:
            yield from references(item)
    elif isinstance(value, tuple) and value[0] == "reference":
        yield value[1]


@pytest.fixture(scope="module")
def alloy() -> dict:
    entries = AlloyParser(ALLOY.read_text()).body()
    found = {(name, label): body for name, label, body in entries}
    assert len(found) == len(entries), "two components of one name"
    return found


def test_alloy_has_known_components_and_fields_only(alloy):
    for (name, label), body in alloy.items():
        assert label
        known = COMPONENTS[name]
        attributes = [key for key, block, _ in body if block is None]
        assert len(attributes) == len(set(attributes))
        assert set(attributes) <= known["attributes"]
        for key, block, inner in body:
            if block is not None:
                assert {field for field, _, _ in inner} <= known["blocks"][key]


def test_alloy_references_lead_somewhere(alloy):
    exports = {f"{name}.{label}.{export}" for (name, label) in alloy for export in COMPONENTS[name]["exports"]}
    used = {ref for body in alloy.values() for _, block, value in body if block is None for ref in references(value)}
    assert used == exports


def test_alloy_scrapes_as_prometheus_does(alloy):
    scrape = {key: value for key, _, value in alloy["prometheus.scrape", "training"]}
    found = {key: value for key, _, value in alloy["discovery.file", "training"]}
    (rule,) = [
        dict((k, v) for k, _, v in body)
        for key, block, body in alloy["prometheus.relabel", "training"]
        if block is not None
    ]
    (file,) = found["files"]
    assert file[:2] == ("+", ("call", "sys.env", "TELEMETRY_TARGETS"))
    same_job(
        {
            "job_name": scrape["job_name"],
            "scrape_interval": scrape["scrape_interval"],
            "scrape_timeout": scrape["scrape_timeout"],
            "metric_relabel_configs": [rule],
            "file_sd_configs": [{"files": ["targets" + file[2]], "refresh_interval": found["refresh_interval"]}],
        }
    )


@pytest.mark.parametrize("broken", ['a "b" {', "a = ", "a }", 'a "b" { c = ; }', "a = [1]"])
def test_the_parser_refuses_what_is_no_configuration(broken):
    with pytest.raises((AssertionError, IndexError)):
        AlloyParser(broken).body()
