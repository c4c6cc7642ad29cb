"""What the Prometheus operator and Grafana's sidecar read: rendered by `kubectl kustomize`, validated, and held against
the rules, the dashboards and the claims of the overlays. No cluster was at hand."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from horizonrl.ops.deploy import rules
from horizonrl.ops.deploy.grafana.dashboards import DASHBOARDS, files
from tests.ops.deploy.manifests import assert_taken

KUBERNETES = Path(__file__).parents[3] / "ops/deploy/kubernetes"
OVERLAYS = [path.name for path in sorted((KUBERNETES / "overlays").iterdir())]
VALUES = yaml.safe_load((KUBERNETES / "nats/values.yaml").read_text())
Manifest = dict[str, Any]
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl, which brings kustomize"
)


@cache
def rendered(folder: Path) -> list[Manifest]:
    done = subprocess.run(
        ["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(kind: str, folder: Path = KUBERNETES / "monitoring") -> list[Manifest]:
    return [each for each in rendered(folder) if each["kind"] == kind]


def test_the_operators_rules_are_current() -> None:
    assert rules.MANIFEST.read_text() == rules.manifest(), "run `make generated`"


@needs_kubectl
def test_every_manifest_of_the_monitoring_is_what_its_api_takes() -> None:
    kinds = {each["kind"] for each in rendered(KUBERNETES / "monitoring")}
    assert kinds == {"PodMonitor", "PrometheusRule", "ConfigMap"}
    for manifest in rendered(KUBERNETES / "monitoring"):
        assert manifest["metadata"]["namespace"] == "monitoring"
        assert_taken(manifest)


@needs_kubectl
def test_the_operator_reads_all_rules_and_the_sidecar_all_dashboards() -> None:
    (rule,) = of_kind("PrometheusRule")
    assert rule["spec"] == yaml.safe_load(rules.RULES.read_text())
    maps = of_kind("ConfigMap")
    assert len(maps) == len(DASHBOARDS)
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in maps)
    texts = {name: text for each in maps for name, text in each["data"].items()}
    assert texts == {path.name: text for path, text in files().items()}
    assert len({json.loads(text)["uid"] for text in texts.values()}) == len(DASHBOARDS)
    # `kubectl apply` keeps a copy in an annotation, and annotations have 256 KiB together.
    assert max(map(len, texts.values())) < 200_000


@needs_kubectl
def test_one_patch_names_the_release_for_all_that_the_operator_selects(tmp_path: Path) -> None:
    deploy = tmp_path / "deploy"
    shutil.copytree(KUBERNETES.parent, deploy)
    patch = deploy / "kubernetes/components/release/kustomization.yaml"
    patch.write_text(patch.read_text().replace("value: kube-prometheus-stack", "value: mine"))
    folders = [deploy / "kubernetes" / name for name in ("monitoring", "overlays/gpu")]
    selected = [
        each
        for folder in folders
        for each in rendered(folder)
        if each["apiVersion"].startswith("monitoring.coreos.com")
    ]
    assert sorted(each["kind"] for each in selected) == [
        "PodMonitor",
        "PodMonitor",
        "PrometheusRule",
    ]
    assert {each["metadata"]["labels"]["release"] for each in selected} == {"mine"}


@needs_kubectl
def test_the_brokers_exporter_is_found_where_the_chart_puts_it_and_the_policy_opens_it() -> None:
    (monitor,) = of_kind("PodMonitor")
    (namespace,) = [each for each in rendered(KUBERNETES / "nats") if each["kind"] == "Namespace"]
    (policy,) = of_kind("NetworkPolicy", KUBERNETES / "nats")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": [namespace["metadata"]["name"]]}
    assert monitor["spec"]["selector"] == policy["spec"]["podSelector"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    # The name that NATS' chart gives to the port of the exporter (files/stateful-set/prom-exporter-container.yaml).
    assert endpoint["port"] == "prom-metrics"
    exporter = VALUES["promExporter"]
    assert exporter["enabled"]
    opened = [
        rule
        for rule in policy["spec"]["ingress"]
        if exporter["port"] in (port["port"] for port in rule["ports"])
    ]
    names = [each["namespaceSelector"]["matchLabels"] for rule in opened for each in rule["from"]]
    assert {"kubernetes.io/metadata.name": monitor["metadata"]["namespace"]} in names


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_alert_on_volumes_watches_the_learners_claim_and_the_brokers(overlay: str) -> None:
    (alert,) = [each for each in alerts() if each["alert"] == "HorizonRLVolumeFilling"]
    # One: the same claims above and below the line.
    (pattern,) = set(re.findall(r'persistentvolumeclaim=~"([^"]+)"', alert["expr"]))
    for claim in ("nats-js-nats-0", *learner_claims(overlay)):
        assert re.fullmatch(pattern, claim), claim


def alerts() -> Iterator[dict[str, Any]]:
    groups = yaml.safe_load(rules.RULES.read_text())["groups"]
    return (rule for group in groups for rule in group["rules"] if "alert" in rule)


def learner_claims(overlay: str) -> list[str]:
    """Return the names of the claims that the learner writes to: of its own template, or by name."""
    found = []
    for each in rendered(KUBERNETES / "overlays" / overlay):
        spec = each.get("spec", {})
        if (
            each["metadata"].get("labels", {}).get("app.kubernetes.io/component") != "learner"
            or "template" not in spec
        ):
            continue
        templates = spec.get("volumeClaimTemplates", ())
        found += [
            f"{claim['metadata']['name']}-{each['metadata']['name']}-0" for claim in templates
        ]
        volumes = spec["template"]["spec"].get("volumes", ())
        claims = [
            volume["persistentVolumeClaim"]
            for volume in volumes
            if "persistentVolumeClaim" in volume
        ]
        found += [claim["claimName"] for claim in claims if not claim.get("readOnly")]
    assert found, "the learner has a volume"
    return found
