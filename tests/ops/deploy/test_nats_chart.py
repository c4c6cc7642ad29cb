"""The values of the NATS chart: rendered by Helm, held against the schemas, nats-server, the keys and the code.

nats-2.14.2.tgz is the chart of that version, from the tag of the same name of github.com/nats-io/k8s (Apache-2.0),
without its own tests and pages. No cluster was at hand.
"""

import json
import re
import shlex
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cryptography import x509
from helm_python.chart import Chart

from horizonrl.broker.nats.cluster import free_ports
from horizonrl.broker.nats.keys import make_keys
from horizonrl.broker.nats.server import find_server
from horizonrl.common.config.schema import RunConfig

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "ops/deploy/kubernetes"
CHART = next(Path(__file__).parent.glob("nats-*.tgz"))
ONE, THREE = ("values.yaml",), ("values.yaml", "values-cluster.yaml")
CERT_MANAGER = ("values.yaml", "values-cert-manager.yaml")
Manifest = dict[str, Any]


def merged(below: Manifest, above: Manifest) -> Manifest:
    """Return one set of values as Helm makes it of two files: maps are merged, all else is replaced."""
    both = {
        key: merged(below[key], above[key])
        for key in below.keys() & above.keys()
        if isinstance(above[key], dict)
    }
    return below | above | both


def rendered(files: tuple[str, ...]) -> list[Manifest]:
    """Return the manifests of the chart for these files of values, and the password that the page gives with --set."""
    values: Manifest = {}
    for name in files:
        values = merged(values, yaml.safe_load((KUBERNETES / "nats" / name).read_text()))
    if files == THREE:
        values["config"]["cluster"]["routeURLs"]["password"] = "0123456789abcdef"
    with Chart.load(CHART) as chart:
        texts = chart.render(values, name="nats", namespace="nats").values()
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def one(files: tuple[str, ...], kind: str) -> Manifest:
    (found,) = [each for each in rendered(files) if each["kind"] == kind]
    return found


def containers(files: tuple[str, ...]) -> dict[str, Manifest]:
    return {
        each["name"]: each
        for each in one(files, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    }


def size(quantity: str) -> int:
    """Return the bytes of a quantity of Kubernetes, of NATS or of Go."""
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)B?", quantity).groups()  # type: ignore[union-attr]
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


@pytest.fixture
def configuration(tmp_path: Path) -> Any:
    """Return what writes a server's configuration and keys as the chart does, with /etc in a folder of the test."""

    def write(files: tuple[str, ...]) -> Path:
        (mount,) = [
            m for m in containers(files)["nats"]["volumeMounts"] if m["name"] == "horizonrl-keys"
        ]
        make_keys(
            tmp_path / mount["mountPath"].lstrip("/"), ["laptop"], ["nats.nats.svc.cluster.local"]
        )
        place = tmp_path / "etc/nats-config/nats.conf"
        place.parent.mkdir()
        text = one(files, "ConfigMap")["data"]["nats.conf"]
        place.write_text(
            text.replace("/data", f"{tmp_path}/data").replace("/var/run/nats", str(tmp_path))
        )
        return place

    return write


@pytest.mark.parametrize("files", [ONE, THREE], ids=["one", "three"])
def test_every_manifest_is_what_its_api_takes(files: tuple[str, ...]) -> None:
    for manifest in rendered(files):
        if manifest["kind"] == "StatefulSet":
            assert manifest["spec"]["template"]["metadata"].pop("annotations") is None
        assert kubernetes_validate.validate(manifest, "1.32", strict=True) == "1.32"


@pytest.mark.parametrize("files", [ONE, THREE], ids=["one", "three"])
def test_nats_server_takes_the_rendered_configuration_with_the_keys(
    files: tuple[str, ...], configuration: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_NAME", "nats-0")
    command = [find_server(), "-t", "-c", configuration(files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    (volume,) = [
        each["secret"]
        for each in one(files, "StatefulSet")["spec"]["template"]["spec"]["volumes"]
        if each["name"] == "horizonrl-keys"
    ]
    assert volume["secretName"] == "horizonrl-broker"
    version = subprocess.run(
        [find_server(), "--version"], capture_output=True, text=True, timeout=30
    ).stdout
    assert containers(files)["nats"]["image"] == f"nats:{version.strip().rpartition('v')[2]}-alpine"


@pytest.mark.process
def test_a_server_of_the_chart_syncs_each_message_and_knows_the_size_of_its_store(
    configuration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_NAME", "nats-0")
    port, monitor = free_ports(2)
    place = configuration(ONE)
    place.write_text(place.read_text().replace("4222", str(port)).replace("8222", str(monitor)))
    with subprocess.Popen(
        [find_server(), "-c", place, "-a", "127.0.0.1"], stderr=subprocess.DEVNULL
    ) as server:
        try:
            found = ask(f"http://127.0.0.1:{monitor}/varz")["jetstream"]["config"]
        finally:
            server.terminate()
    assert (found["sync_always"], found["max_storage"]) == (True, 40 << 30)


def ask(url: str) -> Manifest:
    """Return what a server's monitoring port answers, once it does."""
    for _ in range(100):
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return dict(json.load(answer))
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"{url} has not answered for 10 s")


def test_cert_managers_certificate_lies_where_the_keys_of_our_own_command_do(
    tmp_path: Path,
) -> None:
    certificate = yaml.safe_load((KUBERNETES / "nats/certificate.yaml").read_text())["spec"]
    (volume,) = [
        each["projected"]
        for each in one(CERT_MANAGER, "StatefulSet")["spec"]["template"]["spec"]["volumes"]
        if each["name"] == "horizonrl-keys"
    ]
    placed = {
        (source["secret"]["name"], item["key"]): item["path"]
        for source in volume["sources"]
        for item in source["secret"]["items"]
    }
    assert placed == {
        ("horizonrl-broker", "nats-server.conf"): "nats-server.conf",
        (certificate["secretName"], "tls.crt"): "server.pem",  # as cert-manager names them
        (certificate["secretName"], "tls.key"): "server.key",
    }
    host = certificate["dnsNames"][0]
    assert make_keys(tmp_path / "keys", ["laptop"], [host])
    assert set(placed.values()) <= {path.name for path in (tmp_path / "keys").iterdir()}
    made = x509.load_pem_x509_certificate((tmp_path / "keys/server.pem").read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == set(certificate["dnsNames"])
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == certificate[
        "ipAddresses"
    ]
    for manifest in rendered(CERT_MANAGER):
        if manifest["kind"] == "StatefulSet":
            assert manifest["spec"]["template"]["metadata"].pop("annotations") is None
        assert kubernetes_validate.validate(manifest, "1.32", strict=True) == "1.32"


def test_the_store_is_smaller_than_its_volume_and_go_collects_below_the_limit() -> None:
    (claim,) = one(ONE, "StatefulSet")["spec"]["volumeClaimTemplates"]
    (store,) = re.findall(r'"max_file_store": (\w+)', one(ONE, "ConfigMap")["data"]["nats.conf"])
    assert size(store) <= 0.8 * size(claim["spec"]["resources"]["requests"]["storage"])
    assert size(store) >= RunConfig.load([], []).broker.max_log_bytes
    server = containers(ONE)["nats"]
    (collects,) = [each["value"] for each in server["env"] if each["name"] == "GOMEMLIMIT"]
    assert size(collects) <= 0.9 * size(server["resources"]["limits"]["memory"])
    assert server["resources"]["requests"] == {
        "cpu": "2",
        "memory": server["resources"]["limits"]["memory"],
    }


def test_no_container_of_the_broker_may_do_what_it_need_not() -> None:
    """The namespace enforces the level `restricted`, which refuses a pod for any one of its containers."""
    pod = one(ONE, "StatefulSet")["spec"]["template"]["spec"]
    assert {each["name"] for each in pod["containers"]} == {"nats", "reloader", "prom-exporter"}
    for container in pod["containers"]:
        context = container["securityContext"]
        assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (
            False,
            True,
        )
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]), (
            "a quota refuses what asks for nothing"
        )
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
    assert not pod["automountServiceAccountToken"]
    namespace = yaml.safe_load((KUBERNETES / "nats/namespace.yaml").read_text())
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_three_servers_lie_on_three_nodes_and_keep_a_majority() -> None:
    pods = one(THREE, "StatefulSet")["spec"]
    RunConfig.load([], [f"--broker.nats.replicas={pods['replicas']}"])
    assert (pods["replicas"], pods["podManagementPolicy"]) == (3, "Parallel")
    spread = {
        each["topologyKey"]: each for each in pods["template"]["spec"]["topologySpreadConstraints"]
    }
    host = spread["kubernetes.io/hostname"]
    # With fewer nodes than minDomains the least of them counts as none, so that no node may have two.
    assert (host["maxSkew"], host["minDomains"], host["whenUnsatisfiable"]) == (
        1,
        3,
        "DoNotSchedule",
    )
    assert all(each["labelSelector"] == pods["selector"] for each in spread.values())
    budget = one(THREE, "PodDisruptionBudget")["spec"]
    assert pods["replicas"] - budget["maxUnavailable"] >= pods["replicas"] // 2 + 1
    assert budget["selector"] == pods["selector"]
    conf = one(THREE, "ConfigMap")["data"]["nats.conf"]
    assert (
        len(re.findall(r'"nats://route:0123456789abcdef@nats-\d\.nats-headless\.nats\.svc', conf))
        == 3
    )


def test_the_ports_are_open_to_those_who_need_them_and_to_nobody_else() -> None:
    policy = yaml.safe_load((KUBERNETES / "nats/network-policy.yaml").read_text())["spec"]
    callers: dict[int, list[Manifest]] = {}
    for rule in policy["ingress"]:
        for port in rule["ports"]:
            callers.setdefault(port["port"], []).extend(rule["from"])
    offered = {
        port["containerPort"]
        for each in containers(THREE).values()
        for port in each.get("ports", ())
    }
    assert set(callers) == offered
    spaces = {"keda": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
    spaces["monitoring"] = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    assert callers[8222] == [{"namespaceSelector": spaces[name]} for name in ("keda", "monitoring")]
    assert callers[7777] == [{"namespaceSelector": spaces["monitoring"]}]
    assert callers[6222] == [{"podSelector": policy["podSelector"]}], (
        "a route may do anything on every account"
    )
    labels = one(THREE, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_page_installs_the_version_of_the_chart_that_is_tried_here() -> None:
    with Chart.load(CHART) as chart:
        version = chart.version
    page = (ROOT / "docs/kubernetes.md").read_text()
    commands = [
        shlex.split(line) for line in re.findall(r"^ +(helm .*nats/nats.*)$", page, re.MULTILINE)
    ]
    assert len(commands) == 2
    assert {words[words.index("--version") + 1] for words in commands} == {version}
    assert version in (KUBERNETES / "nats/values.yaml").read_text().splitlines()[0]
