from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.cli.parser import parse
from tests.ops.deploy.manifests import (
    INSTANCE,
    KUBERNETES,
    RELEASE,
    Manifest,
    container_of,
    pod_of,
    rendered,
    sources,
)


@pytest.fixture
def config_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes a role's config as its pod would: from its command, its files and its environment."""

    def load(overlay: str, role: str) -> RunConfig:
        container = container_of(overlay, role)
        (run_name,) = [
            variable for variable in container["env"] if variable["name"].startswith("HORIZONRL_")
        ]
        assert run_name["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{INSTANCE}']"
        monkeypatch.setenv(run_name["name"], pod_of(overlay, role)["metadata"]["labels"][INSTANCE])
        arguments, overrides = parse(container["command"][1:])
        assert (container["command"][0], arguments.command) == ("horizonrl", role)
        texts, _ = sources(overlay, role)
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        return RunConfig.load(
            [tmp_path / recipe.relative_to("/etc/horizonrl") for recipe in arguments.recipes],
            overrides,
        )

    return load


@pytest.fixture
def with_components(tmp_path: Path) -> Any:
    """Return what renders an overlay with more components and patches, as a user's own kustomization."""

    def render(
        overlay: str, *components: str, patches: str = ""
    ) -> dict[tuple[str, str], Manifest]:
        relative = Path("/".join([".."] * (len(tmp_path.parts) - 1))) / KUBERNETES.relative_to("/")
        listed = [str(relative / "components" / each) for each in components]
        kustomization = {"resources": [str(relative / "overlays" / overlay)], "components": listed}
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization) + patches)
        manifests = list(rendered(str(tmp_path)))
        for each in manifests:
            if each["kind"] not in ("ScaledObject", "PodMonitor"):
                kubernetes_validate.validate(each, RELEASE, strict=True)
        return {(each["kind"], each["metadata"]["name"]): each for each in manifests}

    return render
