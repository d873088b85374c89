"""The files of deploy/, offline: valid where there is a schema, and in agreement with one another."""

import json
import re
import runpy
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
KUBERNETES_VERSION = "1.33"


class Strict(yaml.SafeLoader):
    """Refuses a key that is there twice."""


def _mapping(loader, node):
    keys = [key.value for key, _ in node.value]
    assert len(keys) == len(set(keys)), keys
    return loader.construct_mapping(node, deep=True)


Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load(path):
    (document,) = load_all(path)
    return document


def load_all(path):
    return [document for document in yaml.load_all(path.read_text(), Strict) if document is not None]


# -- Kubernetes ----------------------------------------------------------------------------------------------------------

CUSTOM = {"PodMonitor", "PrometheusRule", "PyTorchJob"}
"""Resources without a schema here; pods in them are validated as pods."""

MANIFESTS = [
    (path, index, document)
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for index, document in enumerate(load_all(path))
]


@pytest.mark.parametrize(
    "manifest", [manifest for _, _, manifest in MANIFESTS], ids=[f"{path.stem}-{index}" for path, index, _ in MANIFESTS]
)
def test_kubernetes_manifests_are_valid(manifest):
    assert manifest["metadata"]["name"]
    kind, spec = manifest["kind"], manifest.get("spec")
    if kind not in CUSTOM:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
        return
    for replica in spec.get("pytorchReplicaSpecs", {}).values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"} | replica["template"]["metadata"]}
        kubernetes_validate.validate(pod | {"spec": replica["template"]["spec"]}, KUBERNETES_VERSION, strict=True)


def manifest(kind):
    (found,) = (document for _, _, document in MANIFESTS if document["kind"] == kind)
    return found


@pytest.mark.parametrize(("file", "made_by"), [("prometheusrule", "prometheus_rule"), ("dashboards", "dashboards")])
def test_manifests_have_what_the_files_have(file, made_by):
    made = runpy.run_path(str(DEPLOY / "kubernetes" / "generate.py"))[made_by]()
    assert (DEPLOY / "kubernetes" / f"{file}.yaml").read_text() == made, "run python deploy/kubernetes/generate.py"


def test_config_maps_are_found_by_grafana_and_small_enough():
    for document in load_all(DEPLOY / "kubernetes" / "dashboards.yaml"):
        assert document["metadata"]["labels"] == {"grafana_dashboard": "1"}
        assert document["metadata"]["namespace"] == manifest("PrometheusRule")["metadata"]["namespace"]
        # A ConfigMap may have 1 MiB; its copy in the annotation of `kubectl apply`, quoted once more, a quarter of it.
        assert len(json.dumps(document).encode()) < 250_000


def test_what_is_scraped_on_kubernetes_is_what_the_job_offers():
    monitor, job, policy = (manifest(kind) for kind in ("PodMonitor", "PyTorchJob", "NetworkPolicy"))
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    assert policy["spec"]["podSelector"]["matchLabels"].items() == selected
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        assert replica["template"]["metadata"]["labels"].items() >= selected
        (container,) = replica["template"]["spec"]["containers"]
        (port,) = container["ports"]
        assert port["name"] == monitor["spec"]["podMetricsEndpoints"][0]["port"]
        assert [rule["ports"][0]["port"] for rule in policy["spec"]["ingress"] if "ports" in rule] == [
            port["containerPort"]
        ]


# -- compose and Grafana -------------------------------------------------------------------------------------------------

COMPOSE = load(DEPLOY / "compose" / "compose.yaml")


def test_compose_file_is_valid_and_every_image_has_its_version_in_one_place():
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(COMPOSE, json.loads(schema.read_text()))
    lines = (DEPLOY / "compose" / ".env").read_text().splitlines()
    versions = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    for service in COMPOSE["services"].values():
        name = re.fullmatch(r"[\w./-]+:\$\{(\w+)\}", service["image"])[1]
        assert re.fullmatch(r"v?\d+\.\d+\.\d+(-\w+)?", versions[name])


def test_compose_mounts_what_is_there_and_listens_on_loopback():
    for service in COMPOSE["services"].values():
        assert service["network_mode"] == "host"
        for volume in service["volumes"]:
            source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), source
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"]
        addresses = [value for value in service.get("command", ()) if "listen-address" in value]
        addresses += [service["environment"]["GF_SERVER_HTTP_ADDR"]] if "environment" in service else []
        assert addresses
        assert all(re.search(r"=127\.0\.0\.1:\d+$|^127\.0\.0\.1$|=$", address) for address in addresses)


def test_grafana_is_provisioned_with_the_sources_and_the_dashboards():
    folder = DEPLOY / "compose" / "grafana"
    sources, dashboards = load(folder / "datasources.yml"), load(folder / "dashboards.yml")
    for source in sources["datasources"]:
        assert source["type"] in {"prometheus", "alertmanager"}
        assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+", source["url"])
    (provider,) = dashboards["providers"]
    path = provider["options"]["path"]
    assert any(str(volume).endswith(f":{path}:ro") for volume in COMPOSE["services"]["grafana"]["volumes"])


# -- OpenTelemetry's collector and Grafana Alloy scrape as Prometheus does -------------------------------------------------

COLLECTOR = DEPLOY / "opentelemetry" / "collector.yaml"


def prometheus_job():
    config = load(DEPLOY / "prometheus" / "prometheus.yml")
    (job,) = config["scrape_configs"]
    return {"scrape_interval": config["global"]["scrape_interval"]} | job


def test_the_collector_uses_all_that_is_defined():
    config, text = load(COLLECTOR), COLLECTOR.read_text()
    pipeline = config["service"]["pipelines"]["metrics"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == set(config[kind])
    assert pipeline["processors"][0] == "memory_limiter", "it must come first"
    assert len(re.findall(r"\$", text)) == len(re.findall(r"\$\{env:[A-Z_]+\}", text)), "another $ must be doubled"
    for name in re.findall(r"^[^#]*\$\{env:([A-Z_]+)\}", text, re.MULTILINE):
        assert name in text.partition("receivers:")[0], "it is explained"


def test_the_collector_scrapes_as_prometheus_does(tmp_path):
    receiver = load(COLLECTOR)["receivers"]["prometheus"]["config"]
    files = {"files": ["${env:TELEMETRY_TARGETS}/*.json"]}
    job = prometheus_job()
    assert receiver["scrape_configs"] == [job | {"file_sd_configs": [job["file_sd_configs"][0] | files]}]
    if (promtool := shutil.which("promtool")) is not None:
        text = yaml.safe_dump(receiver).replace("${env:TELEMETRY_TARGETS}", "targets")
        (tmp_path / "prometheus.yml").write_text(text)
        subprocess.run([promtool, "check", "config", "prometheus.yml"], cwd=tmp_path, check=True, timeout=60)


def test_alloy_scrapes_as_prometheus_does():
    text = re.sub(r"//.*", "", (DEPLOY / "alloy" / "config.alloy").read_text())
    found = {}
    for component, label, body in re.findall(r'^([\w.]+) "(\w+)" \{\n(.*?)^\}', text, re.DOTALL | re.MULTILINE):
        found[component] = dict(re.findall(r"(\w+) *= (.+)", body))
        for reference in re.findall(r"\b(?:discovery|prometheus)\.[\w.]+", body):
            assert re.search(r'^{} "{}" \{{'.format(*reference.rsplit(".", 2)[:2]), text, re.MULTILINE), reference
    job = prometheus_job()
    (rule,), (files,) = job["metric_relabel_configs"], job["file_sd_configs"]
    scrape, relabel, discovery = (found[f] for f in ("prometheus.scrape", "prometheus.relabel", "discovery.file"))
    assert [json.loads(scrape[key]) for key in ("job_name", "scrape_interval", "scrape_timeout")] == [
        job[key] for key in ("job_name", "scrape_interval", "scrape_timeout")
    ]
    assert {key: json.loads(relabel[key]) for key in ("regex", "action")} == rule
    assert discovery["files"] == '[sys.env("TELEMETRY_TARGETS") + "/*.json"]'
    assert json.loads(discovery["refresh_interval"]) == files["refresh_interval"]


# -- logs ----------------------------------------------------------------------------------------------------------------


def interpolated(name):
    """As Vector does it: in the text, before the YAML is read, in comments too; what is not set and has no default stops
    it."""
    given = {"RUNS_DIR": "/runs", "POSTGRES_URL": "postgres://127.0.0.1/telemetry"}

    def value(match):
        variable, default = match[1], match[2]
        assert variable in given or (default or "").startswith(":-"), f"{name}: {variable} has to be set"
        return given.get(variable) or default.removeprefix(":-")

    text = (DEPLOY / "vector" / f"{name}.yaml").read_text()
    return yaml.safe_load(re.sub(r"\$\{(\w+)([^}]*)\}", value, text))


@pytest.mark.parametrize("store", ["loki", "clickhouse", "postgresql"])
def test_logs_flow_from_the_files_to_the_store(store):
    base, sink = interpolated("vector"), interpolated(store)
    kinds = {kind: base.get(kind, {}) | sink.get(kind, {}) for kind in ("sources", "transforms", "sinks")}
    components = {name: component for kind in kinds.values() for name, component in kind.items()}

    (name,) = kinds["sinks"]
    for _ in components:  # upstream, to the source
        if "inputs" not in components[name]:
            break
        (name,) = components[name]["inputs"]
    assert name == "telemetry_logs"


def test_the_pattern_of_the_logs_matches_them_and_nothing_else(tmp_path):
    (source,) = interpolated("vector")["sources"].values()
    logs = tmp_path / "a-run" / "logs"
    logs.mkdir(parents=True)
    for name in ("rank-0.42.jsonl", "rank-0.42.jsonl.1", "rank-12.42.jsonl"):
        (logs / name).touch()
    (tmp_path / "a-run" / "report.json").touch()

    found = {path.name for pattern in source["include"] for path in tmp_path.glob(pattern.removeprefix("/runs/"))}
    assert found == {"rank-0.42.jsonl", "rank-0.42.jsonl.1", "rank-12.42.jsonl"}


def test_tables_have_the_fields_that_are_sent():
    (transform,) = interpolated("vector")["transforms"].values()
    sent = re.findall(r'^  "(\w+)": ', transform["source"], re.MULTILINE)
    for store in ("clickhouse", "postgresql"):
        text = (DEPLOY / "vector" / f"{store}.yaml").read_text()
        columns = re.search(r"CREATE TABLE \S+ \(\n(.*?)\n# +\)", text, re.DOTALL)[1]
        assert re.findall(r"(?:^#|,) +(\w+) (?:\w+)", re.sub(r"\([^)]*\)", "", columns), re.MULTILINE) == sent


# -- nothing that should not be there ------------------------------------------------------------------------------------


def test_no_secret_and_no_open_address():
    for path in (path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        text = path.read_text()
        if path.suffix in {".yml", ".yaml"}:
            load_all(path)
        secret = r"(?i)^\s*[\w-]*(password|token|secret|credentials)\s*[:=]\s*[\"']?[^\s\"'/$]"
        assert not re.search(secret, text, re.MULTILINE), path
        for line in text.splitlines():
            if "0.0.0.0" in line and not line.lstrip().startswith("#"):
                assert path.name == "train.sbatch", line  # several nodes, and the header says so
        assert not re.search(r"image: \S+(:latest|/[^:\s]+)$", text, re.MULTILINE), (
            f"{path}: an image without a version"
        )
