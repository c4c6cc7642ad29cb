"""docs/kubernetes.md: its commands, secrets, paths and patches, held against the manifests and the code."""

import itertools
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from horizonrl.broker.api import Role
from horizonrl.broker.nats.key_folder import KeyFolder
from horizonrl.broker.nats.keys import make_keys
from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.cli.parser import parse
from tests.ops.deploy.manifests import KUBERNETES, ROLES, ROOT, VALUES, needs_kubectl, sources

pytestmark = needs_kubectl

PAGE = (ROOT / "docs/kubernetes.md").read_text()
COMMANDS = [
    shlex.split(line)
    for line in re.findall(r"^ {4,}((?:horizonrl|kubectl|helm|docker) .*)$", PAGE, re.MULTILINE)
]
SECRETS = [words for words in COMMANDS if "secret" in words]
PATCHES = re.findall(r"^```yaml\n(patches:\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
OURS = [words[words.index("horizonrl") :] for words in COMMANDS if "horizonrl" in words]


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_a_command_of_the_page_is_understood(words: list[str]) -> None:
    _, overrides = parse(words[1:])
    RunConfig.load([], overrides)


@pytest.mark.parametrize("number", range(len(PATCHES)))
def test_a_patch_of_the_page_changes_what_it_says(number: int, with_components: Any) -> None:
    found, before = with_components("gpu", patches=PATCHES[number]), with_components("gpu")
    (learner, actor), (former, _) = (
        [
            each["Job", "learner"]["spec"]["template"]["spec"],
            each["StatefulSet", "actor"]["spec"]["template"]["spec"],
        ]
        for each in (found, before)
    )
    models = next(each for each in learner["volumes"] if each["name"] == "models")
    if "image:" in PATCHES[number]:
        assert set(models) == {"name", "image"}
        assert models in actor["volumes"] and len(learner["volumes"]) == len(former["volumes"])
    elif "SPOT" in PATCHES[number]:
        assert "affinity" in actor and "affinity" not in learner
    else:
        assert "affinity" in actor and "affinity" in learner
        controller = found["Job", "controller"]["spec"]["template"]["spec"]
        assert all(each["imagePullSecrets"] for each in (learner, actor, controller))


def test_the_secrets_of_the_page_hold_the_files_that_are_mounted(tmp_path: Path) -> None:
    (first, *_) = [words for words in OURS if "--host" in words]
    make_keys(
        tmp_path / "keys",
        ["laptop", "nodes"],
        ["n"],
        actors=int(first[first.index("--actors") + 1]),
    )
    keys = KeyFolder(tmp_path / "keys")
    made = {}
    for words in SECRETS:
        dry = [*words, "--dry-run=client", "--output=yaml"]
        done = subprocess.run(dry, capture_output=True, text=True, timeout=30, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        secret = yaml.safe_load(done.stdout)
        made[secret["metadata"]["name"]] = set(secret["data"])
    assert made.pop("horizonrl-broker") == {"nats-server.conf", "server.pem", "server.key"}
    assert made.pop("horizonrl-learner-node") == {"ca.pem", "role.nk"}
    mounted = dict(
        itertools.chain.from_iterable(sources("small", role)[1].items() for role in ROLES)
    )
    assert {path.name for path in keys.seeds("laptop", Role.ACTOR)} < made["horizonrl-actor"]
    made["horizonrl-actor"] = {
        file for file in made["horizonrl-actor"] if not file.startswith("actor-")
    }
    assert {name: {f"keys/{file}" for file in files} for name, files in made.items()} == mounted
    seen_at = next(words for words in OURS if "--host" in words)
    assert (
        seen_at[seen_at.index("--seen-at") + 1]
        == VALUES["container"]["patch"][0]["value"]["mountPath"]
    )
    hosts = seen_at[seen_at.index("--host") + 1]
    assert urlsplit(yaml_url()).hostname == hosts
    assert keys.configuration.is_file()


def test_the_external_secrets_are_those_that_are_mounted() -> None:
    found = list(yaml.safe_load_all((KUBERNETES / "secrets/external-secrets.yaml").read_text()))
    made = {(each["metadata"]["namespace"], each["spec"]["target"]["name"]) for each in found}
    mounted = set(itertools.chain.from_iterable(sources("small", role)[1] for role in ROLES))
    assert made == {("nats", "horizonrl-broker"), *(("laptop", name) for name in mounted)}
    assert all(each["metadata"]["name"] == each["spec"]["target"]["name"] for each in found)


def yaml_url() -> str:
    found = re.search(r'url = "(.*)"', (KUBERNETES / "base/cluster.toml").read_text())
    assert found is not None
    return found[1]


def test_the_paths_of_the_page_are_there() -> None:
    named = set(re.findall(r"ops/deploy/(?:kubernetes|docker)[\w/.-]*", PAGE))
    assert all((ROOT / path.rstrip(".")).exists() for path in named), named
