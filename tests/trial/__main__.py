"""Start an overlay's pods on this machine, wait for the end of the run, and start its roles once more.

    python -m tests.trial FOLDER OVERLAY --chart NATS_CHART [--set section.key=value ...]

It needs no Kubernetes: it takes the overlay as `kubectl kustomize` renders it, NATS' chart with our values, and a root
file system that the Dockerfile's steps have made. Each pod becomes a container of `runc`, the runtime of most nodes,
with the command, the environment, the files, the user, the limits and the probes of its manifest.

FOLDER is what `ops/deploy/docker/rootfs.sh` has made. It needs root, Linux, runc, iproute2, kubectl and Python's
helm-python-sdk. The claims that the overlay makes begin empty; any other one is the folder FOLDER/trial/claims/NAME.
"""

import argparse
import contextlib
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from horizonrl.common.errors import ConfigError, HorizonError, RunFailed
from tests.trial.node import Started, TrialNode, start
from tests.trial.overlay import (
    BROKER,
    BROKER_NAME,
    KUBERNETES,
    all_pods,
    image_of,
    made_claims,
    make_secrets,
    rendered,
    rendered_chart,
    variables,
)
from tests.trial.pods import Image, Pod, Surroundings

READER = KUBERNETES / "reader.yaml"
COMPONENT, INSTANCE = "app.kubernetes.io/component", "app.kubernetes.io/instance"
CONFIG_ERROR = ConfigError.exit_code
ACTORS_END_S = 60.0
"""Seconds after the learner's in which an actor notices the end of the run."""


@dataclass
class Trial:
    node: TrialNode
    stack: ExitStack
    image: Image
    pods: Mapping[str, Pod]
    within_s: float
    places: dict[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    running: dict[str, Started] = field(default_factory=dict)
    restarts: int = 0

    def prepare(self) -> None:
        """Give each pod its address before any starts, since they find each other by name."""
        for name, pod in self.pods.items():
            self.places[name] = self.stack.enter_context(self.node.place())
            address = self.places[name][0]
            self.node.names[pod.hostname] = address
            if "subdomain" in pod.spec:
                full = f"{pod.hostname}.{pod.spec['subdomain']}.{pod.spec['namespace']}.svc.cluster.local"
                self.node.names[full] = address
        self.node.names[BROKER_NAME] = self.places[BROKER][0]

    def start(self, name: str) -> Started:
        image = self.image
        if name == BROKER:  # the chart's image has it as its entrypoint; ours has the same program
            image = replace(image, working_directory="/", entrypoint=["/usr/local/bin/nats-server"])
        began = start(self.node, self.pods[name], image, self.places[name])
        self.stack.callback(_leave_none, began)
        self.running[name] = began
        return began

    def run_to_the_end(self, for_s: float) -> None:
        """Restart what fails, as its controller would, until every Job is complete. Raises RunFailed if one fails."""
        jobs = {name for name in self.pods if name != BROKER and not self.is_actor(name)}
        deadline = time.monotonic() + for_s
        while jobs:
            if time.monotonic() > deadline:
                raise RunFailed(f"{', '.join(sorted(jobs))} have not ended within {for_s:g} s")
            time.sleep(0.2)
            for name, started in list(self.running.items()):
                code = started.process.poll()
                if code is None:
                    self.probe(started)
                    continue
                say(f"{name} has ended with code {code}")
                del self.running[name]
                if name == BROKER or (code == CONFIG_ERROR and name in jobs):
                    raise RunFailed(f"no other pod would help: see {started.log}")
                if code == 0:
                    jobs.discard(name)
                else:
                    self.restarts += 1
                    self.start(name)

    def probe(self, started: Started) -> None:
        """Make the probe whose turn it is. Raises RunFailed where a kubelet would kill the container."""
        for kind in ("startupProbe", "readinessProbe"):
            if kind in started.pod.container and kind not in started.passed:
                if (after_s := started.await_once(kind)) is not None:
                    say(f"{started.pod.name} passes its {kind} after {after_s:.1f} s")
                return
        if "livenessProbe" in started.pod.container:
            started.stay_alive()

    def is_actor(self, name: str) -> bool:
        return self.pods[name].labels[COMPONENT] == "actor"

    def end_actors(self) -> None:
        for name in [name for name in self.running if self.is_actor(name)]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.running[name].process.wait(ACTORS_END_S)
            if self.running[name].process.poll() is None:
                code, took_s = self.running[name].stop()
                say(f"{name} was asked to stop and has ended with code {code} after {took_s:.1f} s")
            else:
                say(f"{name} has ended by itself with code {self.running[name].process.returncode}")
            del self.running[name]

    def streams(self) -> dict[str, Any]:
        """Return how far each stream of the broker has come, from its monitoring port."""
        url = f"http://{self.places[BROKER][0]}:8222/jsz?accounts=true&streams=true"
        with urllib.request.urlopen(url, timeout=10) as answer:
            accounts = json.load(answer)["account_details"]
        streams = [stream for account in accounts for stream in account.get("stream_detail", ())]
        return {each["name"]: each["state"]["last_seq"] for each in streams}

    def look(self, run: str, keys: Path) -> None:
        """Ask the broker as an operator does whose port is forwarded: from its own network, with the monitor's key."""
        words = ["status", "--run", run, "--broker.url", "tls://127.0.0.1:4222"]
        words += [
            "--broker.nats.ca_file",
            str(keys / "ca.pem"),
            "--broker.nats.nkey_seed",
            f"{keys}/{run}/monitor.nk",
        ]
        inside = [
            "nsenter",
            f"--net={self.places[BROKER][1]['network']}",
            sys.executable,
            "-m",
            "horizonrl.ops.cli.main",
        ]
        done = subprocess.run(
            [*inside, *words], check=True, capture_output=True, text=True, timeout=60
        )
        say(f"horizonrl status: {done.stdout.splitlines()[0]}")

    def collect(self, run: str, namespace: str) -> None:
        """Read the run directory through reader.yaml, as docs/kubernetes.md does."""
        text = READER.read_text(encoding="utf-8")
        if "models" in {volume["name"] for volume in self.pods["learner-0"].spec["volumes"]}:
            text = text.replace("# - {name: models", "- {name: models")  # as its head says
        pod = yaml.safe_load(text)
        workload = {
            "metadata": {"name": "reader", "namespace": namespace},
            "spec": {"template": pod},
        }
        pod["metadata"]["labels"] = {COMPONENT: "reader"}
        place = self.stack.enter_context(self.node.place())
        reader = start(
            self.node, Pod.of(workload, self.pods[BROKER].folder.parent, {}), self.image, place
        )
        self.stack.callback(_leave_none, reader)
        time.sleep(1)
        for words in (
            ("export", f"/runs/{run}", "/runs/exported"),
            ("report", f"/runs/{run}", "--out", "/tmp/report.html"),
        ):
            reader.run("horizonrl", *words)
        sizes = reader.run("du", "-sh", "/runs/exported", "/tmp/report.html")
        say(f"in the reader, export and report: {' '.join(sizes.split())}")
        reader.stop()

    def start_again(self, name: str) -> None:
        """Start a role of the finished run again; raise RunFailed unless it ends at once and leaves all as it is."""
        before, cpu = (self.streams(), self.written()), _children_s()
        began = time.monotonic()
        process = self.start(name).process
        code = process.wait(60)
        took_s, used_s = time.monotonic() - began, _children_s() - cpu
        say(
            f"{name}, started again, ended with code {code} after {took_s:.2f} s ({used_s:.2f} s of a CPU)"
        )
        # Of a CPU: on a busy machine the clock counts what others do.
        if code or used_s > self.within_s:
            raise RunFailed(
                f"it should end with code 0 within {self.within_s:g} s: see {self.running[name].log}"
            )
        if (self.streams(), self.written()) != before:
            raise RunFailed(
                f"{name} has changed a stream or a file of the finished run: {before} before"
            )
        del self.running[name]

    def written(self) -> dict[str, int]:
        """Return when each file of the claims was last written, the broker's apart."""
        claims = [
            each
            for each in self.node.cluster.claims.iterdir()
            if not each.name.endswith(f"-{BROKER}-0")
        ]
        files = [file for claim in claims for file in claim.rglob("*") if file.is_file()]
        return {str(file): file.stat().st_mtime_ns for file in files}


def main(argv: Sequence[str]) -> int:
    """Return the exit code: 0 if the run has finished, and each role ends at once when it is started again."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.trial", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="what rootfs.sh has made")
    parser.add_argument("overlay", type=Path, help="a folder for `kubectl kustomize`")
    parser.add_argument("--chart", type=Path, required=True, help="NATS' own chart, as a .tgz")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="changes of the recipe",
    )
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--for-s", type=float, default=3600.0, help="longest run, in seconds")
    parser.add_argument(
        "--within-s",
        type=float,
        default=2.0,
        help="longest start in a finished run, in seconds of a CPU",
    )
    given = parser.parse_args(argv)
    for signum in (signal.SIGINT, signal.SIGTERM):  # so that no container stays
        signal.signal(signum, lambda *_: sys.exit(1))
    try:
        with ExitStack() as stack:
            attempt(given, stack)
    except (HorizonError, OSError, subprocess.SubprocessError) as error:
        say(f"failed: {error} {getattr(error, 'stderr', None) or ''}")
        return 1
    return 0


def attempt(given: argparse.Namespace, stack: ExitStack) -> None:
    work = (given.folder / "trial").resolve()
    manifests = [*rendered(given.overlay), *rendered_chart(given.chart)]
    workloads = {
        each["metadata"]["name"]: each
        for each in manifests
        if each["kind"] in ("Job", "StatefulSet")
    }
    run = workloads["controller"]["metadata"]["labels"][INSTANCE]
    shutil.rmtree(work / "pods", ignore_errors=True)
    for claim in made_claims(manifests):
        shutil.rmtree(work / "claims" / claim, ignore_errors=True)
    (work / "claims").mkdir(parents=True, exist_ok=True)
    secrets = make_secrets(work / "keys", run, given.actors)
    trial = Trial(
        node=stack.enter_context(
            TrialNode(Surroundings(manifests, secrets, work / "claims")).serving()
        ),
        stack=stack,
        image=image_of(given.folder),
        pods=dict(all_pods(workloads, work / "pods", variables(given.set), given.actors)),
        within_s=given.within_s,
    )
    trial.prepare()
    for name in trial.pods:
        started = trial.start(name)
        # As an operator waits for the chart; roles wait for each other by themselves.
        if name == BROKER:
            while "startupProbe" not in started.passed:
                trial.probe(started)
                time.sleep(0.1)
    trial.run_to_the_end(given.for_s)
    trial.end_actors()
    (run_dir,) = [each for each in (work / "claims").glob(f"*/{run}") if each.is_dir()]
    last = json.loads((run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    say(
        f"the run is finished: step {last['step']}, {trial.restarts} restarts; streams {trial.streams()}"
    )
    trial.look(run, work / "keys")
    for name in (name for name in trial.pods if name != BROKER):
        trial.start_again(name)
    trial.collect(run, str(workloads["learner"]["metadata"]["namespace"]))
    code, took_s = trial.running[BROKER].stop()
    say(f"{BROKER} was asked to stop and has ended with code {code} after {took_s:.1f} s")


def _leave_none(started: Started) -> None:
    """Leave no container behind, whatever happens."""
    if started.process.poll() is None:
        started.kill(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.process.wait(10)


def _children_s() -> float:
    """Return the CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
