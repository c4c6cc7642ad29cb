"""The Helm chart of a run: rendered by Helm, equal to the Kustomize overlays where no value is given, and changed where
one is. No cluster was at hand."""

import copy
import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError

ROOT = Path(__file__).parents[3]
CHART = ROOT / "ops/deploy/helm"
PRESETS = ("small", "gpu")
RUN, COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
Manifest = dict[str, Any]

each_preset = pytest.mark.parametrize("preset", PRESETS)


def rendered(values: Manifest, name: str = "other", namespace: str = "place") -> list[Manifest]:
    with Chart.load(CHART) as chart:
        texts = chart.render(values, name=name, namespace=namespace).values()
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def overlay(preset: str) -> list[Manifest]:
    """Return what the chart has of an overlay; the test below holds it against Kustomize."""
    return list(yaml.safe_load_all((CHART / f"files/{preset}.yaml").read_text()))


def workloads(values: Manifest) -> dict[str, Manifest]:
    found = [each for each in rendered(values) if "template" in each.get("spec", {})]
    return {each["metadata"]["labels"][COMPONENT]: each for each in found}


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which brings kustomize")
@each_preset
def test_the_chart_has_the_overlays_as_kustomize_makes_them(preset: str) -> None:
    command = ["kubectl", "kustomize", ROOT / "ops/deploy/kubernetes/overlays" / preset]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert (CHART / f"files/{preset}.yaml").read_text() == made, "run `make generated`"


@each_preset
def test_without_values_the_chart_is_the_overlay(preset: str) -> None:
    wanted = by_name(overlay(preset))
    ((_, namespace),) = [key for key in wanted if key[0] == "Namespace"]
    run = next(iter(wanted.values()))["metadata"]["labels"][RUN]
    made = by_name(rendered({"preset": preset}, name=run, namespace=namespace))
    del wanted["Namespace", namespace]  # Helm's --create-namespace
    for (kind, _), manifest in made.items():
        if kind == "PersistentVolumeClaim":
            assert manifest["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert made == wanted


@each_preset
def test_a_release_elsewhere_shares_no_name_with_the_overlay(preset: str) -> None:
    run = overlay(preset)[0]["metadata"]["labels"][RUN]
    for manifest in rendered({"preset": preset}):
        assert manifest["metadata"]["namespace"] == "place"
        bare = copy.deepcopy(manifest)
        if bare["kind"] == "ConfigMap":
            del bare["data"]  # the recipe: the pod's label is the name of the run, and wins
        text = yaml.safe_dump(bare)
        assert f"{RUN}: other" in text
        assert not [
            line for line in text.splitlines() if line.endswith(f": {run}") or f": {run}_" in line
        ]


def test_a_value_changes_what_it_names_and_nothing_else() -> None:
    image = f"registry.example:5000/horizonrl@sha256:{'0' * 64}"
    recipe = "[rl]\nsteps = 7\n"
    before = by_name(rendered({"preset": "gpu"}))
    values = {
        "preset": "gpu",
        "image": image,
        "recipe": recipe,
        "actor": {"secret": "my-keys", "replicas": 3, "pod": {"runtimeClassName": "nvidia"}},
        "learner": {"resources": {"limits": {"memory": "96Gi"}}},
        "storage": {"size": "1Ti", "className": "fast"},
        "keda": False,
        "monitoring": False,
    }
    made = workloads(values)
    assert {
        each["spec"]["template"]["spec"]["containers"][0]["image"] for each in made.values()
    } == {image}
    actor, learner = made["actor"]["spec"], made["learner"]["spec"]["template"]["spec"]
    assert (actor["replicas"], actor["template"]["spec"]["runtimeClassName"]) == (3, "nvidia")
    secrets = {
        each["secret"]["secretName"]
        for each in actor["template"]["spec"]["volumes"]
        if "secret" in each
    }
    assert secrets == {"my-keys"}
    assert "horizonrl-actor" not in str(made)
    assert "horizonrl-learner" in str(made)
    assert learner["containers"][0]["resources"]["limits"] == {
        "memory": "96Gi",
        "nvidia.com/gpu": 1,
    }
    (config,) = [each for each in rendered(values) if "recipe.toml" in each.get("data", {})]
    assert config["data"] == {"recipe.toml": recipe}
    assert str(made).count(config["metadata"]["name"]) == len(made), (
        "a changed recipe has another name"
    )
    after = by_name(rendered(values))
    assert {kind for kind, _ in before.keys() - after} == {
        "ConfigMap",
        "ScaledObject",
        "PodMonitor",
    }
    text = yaml.safe_dump_all(after.values())
    assert ("storage: 1Ti" in text, "storageClassName: fast" in text) == (True, True)
    for key in before.keys() & after:
        if key[0] in {"NetworkPolicy", "PodDisruptionBudget", "Service"}:
            assert after[key] == before[key]


@pytest.mark.parametrize(
    "values",
    [
        {"preset": "large"},
        {"replica": 3},
        {"actor": {"replicas": -1}},
        {"learner": {"replicas": 2}},
        {"run": "Not_A_Label"},
        {"actor": {"resources": {"limits": {"memory": "much"}}}},
        {"image": "with space"},
        {"actor": {"pod": {"containers": []}}},
    ],
    ids=json.dumps,
)
def test_a_value_that_means_nothing_is_refused(values: Manifest) -> None:
    with Chart.load(CHART) as chart, pytest.raises(HelmError):
        chart.validate_schema(values)


def test_helms_own_linter_finds_no_error_and_every_value_is_in_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    found = lint(CHART, values)
    assert not found["errors"]
    assert {each["error"] for each in found["messages"]} == {"icon is recommended"}
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (about["version"], about["appVersion"]) == (version, version)
