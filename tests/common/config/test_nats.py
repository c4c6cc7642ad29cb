"""Keys that only NATS has are in `[broker.nats]`."""

from pathlib import Path

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.ops.rundir.directory import to_toml


def test_the_resolved_config_is_a_recipe_for_the_same_run(tmp_path: Path) -> None:
    config = RunConfig.load([], ["--broker.nats.user=me", "--broker.nats.durability=power"])
    resolved = tmp_path / "config.toml"
    resolved.write_text(to_toml(config))
    assert RunConfig.load([resolved]) == config
    assert "password" not in resolved.read_text()


def test_a_misspelt_key_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"broker\.nats\.nkey: no such key.*Known keys: .*nkey_seed"
    ):
        RunConfig.load([], ["--broker.nats.nkey=x"])
