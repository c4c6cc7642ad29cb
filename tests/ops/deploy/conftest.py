from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.cli.parser import parse
from tests.ops.deploy.manifests import INSTANCE, container_of, pod_of, sources


@pytest.fixture
def config_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes a role's config as its pod would: from its command, its files and its environment."""

    def load(overlay: str, role: str) -> RunConfig:
        container = container_of(overlay, role)
        (run_name,) = [variable for variable in container["env"] if variable["name"].startswith("HORIZONRL_")]
        assert run_name["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{INSTANCE}']"
        monkeypatch.setenv(run_name["name"], pod_of(overlay, role)["metadata"]["labels"][INSTANCE])
        arguments, overrides = parse(container["command"][1:])
        assert (container["command"][0], arguments.command) == ("horizonrl", role)
        texts, _ = sources(overlay, role)
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        return RunConfig.load(
            [tmp_path / recipe.relative_to("/etc/horizonrl") for recipe in arguments.recipes], overrides
        )

    return load
