"""The manifests: rendered by the real `kubectl kustomize`, checked against the schemas of what they are applied to, and
held against the code. No cluster was at hand: what one would do with them is not tested."""

import itertools
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor

from horizonrl.broker.api import Role, Stream
from horizonrl.broker.nats.access import account
from horizonrl.broker.nats.connect import STREAMS_WAIT_S
from horizonrl.broker.nats.key_folder import KeyFolder
from horizonrl.broker.nats.keys import make_keys
from horizonrl.broker.nats.streams import ACTORS, stream_name
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.service import LOCKED_LIMITS, REPORT_S, Service
from horizonrl.common.types import Phase
from horizonrl.learner.records.disk import disk_need
from horizonrl.ops.cli.parser import parse
from horizonrl.ops.run.roles import SHARED_MEMORY, stop_within_s

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "ops/deploy/kubernetes"
VALUES = yaml.safe_load((KUBERNETES / "nats/values.yaml").read_text())
OVERLAYS = [path.name for path in sorted((KUBERNETES / "overlays").iterdir())]
ROLES = ("controller", "learner", "actor")
COMPONENT, INSTANCE = "app.kubernetes.io/component", "app.kubernetes.io/instance"
RELEASE = "1.32"
OPERATORS = {"ScaledObject": ScaledObject, "PodMonitor": PodMonitor}
Manifest = dict[str, Any]

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which brings kustomize")
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
each_role = pytest.mark.parametrize("role", ROLES)


@cache
def rendered(folder: str) -> list[Manifest]:
    done = subprocess.run(["kubectl", "kustomize", KUBERNETES / folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def one(overlay: str, kind: str, name: str | None = None) -> Manifest:
    found = [
        each
        for each in rendered(f"overlays/{overlay}")
        if each["kind"] == kind and name in (None, each["metadata"]["name"])
    ]
    assert len(found) == 1, f"{len(found)} of {kind} {name} in {overlay}"
    return found[0]


def workload(overlay: str, role: str) -> Manifest:
    return one(overlay, "Deployment" if role == "controller" else "StatefulSet", role)


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
    claims = workload(overlay, role)["spec"].get("volumeClaimTemplates", ())
    named |= {claim["metadata"]["name"]: {"claim": claim["spec"]} for claim in claims}
    return {mount["mountPath"]: named[mount["name"]] for mount in container_of(overlay, role)["volumeMounts"]}


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


@pytest.fixture
def config_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes a role's config as its pod would: from its command, its files and its environment."""

    def load(overlay: str, role: str) -> RunConfig:
        container = container_of(overlay, role)
        (run_name,) = [variable for variable in container["env"] if variable["name"].startswith("HORIZONRL_")]
        assert run_name["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{INSTANCE}']"
        monkeypatch.setenv(run_name["name"], pod_of(overlay, role)["metadata"]["labels"][INSTANCE])
        arguments, overrides = parse(container["command"][1:])
        assert (container["command"][0], arguments.command) == ("horizonrl", role)
        texts, _ = sources(overlay, role)
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        return RunConfig.load(
            [tmp_path / recipe.relative_to("/etc/horizonrl") for recipe in arguments.recipes], overrides
        )

    return load


@pytest.mark.parametrize("folder", [*(f"overlays/{name}" for name in OVERLAYS), "nats"])
def test_every_manifest_is_what_its_api_takes(folder: str) -> None:
    for manifest in rendered(folder):
        model = OPERATORS.get(manifest["kind"])
        if model is None:
            assert kubernetes_validate.validate(manifest, RELEASE, strict=True) == RELEASE
        else:  # these ignore a key that they do not know: it is missing from what they give back
            read = model.model_validate(manifest)
            assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == manifest


def test_a_pod_of_its_own_reads_the_volume_of_the_learner() -> None:
    reader = yaml.safe_load((KUBERNETES / "reader.yaml").read_text())
    kubernetes_validate.validate(reader, RELEASE, strict=True)
    (claim,) = [each["persistentVolumeClaim"] for each in reader["spec"]["volumes"] if "persistentVolumeClaim" in each]
    (template,) = workload("small", "learner")["spec"]["volumeClaimTemplates"]
    assert claim["claimName"] == f"{template['metadata']['name']}-learner-0"


@each_overlay
@each_role
def test_a_role_understands_its_command_and_finds_the_files_that_it_names(
    overlay: str, role: str, config_of: Any
) -> None:
    config, mounted = config_of(overlay, role), volumes(overlay, role)
    assert config.run.name == one(overlay, "Namespace")["metadata"]["labels"][INSTANCE]
    assert config.broker.url.startswith("tls://")
    files = {config.broker.nats.ca_file, config.broker.nats.nkey_seed, config.broker.ticket_key} - {None}
    _, secrets = sources(overlay, role)
    own_key = {Path(place) for place, volume in mounted.items() if "secret" in volume}
    assert {Path("/etc/horizonrl") / path for path in secrets[f"horizonrl-{role}"]} | own_key == files
    assert (config.broker.ticket_key is None) == (role == "actor"), "an actor cannot sign tickets"
    assert set(secrets) == {f"horizonrl-{role}"}, "no other role's keys"
    assert role == "controller" or str(config.run.root) in mounted
    if role != "controller" and config.model.name.startswith("/"):
        assert mounted[str(Path(config.model.name).parent)]["persistentVolumeClaim"]["readOnly"]
    assert config.metrics.host == "0.0.0.0"
    assert container_of(overlay, role)["ports"] == [{"name": "metrics", "containerPort": config.metrics.port}]


@each_overlay
@each_role
def test_the_grace_of_a_pod_outlasts_the_roles_own_deadline(overlay: str, role: str, config_of: Any) -> None:
    grace_s = pod_of(overlay, role)["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > stop_within_s(role, config_of(overlay, role)) + REPORT_S


@each_overlay
@each_role
def test_probes_leave_a_role_the_time_that_it_gives_itself(overlay: str, role: str, config_of: Any) -> None:
    container, config = container_of(overlay, role), config_of(overlay, role)
    window_s = {
        name: container[name]["periodSeconds"] * container[name].get("failureThreshold", 3)
        for name in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    stall_limit_s = Service().stall_limit_s
    assert stall_limit_s + REPORT_S < window_s["livenessProbe"] < stall_limit_s * LOCKED_LIMITS
    patience_s = config.broker.connect_timeout_s + (0 if role == "controller" else STREAMS_WAIT_S)
    assert window_s["startupProbe"] > patience_s + (60 if role == "controller" else 600), "and the model, the engine"
    assert container["startupProbe"]["httpGet"] == container["livenessProbe"]["httpGet"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}


@each_overlay
def test_there_is_one_learner_on_a_volume_that_stays(overlay: str, config_of: Any) -> None:
    learner = workload(overlay, "learner")["spec"]
    assert learner["replicas"] == 1
    assert learner["serviceName"] == one(overlay, "Service")["metadata"]["name"]
    root = str(config_of(overlay, "learner").run.root)
    assert volumes(overlay, "learner")[root]["claim"]["accessModes"] == ["ReadWriteOnce"]
    assert workload(overlay, "controller")["spec"]["strategy"] == {"type": "Recreate"}
    assert "replicas" not in workload(overlay, "actor")["spec"], "it would undo what KEDA or kubectl scale has set"


@pytest.mark.parametrize(("overlay", "parameters"), [("small", 134_515_008), ("nodes", 134_515_008), ("gpu", 2e9)])
def test_the_learners_volume_holds_what_its_run_writes(overlay: str, parameters: float, config_of: Any) -> None:
    config = config_of(overlay, "learner")
    size = volumes(overlay, "learner")[str(config.run.root)]["claim"]["resources"]["requests"]["storage"]
    held = int(size.removesuffix("Gi")) << 30
    # File systems keep some for themselves; ledger, metrics and logs need little.
    assert held * 0.9 > disk_need(config, parameters, parameters).total


@each_overlay
def test_a_pod_of_an_actor_sees_the_key_of_its_number_alone(overlay: str) -> None:
    container, keys = container_of(overlay, "actor"), KeyFolder(Path("keys"))
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "keys"]
    assert {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}} in container["env"]
    for number in (0, 11):
        pod = f"{workload(overlay, 'actor')['metadata']['name']}-{number}"
        assert mount["subPathExpr"].replace("$(POD_NAME)", pod) == keys.seed("laptop", Role.ACTOR, number).name
    assert volumes(overlay, "actor")[mount["mountPath"]]["secret"]["secretName"] == "horizonrl-actor"


@each_overlay
def test_only_actors_have_a_disruption_budget_and_it_never_forbids_an_eviction(overlay: str) -> None:
    budget = one(overlay, "PodDisruptionBudget")["spec"]
    assert budget["selector"]["matchLabels"].items() <= pod_of(overlay, "actor")["metadata"]["labels"].items()
    assert budget["selector"]["matchLabels"][COMPONENT] == "actor"
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == ("50%", "AlwaysAllow")


@each_overlay
@each_role
def test_a_pod_may_do_nothing_that_it_need_not(overlay: str, role: str) -> None:
    spec, container = pod_of(overlay, role)["spec"], container_of(overlay, role)
    user = re.findall(r"^USER (\d+):\d+$", (ROOT / "ops/deploy/docker/Dockerfile").read_text(), re.MULTILINE)
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
    assert {"/home/horizonrl", "/tmp"} <= set(volumes(overlay, role)), "the root file system cannot be written"
    if role != "controller":
        assert volumes(overlay, role)[str(SHARED_MEMORY)]["emptyDir"]["medium"] == "Memory"


@each_overlay
def test_network_policies_join_what_talks_and_part_the_rest(overlay: str, config_of: Any) -> None:
    policy, config = one(overlay, "NetworkPolicy", "roles")["spec"], config_of(overlay, "actor")
    for role in ROLES:
        labels = pod_of(overlay, role)["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert [rule["ports"][0]["port"] for rule in policy["ingress"]] == [config.metrics.port]
    address = urlsplit(config.broker.url)
    service, namespace, *_ = (address.hostname or "").split(".")
    (to,) = policy["egress"][0]["to"]
    assert to["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": namespace}
    assert policy["egress"][0]["ports"] == [{"protocol": "TCP", "port": address.port}]
    (broker,) = [each["spec"] for each in rendered("nats") if each["kind"] == "NetworkPolicy"]
    (us,) = broker["ingress"][0]["from"]
    of_namespace = one(overlay, "Namespace")["metadata"]["labels"]
    assert us["namespaceSelector"]["matchLabels"].items() <= of_namespace.items()
    assert us["podSelector"]["matchLabels"].items() <= pod_of(overlay, "actor")["metadata"]["labels"].items()
    assert broker["ingress"][0]["ports"] == [{"protocol": "TCP", "port": address.port}]
    assert service == "nats", "the chart's release, and its service"


def test_the_nodes_of_a_learner_find_each_other_and_only_they(config_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = config_of("nodes", "learner")
    job = one("nodes", "Job", "learner-node")
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == leader.learner.nodes - 1
    host, port = leader.learner.rendezvous_address
    service = one("nodes", "Service", "learner")
    learner = workload("nodes", "learner")["metadata"]
    assert host == f"{learner['name']}-0.{service['metadata']['name']}.{learner['namespace']}.svc.cluster.local"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"], "node 0 is not ready before the others have come"
    assert port != leader.metrics.port

    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    command = [word.replace("exec ", "JOB_COMPLETION_INDEX=0; echo ") for word in container["command"]]
    echoed = subprocess.run(command, capture_output=True, text=True, timeout=10)
    _, *words = echoed.stdout.split()
    arguments, overrides = parse(words)
    texts = one("nodes", "ConfigMap", pod["spec"]["volumes"][1]["projected"]["sources"][0]["configMap"]["name"])["data"]
    assert [str(recipe) for recipe in arguments.recipes] == ["/etc/horizonrl/recipe.toml"]
    assert set(texts) == {"recipe.toml"}
    monkeypatch.setenv("HORIZONRL_LEARNER__NODE_RANK", overrides[-1].partition("=")[2])
    other = config_of("nodes", "learner")
    assert other.learner == leader.learner.model_copy(update={"node_rank": 1})
    assert "secret" not in str(pod), "only node 0 speaks with the broker"
    assert pod["spec"]["terminationGracePeriodSeconds"] > stop_within_s("learner", other) + REPORT_S
    assert pod["spec"]["securityContext"] == pod_of("nodes", "learner")["spec"]["securityContext"]
    (fail, ignore) = job["spec"]["podFailurePolicy"]["rules"]
    assert (fail["action"], fail["onExitCodes"]["values"]) == ("FailJob", [ConfigError.exit_code])
    assert ignore["action"] == "Ignore"

    policy = one("nodes", "NetworkPolicy", "learner-nodes")["spec"]
    (who,) = policy["podSelector"]["matchExpressions"]
    labels = {each["metadata"]["labels"][COMPONENT] for each in (pod, pod_of("nodes", "learner"))}
    assert (who["key"], set(who["values"])) == (COMPONENT, labels)
    for side, peer in (("ingress", "from"), ("egress", "to")):
        assert policy[side] == [{peer: [{"podSelector": policy["podSelector"]}]}]


def test_actors_follow_the_tickets_that_wait(config_of: Any) -> None:
    scaled, config = one("gpu", "ScaledObject")["spec"], config_of("gpu", "actor")
    ((_, trigger),) = [(each["type"], each["metadata"]) for each in scaled["triggers"]]
    assert trigger["stream"] == stream_name(config.run.name, Stream.TICKETS)
    assert trigger["consumer"] == ACTORS
    assert trigger["account"] == account(config.run.name, Role.CONTROLLER)
    held = config.actor.slots // config.rollout.group_size
    assert trigger["lagThreshold"] == str(held)
    assert scaled["maxReplicaCount"] == -(-config.credit(Phase.RL) // held), "more would find no tickets"
    assert scaled["minReplicaCount"] == 1
    assert workload("gpu", scaled["scaleTargetRef"]["name"])["kind"] == scaled["scaleTargetRef"]["kind"]
    host, _, port = trigger["natsServerMonitoringEndpoint"].partition(":")
    assert host == "nats-headless.nats.svc.cluster.local"
    assert int(port) == VALUES["config"]["monitor"]["port"]


def test_prometheus_tells_roles_by_job_and_runs_by_run() -> None:
    monitor = one("gpu", "PodMonitor")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics"
    for role in ROLES:
        labels = pod_of("gpu", role)["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        found = {"__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", name): value for name, value in labels.items()}
        target = {each["targetLabel"]: found[each["sourceLabels"][0]] for each in endpoint["relabelings"]}
        assert target == {"job": role, "run": labels[INSTANCE]}


def test_the_small_overlay_is_the_laptops_run() -> None:
    """kustomize reads nothing outside its folder, so that the recipe stands there a second time."""
    ours = (KUBERNETES / "overlays/small/recipe.toml").read_text()
    assert ours == (ROOT / "ops/recipes/laptop.toml").read_text(), "copy the recipe"


PAGE = (ROOT / "docs/kubernetes.md").read_text()
COMMANDS = [
    shlex.split(line) for line in re.findall(r"^ {4,}((?:horizonrl|kubectl|helm|docker) .*)$", PAGE, re.MULTILINE)
]
SECRETS = [words for words in COMMANDS if "secret" in words]
OURS = [words[words.index("horizonrl") :] for words in COMMANDS if "horizonrl" in words]


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_a_command_of_the_page_is_understood(words: list[str]) -> None:
    _, overrides = parse(words[1:])
    RunConfig.load([], overrides)


def test_the_secrets_of_the_page_hold_the_files_that_are_mounted(tmp_path: Path) -> None:
    (first, *_) = [words for words in OURS if "--host" in words]
    make_keys(tmp_path / "keys", ["laptop"], ["n"], actors=int(first[first.index("--actors") + 1]))
    keys = KeyFolder(tmp_path / "keys")
    made = {}
    for words in SECRETS:
        dry = [*words, "--dry-run=client", "--output=yaml"]
        done = subprocess.run(dry, capture_output=True, text=True, timeout=30, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        secret = yaml.safe_load(done.stdout)
        made[secret["metadata"]["name"]] = set(secret["data"])
    assert made.pop("horizonrl-broker") == {"nats-server.conf", "server.pem", "server.key"}
    mounted = dict(itertools.chain.from_iterable(sources("small", role)[1].items() for role in ROLES))
    assert {path.name for path in keys.seeds("laptop", Role.ACTOR)} < made["horizonrl-actor"]
    made["horizonrl-actor"] = {file for file in made["horizonrl-actor"] if not file.startswith("actor-")}
    assert {name: {f"keys/{file}" for file in files} for name, files in made.items()} == mounted
    seen_at = next(words for words in OURS if "--host" in words)
    assert seen_at[seen_at.index("--seen-at") + 1] == VALUES["container"]["patch"][0]["value"]["mountPath"]
    hosts = seen_at[seen_at.index("--host") + 1]
    assert urlsplit(yaml_url()).hostname == hosts
    assert keys.configuration.is_file()


def yaml_url() -> str:
    found = re.search(r'url = "(.*)"', (KUBERNETES / "base/cluster.toml").read_text())
    assert found is not None
    return found[1]


def test_the_paths_of_the_page_are_there() -> None:
    named = set(re.findall(r"ops/(?:kubernetes|docker)[\w/.-]*", PAGE))
    assert all((ROOT / path.rstrip(".")).exists() for path in named), named
