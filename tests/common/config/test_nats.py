"""Keys that only NATS has are in `[broker.nats]`; their former place names the present one."""

from pathlib import Path

import pytest

from horizonrl.common.config.nats import NatsSection
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.ops.rundir.directory import to_toml

VALUES = {
    "user": "me",
    "credentials": "run.creds",
    "nkey_seed": "actor.nk",
    "ca_file": "ca.pem",
    "keys": "keys",
    "durability": "power",
}


@pytest.mark.parametrize(("name", "value"), VALUES.items())
def test_a_key_in_its_former_place_names_the_present_one(tmp_path: Path, name: str, value: str) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[broker]\n{name} = "{value}"')
    for recipes, overrides in (([recipe], []), ([], [f"--broker.{name}={value}"])):
        with pytest.raises(ConfigError, match=rf"broker: broker\.{name} is now broker\.nats\.{name}"):
            RunConfig.load(recipes, overrides)
    loaded = RunConfig.load([], [f"--broker.nats.{name}={value}"]).broker.nats
    assert str(getattr(loaded, name)) == value


def test_every_key_that_was_moved_there_is_refused_in_its_old_place() -> None:
    assert {*VALUES, "password"} == set(NatsSection.model_fields) - {"domain", "replicas"}, "these two are new"


def test_the_config_of_an_earlier_run_is_read(tmp_path: Path) -> None:
    earlier = tmp_path / "config.toml"
    defaults = "\n".join(f'{name} = "none"' for name in ("user", "credentials", "nkey_seed", "ca_file", "keys"))
    earlier.write_text(f'[broker]\nack_wait_s = 7\n{defaults}\ndurability = "process"')
    assert RunConfig.load([earlier]).broker.ack_wait_s == 7
    assert RunConfig.load([earlier], ["--broker.nats.durability=power"]).broker.nats.durability == "power"


def test_the_resolved_config_is_a_recipe_for_the_same_run(tmp_path: Path) -> None:
    config = RunConfig.load([], ["--broker.nats.user=me", "--broker.nats.durability=power"])
    resolved = tmp_path / "config.toml"
    resolved.write_text(to_toml(config))
    assert RunConfig.load([resolved]) == config
    assert "password" not in resolved.read_text()


def test_a_misspelt_key_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"broker\.nats\.nkey: no such key.*Known keys: .*nkey_seed"):
        RunConfig.load([], ["--broker.nats.nkey=x"])
