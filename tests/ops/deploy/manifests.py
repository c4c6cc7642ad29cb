"""The manifests as `kubectl kustomize` renders them, and what a role's pod finds in them."""

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "ops/deploy/kubernetes"
VALUES = yaml.safe_load((KUBERNETES / "nats/values.yaml").read_text())
OVERLAYS = [path.name for path in sorted((KUBERNETES / "overlays").iterdir())]
PREFIX = {"beside": "other-"}
"""What an overlay puts before its names."""
ROLES = ("controller", "learner", "actor")
COMPONENT, INSTANCE = "app.kubernetes.io/component", "app.kubernetes.io/instance"
RELEASE = "1.32"
Manifest = dict[str, Any]

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl, which brings kustomize"
)
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
each_role = pytest.mark.parametrize("role", ROLES)


@cache
def rendered(folder: str) -> list[Manifest]:
    """Return what a folder of ours, or one of a test's own, gives."""
    done = subprocess.run(
        ["kubectl", "kustomize", KUBERNETES / folder], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def one(overlay: str, kind: str, name: str | None = None) -> Manifest:
    found = [each for each in rendered(f"overlays/{overlay}") if each["kind"] == kind]
    if name is not None:
        names = (name, PREFIX.get(overlay, "") + name)
        found = [each for each in found if each["metadata"]["name"] in names]
    assert len(found) == 1, f"{len(found)} of {kind} {name} in {overlay}"
    return found[0]


def workload(overlay: str, role: str) -> Manifest:
    return one(overlay, "StatefulSet" if role == "actor" else "Job", role)


def pod_of(overlay: str, role: str) -> Manifest:
    pod: Manifest = workload(overlay, role)["spec"]["template"]
    return pod


def container_of(overlay: str, role: str) -> Manifest:
    (container,) = pod_of(overlay, role)["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def volumes(overlay: str, role: str) -> dict[str, Manifest]:
    """Return what stands at each place of a role's file system."""
    named = {volume["name"]: volume for volume in pod_of(overlay, role)["spec"]["volumes"]}
    return {
        mount["mountPath"]: named[mount["name"]]
        for mount in container_of(overlay, role)["volumeMounts"]
    }


def run_volume(overlay: str, root: str) -> Manifest:
    """Return the claim of the volume that the learner has at `root`."""
    claim = volumes(overlay, "learner")[root]["persistentVolumeClaim"]["claimName"]
    spec: Manifest = one(overlay, "PersistentVolumeClaim", claim)["spec"]
    return spec


def sources(overlay: str, role: str) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Return the texts of the ConfigMaps of a role's configuration, and the files of its secrets, by their paths."""
    texts: dict[str, str] = {}
    secrets: dict[str, set[str]] = {}
    for source in volumes(overlay, role)["/etc/horizonrl"]["projected"]["sources"]:
        if "configMap" in source:
            texts |= one(overlay, "ConfigMap", source["configMap"]["name"])["data"]
        else:
            secrets[source["secret"]["name"]] = {item["path"] for item in source["secret"]["items"]}
            assert all(item["path"] == f"keys/{item['key']}" for item in source["secret"]["items"])
    return texts, secrets


def assert_taken(manifest: Manifest) -> None:
    """Fail unless the API that a manifest is applied to takes all of it."""
    kind = manifest["kind"]
    # Not above: these take seconds to import.
    if kind == "ScaledObject":
        from cloudcoil.models.keda import v1alpha1 as api
    elif kind in ("PodMonitor", "PrometheusRule"):
        from cloudcoil.models.prometheus_operator import v1 as api
    else:
        assert kubernetes_validate.validate(manifest, RELEASE, strict=True) == RELEASE
        return
    # A key that the model does not know is missing from what it gives back.
    read = getattr(api, kind).model_validate(manifest)
    assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == manifest
