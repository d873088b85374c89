"""The files of deploy/, offline: each against its schema, and against the others that it has to agree with."""

import json
import re
import runpy
from importlib import resources
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
KUBERNETES_VERSION = "1.33"


def load(path):
    (document,) = load_all(path)
    return document


def load_all(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


# -- Kubernetes ----------------------------------------------------------------------------------------------------------

CUSTOM = {
    "PodMonitor": {
        "properties": {
            "spec": {
                "required": ["selector", "podMetricsEndpoints"],
                "additionalProperties": False,
                "properties": {
                    "namespaceSelector": {"properties": {"any": {"type": "boolean"}}, "additionalProperties": False},
                    "selector": {"required": ["matchLabels"]},
                    "podMetricsEndpoints": {
                        "items": {
                            "required": ["port"],
                            "additionalProperties": False,
                            "properties": {
                                "port": {"type": "string"},
                                "interval": {"pattern": "^[0-9]+s$"},
                                "scrapeTimeout": {"pattern": "^[0-9]+s$"},
                                "relabelings": {"$ref": "#/$defs/relabelings"},
                                "metricRelabelings": {"$ref": "#/$defs/relabelings"},
                            },
                        }
                    },
                },
            }
        },
        "$defs": {
            "relabelings": {
                "items": {
                    "additionalProperties": False,
                    "properties": {
                        "sourceLabels": {"items": {"type": "string"}},
                        "targetLabel": {"type": "string"},
                        "regex": {"type": "string"},
                        "action": {"enum": ["replace", "labeldrop", "keep", "drop"]},
                    },
                }
            }
        },
    },
    "PrometheusRule": {
        "properties": {
            "spec": {
                "required": ["groups"],
                "additionalProperties": False,
                "properties": {"groups": {"items": {"required": ["name", "rules"]}}},
            }
        }
    },
    "PyTorchJob": {
        "properties": {
            "spec": {
                "required": ["pytorchReplicaSpecs"],
                "additionalProperties": False,
                "properties": {
                    "nprocPerNode": {"type": "string"},
                    "runPolicy": {"properties": {"cleanPodPolicy": {"enum": ["All", "Running", "None"]}}},
                    "pytorchReplicaSpecs": {
                        "additionalProperties": False,
                        "properties": {name: {"$ref": "#/$defs/replica"} for name in ("Master", "Worker")},
                    },
                },
            }
        },
        "$defs": {
            "replica": {
                "required": ["replicas", "template"],
                "additionalProperties": False,
                "properties": {
                    "replicas": {"type": "integer"},
                    "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
                    "template": {"required": ["spec"]},
                },
            }
        },
    },
}
"""What is used of the custom resources. Their own definitions are not on PyPI; pods in them are validated as pods."""

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
    schema = CUSTOM.get(manifest["kind"])
    if schema is None:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
        return
    jsonschema.Draft202012Validator(schema).validate(manifest)
    for replica in manifest["spec"].get("pytorchReplicaSpecs", {}).values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"} | replica["template"]["metadata"]}
        kubernetes_validate.validate(pod | {"spec": replica["template"]["spec"]}, KUBERNETES_VERSION, strict=True)


def manifest(kind):
    (found,) = (document for _, _, document in MANIFESTS if document["kind"] == kind)
    return found


def test_prometheus_rule_has_the_rules_of_the_files():
    generate = runpy.run_path(str(DEPLOY / "kubernetes" / "generate.py"))
    text = (DEPLOY / "kubernetes" / "prometheusrule.yaml").read_text()

    assert text == generate["prometheus_rule"](), "run python deploy/kubernetes/generate.py"
    files = [DEPLOY / "prometheus" / f"telemetry.{name}.rules.yml" for name in ("recording", "alerts")]
    groups = [group for path in files for group in load(path)["groups"]]
    assert manifest("PrometheusRule")["spec"]["groups"] == groups


def test_config_maps_have_the_dashboards_of_the_files():
    generate = runpy.run_path(str(DEPLOY / "kubernetes" / "generate.py"))
    text = (DEPLOY / "kubernetes" / "dashboards.yaml").read_text()
    assert text == generate["dashboards"](), "run python deploy/kubernetes/generate.py"

    maps = load_all(DEPLOY / "kubernetes" / "dashboards.yaml")
    files = sorted((DEPLOY.parent / "grafana" / "dashboards").glob("*.json"))
    assert [document["metadata"]["name"] for document in maps] == [f"telemetry-dashboard-{path.stem}" for path in files]
    for document, path in zip(maps, files, strict=True):
        assert document["metadata"]["labels"] == {"grafana_dashboard": "1"}
        assert document["metadata"]["namespace"] == manifest("PrometheusRule")["metadata"]["namespace"]
        (content,) = document["data"].values()
        assert json.loads(content) == json.loads(path.read_text())
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


def test_compose_file_is_valid():
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(COMPOSE, json.loads(schema.read_text()))


def test_every_image_has_its_version_in_one_place():
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
            if source == "../../grafana/dashboards":
                assert list((DEPLOY / "compose" / source).glob("*.json"))
            elif source.startswith("."):
                assert (DEPLOY / "compose" / source).is_file(), source
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"]
        addresses = [value for value in service.get("command", ()) if "listen-address" in value]
        addresses += [service["environment"]["GF_SERVER_HTTP_ADDR"]] if "environment" in service else []
        assert addresses
        assert all(re.search(r"=127\.0\.0\.1:\d+$|^127\.0\.0\.1$|=$", address) for address in addresses)


def test_grafana_provisioning_is_valid():
    folder = DEPLOY / "compose" / "grafana"
    source = {
        "required": ["name", "uid", "type", "access", "url"],
        "additionalProperties": False,
        "properties": {
            "name": {"type": "string"},
            "uid": {"pattern": "^[a-z-]{1,40}$"},
            "type": {"enum": ["prometheus", "alertmanager"]},
            "access": {"const": "proxy"},
            "url": {"pattern": "^http://127\\.0\\.0\\.1:[0-9]+$"},
            "isDefault": {"type": "boolean"},
            "editable": {"type": "boolean"},
            "jsonData": {"type": "object"},
        },
    }
    provider = {
        "required": ["name", "type", "options"],
        "additionalProperties": False,
        "properties": {
            "name": {"type": "string"},
            "folder": {"type": "string"},
            "type": {"const": "file"},
            "disableDeletion": {"type": "boolean"},
            "allowUiUpdates": {"type": "boolean"},
            "updateIntervalSeconds": {"type": "integer"},
            "options": {"required": ["path"], "additionalProperties": False, "properties": {"path": {}}},
        },
    }
    for name, key, item in (("datasources.yml", "datasources", source), ("dashboards.yml", "providers", provider)):
        schema = {
            "required": ["apiVersion", key],
            "additionalProperties": False,
            "properties": {"apiVersion": {"const": 1}, key: {"type": "array", "minItems": 1, "items": item}},
        }
        jsonschema.validate(load(folder / name), schema)

    (path,) = (provider["options"]["path"] for provider in load(folder / "dashboards.yml")["providers"])
    assert any(str(volume).endswith(f":{path}:ro") for volume in COMPOSE["services"]["grafana"]["volumes"])


# -- logs ----------------------------------------------------------------------------------------------------------------

STORES = ("loki", "clickhouse", "postgresql")

VECTOR_OPTIONS = {
    "file": {
        "include", "read_from", "max_line_bytes", "fingerprint", "ignore_older_secs",
    },
    "remap": {"source", "drop_on_error"},
    "loki": {"endpoint", "encoding", "labels", "out_of_order_action"},
    "clickhouse": {"endpoint", "database", "table", "date_time_best_effort", "batch"},
    "postgres": {"endpoint", "table", "batch"},
}  # fmt: skip
"""Of each type of component, what Vector's reference has and is used here. Vector itself is in no package registry."""


def interpolated(path):
    """As Vector does it: in the text, before the YAML is read, in comments too; what is not set and has no default stops
    it."""
    given = {"RUNS_DIR": "/runs", "POSTGRES_URL": "postgres://127.0.0.1/telemetry"}

    def value(match):
        name, default = match[1], match[2]
        assert name in given or (default or "").startswith(":-"), f"{path.name}: {name} has to be set"
        return given.get(name) or default.removeprefix(":-")

    return yaml.safe_load(re.sub(r"\$\{(\w+)([^}]*)\}", value, path.read_text()))


@pytest.mark.parametrize("store", STORES)
def test_logs_flow_from_the_files_to_the_store(store):
    base, sink = interpolated(DEPLOY / "vector" / "vector.yaml"), interpolated(DEPLOY / "vector" / f"{store}.yaml")
    kinds = {kind: base.get(kind, {}) | sink.get(kind, {}) for kind in ("sources", "transforms", "sinks")}
    components = {name: component for kind in kinds.values() for name, component in kind.items()}

    for name, component in components.items():
        extra = component.keys() - VECTOR_OPTIONS[component["type"]] - {"type", "inputs"}
        assert not extra, f"{name}: {extra}"
    (name,) = kinds["sinks"]
    for _ in components:  # upstream, to the source
        if "inputs" not in components[name]:
            break
        (name,) = components[name]["inputs"]
    assert name == "telemetry_logs"


def test_the_pattern_of_the_logs_matches_them_and_nothing_else(tmp_path):
    (source,) = interpolated(DEPLOY / "vector" / "vector.yaml")["sources"].values()
    logs = tmp_path / "a-run" / "logs"
    logs.mkdir(parents=True)
    for name in ("rank-0.42.jsonl", "rank-0.42.jsonl.1", "rank-12.42.jsonl"):
        (logs / name).touch()
    (tmp_path / "a-run" / "report.json").touch()

    found = {path.name for pattern in source["include"] for path in tmp_path.glob(pattern.removeprefix("/runs/"))}
    assert found == {"rank-0.42.jsonl", "rank-0.42.jsonl.1", "rank-12.42.jsonl"}


def test_tables_have_the_fields_that_are_sent():
    (transform,) = interpolated(DEPLOY / "vector" / "vector.yaml")["transforms"].values()
    sent = re.findall(r'^  "(\w+)": ', transform["source"], re.MULTILINE)
    for store in ("clickhouse", "postgresql"):
        text = (DEPLOY / "vector" / f"{store}.yaml").read_text()
        columns = re.search(r"CREATE TABLE \S+ \(\n(.*?)\n# +\)", text, re.DOTALL)[1]
        assert re.findall(r"(?:^#|,) +(\w+) (?:\w+)", re.sub(r"\([^)]*\)", "", columns), re.MULTILINE) == sent


# -- nothing that should not be there ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [p for p in sorted(DEPLOY.rglob("*")) if p.is_file() and p.suffix != ".pyc"],
                         ids=lambda path: str(path.relative_to(DEPLOY)))  # fmt: skip
def test_no_secret_and_no_open_address(path):
    text = path.read_text()
    if path.suffix in {".yml", ".yaml"}:
        load_all(path)
    assert not re.search(
        r"(?i)^\s*[\w-]*(password|token|secret|credentials)\s*[:=]\s*[\"']?[^\s\"'/$]", text, re.MULTILINE
    )
    for line in text.splitlines():
        if "0.0.0.0" in line and not line.lstrip().startswith("#"):
            assert path.name == "train.sbatch", line  # several nodes, and the header says so
    assert not re.search(r"image: \S+(:latest|/[^:\s]+)$", text, re.MULTILINE), "an image without a version"
