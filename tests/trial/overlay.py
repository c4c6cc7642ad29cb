"""What is started: an overlay and the broker's chart as their tools render them, keys, and the pods that they make."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from tests.trial.pods import Image, Manifest, Pod

KUBERNETES = Path(__file__).parents[2] / "ops/deploy/kubernetes"
VALUES = KUBERNETES / "nats/values.yaml"
BROKER, BROKER_NAME = "nats", "nats.nats.svc.cluster.local"
SEEN_AT = "/etc/horizonrl-keys"


def rendered(overlay: Path) -> list[Manifest]:
    done = subprocess.run(
        ["kubectl", "kustomize", overlay], capture_output=True, text=True, check=True, timeout=60
    )
    return list(yaml.safe_load_all(done.stdout))


def rendered_chart(chart: Path) -> list[Manifest]:
    """Return what Helm makes of the broker's chart and our values."""
    from helm_python.chart import Chart  # where tests run; nothing else of ours needs Helm

    with Chart.load(chart) as loaded:
        texts = loaded.render(
            yaml.safe_load(VALUES.read_text(encoding="utf-8")), name=BROKER, namespace=BROKER
        ).values()
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def made_claims(manifests: Iterable[Manifest]) -> list[str]:
    """Return the claims that the manifests make, those of the broker's StatefulSet among them."""
    claims = [
        each["metadata"]["name"] for each in manifests if each["kind"] == "PersistentVolumeClaim"
    ]
    for each in manifests:
        for claim in (
            each.get("spec", {}).get("volumeClaimTemplates", ())
            if each["kind"] == "StatefulSet"
            else ()
        ):
            claims.append(f"{claim['metadata']['name']}-{each['metadata']['name']}-0")
    return claims


def make_secrets(folder: Path, run: str, actors: int) -> dict[str, dict[str, bytes]]:
    """Make the run's keys with our own command, and return the secrets that docs/kubernetes.md makes of them."""
    shutil.rmtree(folder, ignore_errors=True)
    words = [
        "broker",
        "keys",
        "--out",
        folder,
        "--run",
        run,
        "--actors",
        actors,
        "--host",
        BROKER_NAME,
    ]
    command = [
        sys.executable,
        "-m",
        "horizonrl.ops.cli.main",
        *map(str, words),
        "--seen-at",
        SEEN_AT,
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    own = folder / run

    def of(*files: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in files}

    return {
        "horizonrl-broker": of(
            *(folder / name for name in ("nats-server.conf", "server.pem", "server.key"))
        ),
        **{
            f"horizonrl-{role}": of(folder / "ca.pem", own / "ticket.key")
            | {"role.nk": (own / f"{role}.nk").read_bytes()}
            for role in ("controller", "learner")
        },
        "horizonrl-learner-node": of(folder / "ca.pem")
        | {"role.nk": (own / "monitor.nk").read_bytes()},
        "horizonrl-actor": of(folder / "ca.pem", *(own / "actors").iterdir()),
    }


def all_pods(
    workloads: Mapping[str, Manifest], folder: Path, added: Mapping[str, str], actors: int
) -> Iterable[tuple[str, Pod]]:
    """Yield the pods by name, in the order in which they are started."""
    for name in (BROKER, "controller", "learner", "learner-node", "actor"):
        if name not in workloads:
            continue
        workload = workloads[name]
        for index in range(actors if name == "actor" else workload["spec"].get("completions", 1)):
            pod = Pod.of(workload, folder, {} if name == BROKER else added, index)
            yield (name if name == BROKER else pod.name), pod


def variables(changes: Sequence[str]) -> dict[str, str]:
    """Return `section.key=value` as the variables that a container would have for it."""
    pairs = [change.partition("=")[::2] for change in changes]
    return {f"HORIZONRL_{key.upper().replace('.', '__')}": value for key, value in pairs}


def image_of(folder: Path) -> Image:
    """Return the image that `rootfs.sh` has made."""
    config = json.loads((folder / "image.json").read_text(encoding="utf-8"))["OCIv1"]["config"]
    pairs = [variable.partition("=")[::2] for variable in config["Env"]]
    return Image((folder / "root").resolve(), dict(pairs), config["WorkingDir"])
