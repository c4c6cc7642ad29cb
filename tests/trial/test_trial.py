"""The trial of the manifests without Kubernetes: what it makes of a pod.

Its containers need root and an image, which no test has: docs/kubernetes.md says what a trial printed.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.ops.deploy.manifests import KUBERNETES, OVERLAYS, PREFIX, needs_kubectl
from tests.ops.deploy.test_nats_chart import ONE
from tests.ops.deploy.test_nats_chart import rendered as rendered_broker
from tests.trial.overlay import all_pods, made_claims, make_secrets, rendered, variables
from tests.trial.pods import Image, Pod, Surroundings, expanded, seccomp_profile, size_bytes

IMAGE = Image(
    Path("/image"), {"PATH": "/usr/local/bin", "HOME": "/home/horizonrl"}, "/home/horizonrl"
)
NAMESPACES = {"network": "/run/netns/pod", "pid": "/proc/1/ns/pid"}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    return make_secrets(tmp_path_factory.mktemp("keys") / "keys", "any", actors=2)


@pytest.fixture(scope="module")
def broker() -> list[dict[str, Any]]:
    return rendered_broker(ONE)


@pytest.fixture
def configs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    secrets: dict[str, dict[str, bytes]],
    broker: list[dict[str, Any]],
) -> Any:
    """Return what gives an overlay's pods as the runtime takes them, by name, with the broker's."""
    if os.geteuid():
        monkeypatch.setattr(os, "chown", lambda *_: None)  # only root may give files away

    def made(overlay: str, *changes: str) -> dict[str, dict[str, Any]]:
        manifests = [*rendered(KUBERNETES / "overlays" / overlay), *broker]
        prefix = PREFIX.get(overlay, "")
        workloads = {
            each["metadata"]["name"].removeprefix(prefix): each
            for each in manifests
            if each["kind"] in ("Job", "StatefulSet")
        }
        named = secrets | {prefix + name: files for name, files in secrets.items()}
        cluster = Surroundings(manifests, named, tmp_path / "claims")
        found = {}
        for name, pod in all_pods(workloads, tmp_path / "pods", variables(changes), actors=2):
            found[name] = pod.runtime_config(IMAGE, [*pod.mounts(cluster, IMAGE)], NAMESPACES, None)
        return found

    return made


def mount(config: dict[str, Any], place: str) -> dict[str, Any]:
    (found,) = [each for each in config["mounts"] if each["destination"] == place]
    return dict(found)


@needs_kubectl
def test_each_pod_of_each_overlay_is_a_container_with_its_own_files(configs: Any) -> None:
    for overlay in OVERLAYS:
        made = configs(overlay)
        nodes = {"learner-node-0"} if overlay == "nodes" else set()
        prefix = PREFIX.get(overlay, "")
        roles = {f"{prefix}{name}" for name in ("controller-0", "learner-0", "actor-0", "actor-1")}
        assert set(made) == roles | nodes | {"nats"}, overlay
        for name in roles:
            config = Path(mount(made[name], "/etc/horizonrl")["source"])
            assert {"recipe.toml", "cluster.toml", "keys"} <= {
                each.name for each in config.iterdir()
            }
            assert (config / "recipe.toml").read_text() == (
                KUBERNETES / f"overlays/{overlay}/recipe.toml"
            ).read_text()


@needs_kubectl
def test_a_container_has_the_command_the_user_and_the_limits_of_its_manifest(configs: Any) -> None:
    made = configs("gpu", "actor.engine=scripted")
    actor, learner = made["actor-1"], made["learner-0"]
    assert actor["process"]["args"][:2] == ["horizonrl", "actor"]
    assert actor["process"]["user"] == {"uid": 10001, "gid": 10001, "additionalGids": [10001]}
    assert {"HORIZONRL_RUN__NAME=agent", "POD_INDEX=1", "HORIZONRL_ACTOR__ENGINE=scripted"} <= set(
        actor["process"]["env"]
    )
    assert actor["process"]["noNewPrivileges"] and actor["root"]["readonly"]
    assert not any(actor["process"]["capabilities"].values())
    assert actor["linux"]["resources"]["memory"]["limit"] == 32 << 30
    assert {"type": "pid", "path": "/proc/1/ns/pid"} in actor["linux"]["namespaces"]
    assert learner["hostname"] == "learner-0"
    # Each has its own key, memory of the size that is asked for, and a claim that only its owner writes.
    assert Path(mount(actor, "/etc/horizonrl-key/role.nk")["source"]).name == "actor-1.nk"
    assert "size=8589934592" in mount(actor, "/dev/shm")["options"]
    assert "ro" in mount(actor, "/models")["options"]
    assert (
        mount(learner, "/runs")["source"].endswith("claims/runs")
        and "rw" in mount(learner, "/runs")["options"]
    )
    key = Path(mount(learner, "/etc/horizonrl")["source"]) / "keys/ticket.key"
    assert key.stat().st_mode & 0o777 == 0o440


@needs_kubectl
def test_the_broker_is_started_as_its_chart_says(
    configs: Any, broker: list[dict[str, Any]]
) -> None:
    nats = configs("small")["nats"]
    assert nats["process"]["args"] == ["--config", "/etc/nats-config/nats.conf"], (
        "after the image's entrypoint"
    )
    assert {"SERVER_NAME=nats-0", "GOMEMLIMIT=3600MiB"} <= set(nats["process"]["env"])
    assert Path(mount(nats, "/data")["source"]).name == "nats-js-nats-0" in made_claims(broker)
    keys = {each.name for each in Path(mount(nats, "/etc/horizonrl-keys")["source"]).iterdir()}
    assert keys == {"nats-server.conf", "server.pem", "server.key"}


def test_a_pod_is_numbered_and_its_references_are_replaced(tmp_path: Path) -> None:
    template = {
        "metadata": {"labels": {"a": "b"}},
        "spec": {"containers": [{"env": []}], "volumes": []},
    }
    workload = {
        "metadata": {"name": "node"},
        "spec": {"template": template, "completionMode": "Indexed"},
    }
    pod = Pod.of(workload, tmp_path, {"X": "1"}, index=2)
    assert (
        pod.environment(IMAGE)["JOB_COMPLETION_INDEX"] == "2" and pod.environment(IMAGE)["X"] == "1"
    )
    assert (pod.name, pod.labels["apps.kubernetes.io/pod-index"]) == ("node-2", "2")
    assert expanded("$(A)/$(UNKNOWN)", {"A": "x"}) == "x/$(UNKNOWN)"
    assert [size_bytes(each) for each in ("7", "2Mi", "1Gi")] == [7, 2 << 20, 1 << 30]


def test_the_default_profile_has_no_call_that_needs_a_capability() -> None:
    calls = [
        {
            "names": ["read"],
            "action": "SCMP_ACT_ALLOW",
            "args": None,
            "includes": {},
            "excludes": {},
        },
        {"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
        {
            "names": ["clone"],
            "action": "SCMP_ACT_ALLOW",
            "excludes": {"caps": ["CAP_SYS_ADMIN"], "arches": ["s390x"]},
        },
        {"names": ["arm_only"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["arm"]}},
    ]
    made = seccomp_profile({"defaultAction": "SCMP_ACT_ERRNO", "archMap": [], "syscalls": calls})
    assert made["syscalls"] == [
        {"names": [name], "action": "SCMP_ACT_ALLOW"} for name in ("read", "clone")
    ]
    assert made["defaultAction"] == "SCMP_ACT_ERRNO"
