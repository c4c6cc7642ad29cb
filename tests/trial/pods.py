"""A pod of a manifest as a node makes it: its volumes as folders, and its container as an OCI runtime takes it."""

import base64
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Manifest = dict[str, Any]

SECCOMP = Path("/usr/share/containers/seccomp.json")
"""What `seccompProfile: RuntimeDefault` stands for; Debian's golang-github-containers-common brings it."""
UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
EMPTY_DIR, CLAIM, PLAIN = 0o2777, 0o2775, 0o2755
MASKED = [
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/sched_debug",
]
READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]


@dataclass(frozen=True)
class Image:
    """A root file system and what the image says about it."""

    root: Path
    environment: Mapping[str, str]
    working_directory: str = "/"
    entrypoint: Sequence[str] = ()


@dataclass(frozen=True)
class Surroundings:
    """What pods find outside of themselves: objects by name, and the folders that stand for claims."""

    manifests: Sequence[Manifest]
    secrets: Mapping[str, Mapping[str, bytes]]
    claims: Path

    def files(self, kind: str, name: str) -> dict[str, bytes]:
        """Return the files of a ConfigMap or a Secret. Raises KeyError with its name if nobody has made it."""
        if kind == "Secret":
            return dict(self.secrets[name])
        for each in self.manifests:
            if (each["kind"], each["metadata"]["name"]) == (kind, name):
                binary = {
                    key: base64.b64decode(text) for key, text in each.get("binaryData", {}).items()
                }
                return {key: text.encode() for key, text in each.get("data", {}).items()} | binary
        raise KeyError(f"{kind} {name}")


@dataclass(frozen=True)
class Pod:
    """One pod of a workload, with the one container of it that is started."""

    name: str
    labels: Mapping[str, str]
    spec: Manifest
    container: Manifest
    folder: Path
    added: Mapping[str, str] = field(default_factory=dict)
    """Variables that this trial sets besides the manifest's: its only change to what the manifest says."""

    @classmethod
    def of(
        cls, workload: Manifest, folder: Path, added: Mapping[str, str], index: int = 0
    ) -> "Pod":
        """Return the pod that Kubernetes makes of a workload: number `index` of a StatefulSet or of an indexed Job."""
        template, name = workload["spec"]["template"], f"{workload['metadata']['name']}-{index}"
        labels = {**template["metadata"]["labels"], "apps.kubernetes.io/pod-index": str(index)}
        container = template["spec"]["containers"][0]
        if workload["spec"].get("completionMode") == "Indexed":
            added = {**added, "JOB_COMPLETION_INDEX": str(index)}
        spec = (
            template["spec"]
            | _claimed(workload, name)
            | {"namespace": workload["metadata"].get("namespace")}
        )
        return cls(name, labels, spec, container, folder / name, added)

    @property
    def hostname(self) -> str:
        return str(self.spec.get("hostname", self.name))

    @property
    def grace_s(self) -> float:
        return float(self.spec.get("terminationGracePeriodSeconds", 30))

    def environment(self, image: Image) -> dict[str, str]:
        """Return the container's variables: the image's, the manifest's with their references, the trial's."""
        found = {**image.environment, "HOSTNAME": self.hostname}
        for variable in self.container.get("env", ()):
            if "valueFrom" in variable:
                found[variable["name"]] = self._field(
                    variable["valueFrom"]["fieldRef"]["fieldPath"]
                )
            else:
                found[variable["name"]] = expanded(variable["value"], found)
        return found | dict(self.added)

    def _field(self, path: str) -> str:
        if path == "metadata.name":
            return self.name
        label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
        if label is None:
            raise ValueError(f"a pod's variable refers to {path}, which this trial does not know")
        return self.labels[label[1]]

    def mounts(self, cluster: Surroundings, image: Image) -> Iterator[Manifest]:
        """Make the pod's volumes anew and yield what is mounted. A claim keeps what it has."""
        shutil.rmtree(self.folder / "volumes", ignore_errors=True)
        group = self.spec["securityContext"]["fsGroup"]
        volumes = {each["name"]: each for each in self.spec["volumes"]}
        environment = self.environment(image)
        for mount in self.container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                options = ["nosuid", "nodev", f"mode={EMPTY_DIR:o}", f"gid={group}"]
                options.append(f"size={size_bytes(volume['emptyDir']['sizeLimit'])}")
                yield {
                    "destination": mount["mountPath"],
                    "type": "tmpfs",
                    "source": "tmpfs",
                    "options": options,
                }
                continue
            source = self._folder(volume, cluster, group)
            if "subPathExpr" in mount:
                source /= expanded(mount["subPathExpr"], environment)
            read_only = mount.get("readOnly") or volume.get("persistentVolumeClaim", {}).get(
                "readOnly"
            )
            yield bound(source, mount["mountPath"], read_only=bool(read_only))

    def _folder(self, volume: Manifest, cluster: Surroundings, group: int) -> Path:
        if "persistentVolumeClaim" in volume:
            return _made(
                cluster.claims / str(volume["persistentVolumeClaim"]["claimName"]), group, CLAIM
            )
        folder = self.folder / "volumes" / str(volume["name"])
        if "emptyDir" in volume:
            return _made(folder, group, EMPTY_DIR)
        projected = volume.get("projected")
        for source in projected["sources"] if projected else [volume]:
            mode = (projected or source.get("configMap") or source["secret"]).get(
                "defaultMode", 0o644
            )
            for path, content in _files(source, cluster).items():
                place = folder / path
                _made(place.parent, group, PLAIN)
                place.write_bytes(content)
                os.chown(place, 0, group)
                place.chmod(mode)
        return folder

    def runtime_config(
        self,
        image: Image,
        mounts: Sequence[Manifest],
        namespaces: Mapping[str, str],
        seccomp: Manifest | None,
    ) -> Manifest:
        """Return the container as an OCI runtime takes it; `namespaces` are those of the pod, by type."""
        security, own = self.spec["securityContext"], self.container["securityContext"]
        words = [*self.container.get("command", image.entrypoint), *self.container.get("args", ())]
        environment = self.environment(image)
        made = [{"type": kind} for kind in ("mount", "ipc", "uts") if kind not in namespaces]
        joined = [{"type": kind, "path": path} for kind, path in namespaces.items()]
        places = [each["destination"] for each in mounts]
        memory = self.container["resources"]["limits"]["memory"]
        return {
            "ociVersion": "1.0.2",
            "hostname": self.hostname,
            "root": {"path": str(image.root), "readonly": own["readOnlyRootFilesystem"]},
            "process": {
                "terminal": False,
                "user": {
                    "uid": security["runAsUser"],
                    "gid": security["runAsGroup"],
                    "additionalGids": [security["fsGroup"]],
                },
                "args": [expanded(word, environment) for word in words],
                "env": [f"{name}={value}" for name, value in environment.items()],
                "cwd": image.working_directory,
                "capabilities": {
                    kind: []
                    for kind in ("bounding", "effective", "permitted", "inheritable", "ambient")
                },
                "noNewPrivileges": not own["allowPrivilegeEscalation"],
            },
            "mounts": [*(each for each in SYSTEM if each["destination"] not in places), *mounts],
            "linux": {
                "namespaces": made + joined,
                "resources": {"memory": {"limit": size_bytes(memory)}},
                "maskedPaths": MASKED,
                "readonlyPaths": READ_ONLY,
                **({"seccomp": seccomp} if seccomp else {}),
            },
        }


SYSTEM: list[Manifest] = [
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {
        "destination": "/dev",
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "mode=755", "size=65536k"],
    },
    {
        "destination": "/dev/pts",
        "type": "devpts",
        "source": "devpts",
        "options": ["newinstance", "ptmxmode=0666"],
    },
    {
        "destination": "/dev/shm",
        "type": "tmpfs",
        "source": "shm",
        "options": ["mode=1777", "size=65536k"],
    },
    {
        "destination": "/sys",
        "type": "sysfs",
        "source": "sysfs",
        "options": ["nosuid", "noexec", "nodev", "ro"],
    },
    {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]},
]


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """Return a text with its `$(NAME)` replaced, as Kubernetes does; unknown names stay."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), text)


def size_bytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMG]i)?", quantity).groups(default="")  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def bound(source: Path, destination: str, *, read_only: bool) -> Manifest:
    options = ["rbind", "rprivate", "ro" if read_only else "rw"]
    return {"destination": destination, "type": "bind", "source": str(source), "options": options}


def seccomp_profile(profile: Manifest) -> Manifest:
    """Return containers' own profile as an OCI runtime takes it, for a process without any capability on x86-64."""
    kept = [
        each
        for each in profile["syscalls"]
        if not each.get("includes", {}).get("caps")
        and "amd64" in each.get("includes", {}).get("arches", ["amd64"])
        and "amd64" not in each.get("excludes", {}).get("arches", [])
    ]
    taken = ("names", "action", "args", "errnoRet")
    calls = [{key: each[key] for key in taken if each.get(key)} for each in kept]
    own: Manifest = {
        key: profile[key] for key in ("defaultAction", "defaultErrnoRet") if key in profile
    }
    return {**own, "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"], "syscalls": calls}


def default_seccomp() -> Manifest | None:
    """Return this machine's default profile, None where there is none."""
    return (
        seccomp_profile(json.loads(SECCOMP.read_text(encoding="utf-8")))
        if SECCOMP.is_file()
        else None
    )


def _files(source: Manifest, cluster: Surroundings) -> dict[str, bytes]:
    """Return the files of a source of a volume by their paths in it."""
    ((kind, given),) = [(kind, source[key]) for kind, key in KINDS.items() if key in source]
    if given.get("optional") and kind == "Secret" and given["name"] not in cluster.secrets:
        return {}
    files = cluster.files(kind, given.get("secretName") or given["name"])
    if "items" in given:
        return {item["path"]: files[item["key"]] for item in given["items"]}
    return files


KINDS = {"ConfigMap": "configMap", "Secret": "secret"}


def _claimed(workload: Manifest, name: str) -> Manifest:
    """Return the volumes of a pod with those of its StatefulSet's claims."""
    claims = [each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())]
    made = [
        {"name": claim, "persistentVolumeClaim": {"claimName": f"{claim}-{name}"}}
        for claim in claims
    ]
    return {"volumes": [*itertools.chain(workload["spec"]["template"]["spec"]["volumes"], made)]}


def _made(folder: Path, group: int, mode: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    os.chown(folder, 0, group)
    folder.chmod(mode)
    return folder
