"""What joins the pods to a platform: network policies, scaling, several nodes and runs, the components, the models."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from horizonrl.broker.api import Role, Stream
from horizonrl.broker.nats.access import account
from horizonrl.broker.nats.streams import ACTORS, stream_name
from horizonrl.common.service import REPORT_S
from horizonrl.common.types import Phase
from horizonrl.ops.cli.parser import parse
from horizonrl.ops.launch.roles import stop_within_s
from tests.ops.deploy.manifests import (
    COMPONENT,
    INSTANCE,
    ROLES,
    VALUES,
    container_of,
    each_overlay,
    needs_kubectl,
    one,
    pod_of,
    rendered,
    volumes,
    workload,
)

pytestmark = needs_kubectl


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
    assert to["podSelector"] == {
        "matchExpressions": [
            {"key": "app.kubernetes.io/name", "operator": "In", "values": [service]}
        ]
    }, "the broker has no label of a run"
    dns = policy["egress"][1]["to"]
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in dns, "NodeLocal DNSCache is no pod"
    assert policy["egress"][0]["ports"] == [{"protocol": "TCP", "port": address.port}]
    (broker,) = [each["spec"] for each in rendered("nats") if each["kind"] == "NetworkPolicy"]
    (us,) = broker["ingress"][0]["from"]
    in_namespace = "small" if overlay == "beside" else overlay
    of_namespace = one(in_namespace, "Namespace")["metadata"]["labels"]
    assert (
        workload(overlay, "learner")["metadata"]["namespace"]
        == one(in_namespace, "Namespace")["metadata"]["name"]
    )
    assert us["namespaceSelector"]["matchLabels"].items() <= of_namespace.items()
    assert (
        us["podSelector"]["matchLabels"].items()
        <= pod_of(overlay, "actor")["metadata"]["labels"].items()
    )
    assert broker["ingress"][0]["ports"] == [{"protocol": "TCP", "port": address.port}]
    assert service == "nats", "the chart's release, and its service"


def test_the_nodes_of_a_learner_find_each_other_and_only_they(
    config_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = config_of("nodes", "learner")
    job = one("nodes", "Job", "learner-node")
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == leader.learner.nodes - 1
    host, port = leader.learner.rendezvous_address
    service = one("nodes", "Service", "learner")
    spec, namespace = (
        pod_of("nodes", "learner")["spec"],
        workload("nodes", "learner")["metadata"]["namespace"],
    )
    assert host == f"{spec['hostname']}.{spec['subdomain']}.{namespace}.svc.cluster.local"
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"], (
        "node 0 is not ready before the others have come"
    )
    assert port != leader.metrics.port

    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    command = [
        word.replace("exec ", "JOB_COMPLETION_INDEX=0; echo ") for word in container["command"]
    ]
    echoed = subprocess.run(command, capture_output=True, text=True, timeout=10)
    _, *words = echoed.stdout.split()
    arguments, overrides = parse(words)
    assert arguments.recipes == parse(container_of("nodes", "learner")["command"][1:])[0].recipes
    own, leaders = (
        each["spec"]["volumes"][0]["projected"]["sources"]
        for each in (pod, pod_of("nodes", "learner"))
    )
    assert own[:2] == leaders[:2], "the same recipe and the same cluster"
    paths = {item["path"] for item in own[2]["secret"]["items"]}
    assert paths == {"keys/ca.pem", "keys/role.nk"}, "what signs tickets stays with node 0"
    assert own[2]["secret"]["name"] == "horizonrl-learner-node" and own[2]["secret"]["optional"]
    monkeypatch.setenv("HORIZONRL_LEARNER__NODE_RANK", overrides[-1].partition("=")[2])
    other = config_of("nodes", "learner")
    assert other.learner == leader.learner.model_copy(update={"node_rank": 1})
    assert "horizonrl-learner'" not in str(pod), "only node 0 speaks with the broker as the learner"
    assert pod["spec"]["terminationGracePeriodSeconds"] > stop_within_s("learner", other) + REPORT_S
    assert pod["spec"]["securityContext"] == pod_of("nodes", "learner")["spec"]["securityContext"]
    first = workload("nodes", "learner")
    for key in ("podFailurePolicy", "podReplacementPolicy", "backoffLimit"):
        assert job["spec"][key] == first["spec"][key]
    assert pod["metadata"]["annotations"] == pod_of("nodes", "learner")["metadata"]["annotations"]

    policy = one("nodes", "NetworkPolicy", "learner-nodes")["spec"]
    (who,) = policy["podSelector"]["matchExpressions"]
    labels = {each["metadata"]["labels"][COMPONENT] for each in (pod, pod_of("nodes", "learner"))}
    assert (who["key"], set(who["values"])) == (COMPONENT, labels)
    assert policy["podSelector"]["matchLabels"][INSTANCE] == leader.run.name, "no other run's nodes"
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
    assert scaled["maxReplicaCount"] == -(-config.credit(Phase.RL) // held), (
        "more would find no tickets"
    )
    assert scaled["minReplicaCount"] == 0, "a run that is over holds no GPU"
    longest_s = max(config.learner.step_timeout_s, 600)
    assert min(scaled["cooldownPeriod"], scaled["initialCooldownPeriod"]) > longest_s, (
        "a step leaves the queue empty"
    )
    assert (
        workload("gpu", scaled["scaleTargetRef"]["name"])["kind"]
        == scaled["scaleTargetRef"]["kind"]
    )
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
        found = {
            "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", name): value
            for name, value in labels.items()
        }
        target = {
            each["targetLabel"]: found[each["sourceLabels"][0]] for each in endpoint["relabelings"]
        }
        assert target == {"job": role, "run": labels[INSTANCE]}


@each_overlay
def test_two_runs_in_a_namespace_do_not_claim_each_others_pods(overlay: str) -> None:
    """Every selector of a run's own pods has the run's label, and those of other pods do not."""
    run = workload(overlay, "learner")["metadata"]["labels"][INSTANCE]
    own = {"app.kubernetes.io/name": "horizonrl", INSTANCE: run}
    found = 0
    for manifest in rendered(f"overlays/{overlay}"):
        spec = manifest.get("spec", {})
        selectors = {
            "StatefulSet": [spec.get("selector", {}).get("matchLabels")],
            "PodDisruptionBudget": [spec.get("selector", {}).get("matchLabels")],
            "Service": [spec.get("selector")],
            "NetworkPolicy": [spec.get("podSelector", {}).get("matchLabels")],
        }.get(manifest["kind"], [])
        spread = spec.get("template", {}).get("spec", {}).get("topologySpreadConstraints", ())
        for selector in (*selectors, *(each["labelSelector"]["matchLabels"] for each in spread)):
            assert own.items() <= selector.items(), manifest["metadata"]["name"]
            found += 1
    assert found >= 5


def test_a_second_run_shares_no_name_with_the_first() -> None:
    def names(overlay: str) -> set[tuple[str, str]]:
        return {
            (each["kind"], each["metadata"]["name"]) for each in rendered(f"overlays/{overlay}")
        }

    assert not names("small") & names("beside")
    for role in ROLES:
        first, second = str(pod_of("small", role)), str(pod_of("beside", role))
        for word in (f"horizonrl-{role}", "recipe-"):
            assert second.count(f"other-{word}") == first.count(word) > 0
    assert volumes("beside", "learner")["/runs"] == {
        "name": "runs",
        "persistentVolumeClaim": {"claimName": "other-runs"},
    }
    assert pod_of("beside", "learner")["spec"]["subdomain"] == "other-learner"


def test_the_components_render_together(with_components: Any) -> None:
    found = with_components("nodes", "quota", "priority", "kueue", "openshift", "tracker")
    jobs = [found["Job", name] for name in ("controller", "learner", "learner-node")]
    actor = found["StatefulSet", "actor"]
    for each in (*jobs, actor):
        assert each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "horizonrl"
        security = each["spec"]["template"]["spec"]["securityContext"]
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(security), "OpenShift chooses them"
        assert security["runAsNonRoot"]
    classes = {
        name: each["value"] for (kind, name), each in found.items() if kind == "PriorityClass"
    }
    of_learner, of_actor = (
        each["spec"]["template"]["spec"]["priorityClassName"] for each in (jobs[1], actor)
    )
    assert classes[of_learner] > 0 > classes[of_actor] >= -10, (
        "the autoscaler adds no node for less"
    )
    tracker = found["NetworkPolicy", "tracker"]["spec"]
    labels = jobs[1]["spec"]["template"]["metadata"]["labels"]
    assert tracker["podSelector"]["matchLabels"].items() <= labels.items()
    assert found["NetworkPolicy", "dns"]["spec"]["egress"][0]["ports"][0]["port"] == 5353


def test_a_quota_counts_only_what_every_pod_names(with_components: Any) -> None:
    """A quota refuses a pod that does not name what it counts, GPUs apart."""
    found = with_components("gpu", "quota")
    hard = found["ResourceQuota", "run"]["spec"]["hard"]
    counted = {
        key.partition(".")[::2] for key in hard if key.partition(".")[0] in ("requests", "limits")
    }
    for role in ROLES:
        resources = container_of("gpu", role)["resources"]
        named = {(how, what) for how in ("requests", "limits") for what in resources[how]}
        assert counted - {("requests", "storage"), ("requests", "nvidia.com/gpu")} <= named


def test_models_are_written_once_and_read_by_all(config_of: Any) -> None:
    found = {each["kind"]: each for each in rendered("models")}
    claim, loader = found["PersistentVolumeClaim"], found["Job"]["spec"]["template"]["spec"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"], (
        "ReadOnlyMany of an empty volume stays empty"
    )
    (container,) = loader["containers"]
    place = container["command"][container["command"].index("--local-dir") + 1]
    assert place == config_of("gpu", "learner").model.name
    for role in ("learner", "actor"):
        volume = volumes("gpu", role)[str(Path(place).parent)]["persistentVolumeClaim"]
        assert volume == {"claimName": claim["metadata"]["name"], "readOnly": True}
    (written,) = [each for each in loader["volumes"] if "persistentVolumeClaim" in each]
    assert written["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    for key in ("runAsUser", "fsGroup"):
        assert (
            loader["securityContext"][key]
            == pod_of("gpu", "learner")["spec"]["securityContext"][key]
        )
    hf = subprocess.run(
        [Path(sys.executable).parent / "hf", "download", "--help"], capture_output=True, timeout=60
    )
    assert hf.returncode == 0 and b"--local-dir" in hf.stdout
    labels = found["Job"]["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] != "horizonrl", "the roles' policy would cut it off"
