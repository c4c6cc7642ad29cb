"""The node of a trial: a network with an address per pod, containers in it, and the probes that a kubelet makes."""

import itertools
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from horizonrl.common.errors import RunFailed
from tests.trial.pods import Image, Manifest, Pod, Surroundings, bound, default_seccomp

RUNTIME = ("runc",)
PAUSE = ("unshare", "--pid", "--fork", "--kill-child", "sleep", "infinity")


@dataclass
class TrialNode:
    """Addresses and names of pods. The prefix holds this process's id, so that two trials do not meet."""

    cluster: Surroundings
    names: dict[str, str] = field(default_factory=dict)
    """Addresses by the names that pods use: what a cluster's DNS answers."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(2))

    @property
    def prefix(self) -> str:
        return f"hrt{os.getpid()}"

    @property
    def network(self) -> str:
        return f"10.214.{os.getpid() % 250}"

    @contextmanager
    def serving(self) -> Iterator["TrialNode"]:
        """Have a bridge, on which this machine is number 1."""
        _ip("link", "add", self.prefix, "type", "bridge")
        try:
            _ip("addr", "add", f"{self.network}.1/24", "dev", self.prefix)
            _ip("link", "set", self.prefix, "up")
            yield self
        finally:
            _ip("link", "del", self.prefix)

    @contextmanager
    def place(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Have a pod's address and the namespaces that its containers share: the network, and the processes' numbers.

        A process of the node keeps them, as a kubelet's pause container does: a role is not process 1 of its pod.
        """
        number = next(self._numbers)
        name, address = f"{self.prefix}-{number}", f"{self.network}.{number}"
        _ip("netns", "add", name)
        try:
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", self.prefix, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", name, "link", "set", interface, "up")
            with subprocess.Popen(PAUSE) as pause:
                try:
                    while not (children := psutil.Process(pause.pid).children()):
                        time.sleep(0.01)
                    yield (
                        address,
                        {"network": f"/run/netns/{name}", "pid": f"/proc/{children[0].pid}/ns/pid"},
                    )
                finally:
                    pause.kill()
        finally:
            _ip("netns", "del", name)

    def hosts(self, folder: Path) -> Iterator[Manifest]:
        """Write /etc/hosts in place of a cluster's DNS, and yield its mount."""
        lines = [
            "127.0.0.1 localhost",
            *(f"{address} {name}" for name, address in self.names.items()),
        ]
        (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
        yield bound(folder / "hosts", "/etc/hosts", read_only=True)


@dataclass
class Started:
    """A pod's container that runs or has ended."""

    pod: Pod
    address: str
    log: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)
    passed: set[str] = field(default_factory=set)
    """The probes that have passed."""
    _alive: float = 0.0
    _looked: float = 0.0

    @property
    def id(self) -> str:
        return self.pod.folder.name

    def probe(self, kind: str) -> bool:
        """Make one of the manifest's probes once, as a kubelet would."""
        asked = self.pod.container[kind]
        port = asked["httpGet"]["port"]
        ports = {each["name"]: each["containerPort"] for each in self.pod.container["ports"]}
        url = f"http://{self.address}:{ports.get(port, port)}{asked['httpGet']['path']}"
        try:
            with urllib.request.urlopen(url, timeout=asked.get("timeoutSeconds", 1)) as answer:
                return 200 <= int(answer.status) < 400
        except (urllib.error.URLError, OSError):
            return False

    def await_once(self, kind: str) -> float | None:
        """Make a probe and return the seconds since the start if it passes; raise RunFailed for a late startupProbe."""
        if self.probe(kind):
            self.passed.add(kind)
            self._alive = time.monotonic()
            return time.monotonic() - self.began
        window_s = self._window_s(kind)
        if kind == "startupProbe" and time.monotonic() - self.began > window_s:
            raise RunFailed(
                f"{kind} of {self.pod.name} has not passed within {window_s} s: see {self.log}"
            )
        return None

    def stay_alive(self) -> None:
        """Make a livenessProbe when it is due; raise RunFailed when it has failed for its whole window."""
        now, kind = time.monotonic(), "livenessProbe"
        if now - self._looked < self.pod.container[kind]["periodSeconds"]:
            return
        self._looked = now
        if self.probe(kind):
            self._alive = now
        elif now - self._alive > self._window_s(kind):
            raise RunFailed(
                f"{kind} of {self.pod.name} has failed for {now - self._alive:.0f} s: see {self.log}"
            )

    def _window_s(self, kind: str) -> float:
        """Return the seconds after which a probe has failed for good."""
        asked = self.pod.container[kind]
        return float(
            asked.get("initialDelaySeconds", 0)
            + asked["periodSeconds"] * asked.get("failureThreshold", 3)
        )

    def run(self, *command: str) -> str:
        """Run a command in the container, as `kubectl exec` does, and return what it printed."""
        words = [*RUNTIME, "exec", self.id, *command]
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout

    def kill(self, signum: signal.Signals) -> None:
        subprocess.run(
            [*RUNTIME, "kill", self.id, str(int(signum))],
            check=False,
            capture_output=True,
            timeout=30,
        )

    def stop(self) -> tuple[int, float]:
        """End the container as a kubelet does, SIGTERM and then its grace; return its code and how long it took."""
        asked = time.monotonic()
        self.kill(signal.SIGTERM)
        try:
            self.process.wait(self.pod.grace_s)
        except subprocess.TimeoutExpired:
            self.kill(signal.SIGKILL)
            raise RunFailed(
                f"{self.pod.name} has not ended within {self.pod.grace_s} s of SIGTERM"
            ) from None
        return self.process.returncode, time.monotonic() - asked


def start(node: TrialNode, pod: Pod, image: Image, place: tuple[str, Mapping[str, str]]) -> Started:
    """Start a pod's container in its place; its output goes to a file beside its folder."""
    address, namespaces = place
    mounts = [*node.hosts(_folder(pod)), *pod.mounts(node.cluster, image)]
    config = pod.runtime_config(image, mounts, namespaces, default_seccomp())
    (pod.folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    log = pod.folder.with_suffix(".log")
    with log.open("ab") as sink:
        command = [*RUNTIME, "run", "--bundle", str(pod.folder), pod.folder.name]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
        )
    return Started(pod, address, log, process)


def _folder(pod: Pod) -> Path:
    pod.folder.mkdir(parents=True, exist_ok=True)
    return pod.folder


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)
