"""The manifests: rendered by the real `kubectl kustomize`, checked against the schemas of what they are applied to, and
held against the code. No cluster was at hand: what one would do with them is not tested."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from horizonrl.broker.api import Role
from horizonrl.broker.nats.connect import CONNECT_S, STREAMS_WAIT_S
from horizonrl.broker.nats.key_folder import KeyFolder
from horizonrl.common.errors import ConfigError
from horizonrl.common.service import LOCKED_LIMITS, REPORT_S, Service
from horizonrl.learner.disk import disk_need
from horizonrl.ops.launch.roles import SHARED_MEMORY, stop_within_s
from tests.ops.deploy.manifests import (
    COMPONENT,
    INSTANCE,
    KUBERNETES,
    OVERLAYS,
    PREFIX,
    RELEASE,
    ROOT,
    assert_taken,
    container_of,
    each_overlay,
    each_role,
    needs_kubectl,
    one,
    pod_of,
    rendered,
    run_volume,
    sources,
    volumes,
    workload,
)

pytestmark = needs_kubectl


@pytest.mark.parametrize("folder", [*(f"overlays/{name}" for name in OVERLAYS), "nats", "models"])
def test_every_manifest_is_what_its_api_takes(folder: str) -> None:
    for manifest in rendered(folder):
        assert_taken(manifest)


@pytest.mark.parametrize("overlay", ["small", "gpu"])
def test_a_pod_of_its_own_reads_the_volumes_of_the_learner(overlay: str) -> None:
    text = (KUBERNETES / "reader.yaml").read_text()
    if overlay == "gpu":  # as the file's head says
        text = text.replace("# - {name: models", "- {name: models")
    reader = yaml.safe_load(text)
    kubernetes_validate.validate(reader, RELEASE, strict=True)
    named = {volume["name"]: volume for volume in reader["spec"]["volumes"]}
    (container,) = reader["spec"]["containers"]
    mounted = {each["mountPath"]: named[each["name"]] for each in container["volumeMounts"]}
    learner = volumes(overlay, "learner")
    claimed = {place for place, volume in learner.items() if "persistentVolumeClaim" in volume}
    assert {place: mounted.get(place) for place in claimed} == {
        place: learner[place] for place in claimed
    }
    assert set(container["resources"]["requests"]) == {"cpu", "memory", "ephemeral-storage"}, (
        "a quota counts them"
    )


@each_overlay
@each_role
def test_a_role_understands_its_command_and_finds_the_files_that_it_names(
    overlay: str, role: str, config_of: Any
) -> None:
    config, mounted = config_of(overlay, role), volumes(overlay, role)
    assert config.run.name == one(overlay, "Service")["metadata"]["labels"][INSTANCE]
    assert config.broker.url.startswith("tls://")
    files = {config.broker.nats.ca_file, config.broker.nats.nkey_seed, config.broker.ticket_key} - {
        None
    }
    _, secrets = sources(overlay, role)
    own_key = {Path(place) for place, volume in mounted.items() if "secret" in volume}
    secret = f"{PREFIX.get(overlay, '')}horizonrl-{role}"
    assert {Path("/etc/horizonrl") / path for path in secrets[secret]} | own_key == files
    assert (config.broker.ticket_key is None) == (role == "actor"), "an actor cannot sign tickets"
    assert set(secrets) == {secret}, "no other role's keys"
    assert role == "controller" or str(config.run.root) in mounted
    if role != "controller" and config.model.name.startswith("/"):
        assert mounted[str(Path(config.model.name).parent)]["persistentVolumeClaim"]["readOnly"]
    assert config.metrics.host == "0.0.0.0"
    assert container_of(overlay, role)["ports"] == [
        {"name": "metrics", "containerPort": config.metrics.port}
    ]


@each_overlay
@each_role
def test_the_grace_of_a_pod_outlasts_the_roles_own_deadline(
    overlay: str, role: str, config_of: Any
) -> None:
    grace_s = pod_of(overlay, role)["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > stop_within_s(role, config_of(overlay, role)) + REPORT_S


@each_overlay
@each_role
def test_probes_leave_a_role_the_time_that_it_gives_itself(overlay: str, role: str) -> None:
    container = container_of(overlay, role)
    window_s = {
        name: container[name]["periodSeconds"] * container[name].get("failureThreshold", 3)
        for name in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    stall_limit_s = Service().stall_limit_s
    assert stall_limit_s + REPORT_S < window_s["livenessProbe"] < stall_limit_s * LOCKED_LIMITS
    patience_s = CONNECT_S + (0 if role == "controller" else STREAMS_WAIT_S)
    assert window_s["startupProbe"] > patience_s + (60 if role == "controller" else 600), (
        "and the model, the engine"
    )
    assert container["startupProbe"]["httpGet"] == container["livenessProbe"]["httpGet"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}


@each_overlay
@pytest.mark.parametrize("role", ["controller", "learner"])
def test_a_role_ends_with_its_run_and_is_started_again_until_then(overlay: str, role: str) -> None:
    job, pod = workload(overlay, role)["spec"], pod_of(overlay, role)["spec"]
    assert pod["restartPolicy"] == "Never", "an exit code counts for a Job only then"
    (fail, ignore) = job["podFailurePolicy"]["rules"]
    assert (fail["action"], fail["onExitCodes"]) == (
        "FailJob",
        {
            "containerName": container_of(overlay, role)["name"],
            "operator": "In",
            "values": [ConfigError.exit_code],
        },
    )
    assert ignore == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert job["backoffLimit"] > 7 * 24 * 60, "a week of kills, one a minute, does not end it"
    assert "activeDeadlineSeconds" not in job and "ttlSecondsAfterFinished" not in job


@each_overlay
def test_there_is_one_learner_on_a_volume_that_stays(overlay: str, config_of: Any) -> None:
    learner = workload(overlay, "learner")["spec"]
    assert {learner.get("parallelism", 1), learner.get("completions", 1)} == {1}
    assert learner["podReplacementPolicy"] == "Failed", (
        "otherwise another pod starts while one still writes"
    )
    claim = run_volume(overlay, str(config_of(overlay, "learner").run.root))
    assert claim["accessModes"] == ["ReadWriteOncePod"]
    service, pod = one(overlay, "Service"), pod_of(overlay, "learner")
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


@each_overlay
def test_actors_are_numbered_and_leave_their_number_to_who_scales_them(overlay: str) -> None:
    actor = workload(overlay, "actor")["spec"]
    assert "replicas" not in actor, "it would undo what KEDA or kubectl scale has set"
    assert actor["podManagementPolicy"] == "Parallel", (
        "one that does not start would keep all after it from starting"
    )
    assert "volumeClaimTemplates" not in actor, "they cannot be changed, not even their labels"


@pytest.mark.parametrize(
    ("overlay", "parameters"),
    [("small", 134_515_008), ("beside", 134_515_008), ("nodes", 134_515_008), ("gpu", 2e9)],
)
def test_the_learners_volume_holds_what_its_run_writes(
    overlay: str, parameters: float, config_of: Any
) -> None:
    config = config_of(overlay, "learner")
    size = run_volume(overlay, str(config.run.root))["resources"]["requests"]["storage"]
    held = int(size.removesuffix("Gi")) << 30
    # File systems keep some for themselves; ledger, metrics and logs need little.
    assert held * 0.9 > disk_need(config, parameters, parameters).total


@each_overlay
def test_a_pod_of_an_actor_sees_the_key_of_its_number_alone(overlay: str) -> None:
    container, keys = container_of(overlay, "actor"), KeyFolder(Path("keys"))
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "keys"]
    index = "metadata.labels['apps.kubernetes.io/pod-index']"  # the pod's name has the run's prefix
    assert {"name": "POD_INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}} in container[
        "env"
    ]
    for number in (0, 11):
        file = mount["subPathExpr"].replace("$(POD_INDEX)", str(number))
        assert file == keys.seed("laptop", Role.ACTOR, number).name
    secret = volumes(overlay, "actor")[mount["mountPath"]]["secret"]["secretName"]
    assert secret == f"{PREFIX.get(overlay, '')}horizonrl-actor"


@each_overlay
def test_only_actors_have_a_disruption_budget_and_it_never_forbids_an_eviction(
    overlay: str,
) -> None:
    budget = one(overlay, "PodDisruptionBudget")["spec"]
    assert (
        budget["selector"]["matchLabels"].items()
        <= pod_of(overlay, "actor")["metadata"]["labels"].items()
    )
    assert budget["selector"]["matchLabels"][COMPONENT] == "actor"
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (
        "50%",
        "AlwaysAllow",
    )


@each_overlay
def test_a_learner_is_not_moved_to_save_a_node(overlay: str) -> None:
    annotations = pod_of(overlay, "learner")["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"
    assert "annotations" not in pod_of(overlay, "actor")["metadata"], "actors may go at any time"


@each_overlay
@each_role
def test_a_pod_asks_for_the_disk_of_its_node(overlay: str, role: str) -> None:
    requested = _gib(container_of(overlay, role)["resources"]["requests"]["ephemeral-storage"])
    on_disk = [each["emptyDir"] for each in volumes(overlay, role).values() if "emptyDir" in each]
    assert all("sizeLimit" in each for each in on_disk)
    assert 0 < requested <= sum(_gib(each["sizeLimit"]) for each in on_disk if "medium" not in each)


def _gib(quantity: str) -> float:
    return float(quantity[:-2]) / {"Gi": 1, "Mi": 1024}[quantity[-2:]]


@each_overlay
@each_role
def test_a_pod_may_do_nothing_that_it_need_not(overlay: str, role: str) -> None:
    spec, container = pod_of(overlay, role)["spec"], container_of(overlay, role)
    user = re.findall(
        r"^USER (\d+):\d+$", (ROOT / "ops/deploy/docker/Dockerfile").read_text(), re.MULTILINE
    )
    security = spec["securityContext"]
    assert {str(security["runAsUser"])} == set(user)
    assert security["runAsNonRoot"] and security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert spec["automountServiceAccountToken"] is False
    assert spec["shareProcessNamespace"], "as process 1 a role that starts would not hear SIGTERM"
    assert {"/home/horizonrl", "/tmp"} <= set(volumes(overlay, role)), (
        "the root file system cannot be written"
    )
    if role != "controller":
        assert volumes(overlay, role)[str(SHARED_MEMORY)]["emptyDir"]["medium"] == "Memory"


def test_the_small_overlay_is_the_laptops_run() -> None:
    """kustomize reads nothing outside its folder, so that the recipe stands there a second time."""
    ours = (KUBERNETES / "overlays/small/recipe.toml").read_text()
    assert ours == (ROOT / "ops/recipes/laptop.toml").read_text(), "copy the recipe"
