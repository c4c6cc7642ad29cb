"""What every environment around a game shares: no dependence on the hash seed, bounds, and one end."""

import asyncio

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.envs import registry
from horizonrl.envs.formats import MAX_ACTION_CHARS
from tests.envs.hash_seeds import printed_under_hash_seeds

FROZEN = {
    "deepsearch": "c951e713a0f148c0",
    "household": "6816e30b33032e77",
    "maze": "c450ce7c94f8de5b",
    "shop": "8d633d9257dae73b",
    "sql": "8ca8d45722942445",
    "wordle": "4b7ea41c108eb89b",
    "academia": "b406efcca5fd5879",
    "movie": "3a6e60d87b979bc4",
    "sheet": "058a83e68bba9bb6",
    "todo": "83a16c626c4783a6",
    "weather": "e1a360f73d2f5b5b",
}
"""Of each environment the digest of its list and of some episodes: what differs is another `version`."""
EPISODES = """
import asyncio, hashlib, sys
from horizonrl.envs import registry

async def main():
    for env_id in sys.argv[1:]:
        digest, environment = hashlib.sha256(), registry.make(env_id, {"format": "plain"})
        listed = registry.tasks(env_id)
        digest.update(repr(listed).encode())
        for task in listed[:: len(listed) // 12]:
            digest.update((await environment.reset(task.task_id)).text.encode())
            expert, step = environment.expert(), None
            while step is None or not step.terminated:
                step = await environment.step(expert.act(""))
                digest.update(step.observation.encode())
        print(env_id, digest.hexdigest())

asyncio.run(main())
"""


def test_lists_and_episodes_are_those_that_were_frozen_whatever_the_hash_seed() -> None:
    (printed,) = printed_under_hash_seeds(EPISODES, *FROZEN, timeout_s=120)
    found = dict(line.split() for line in printed.splitlines())
    assert {env_id: digest[:16] for env_id, digest in found.items()} == FROZEN


@pytest.mark.parametrize("env_id", FROZEN)
async def test_an_action_of_great_length_is_refused_and_an_observation_bounded(env_id: str) -> None:
    environment = registry.make(
        env_id, {"format": "plain", "style": "compact", "max_observation_chars": 600}
    )
    task = registry.tasks(env_id)[0]
    assert len((await environment.reset(task.task_id)).text) <= 600
    step = await environment.step("x" * 100_000)
    assert (
        step.observation
        == f"An action has {MAX_ACTION_CHARS} characters at most; this one has 100000."
    )
    assert (step.reward, step.terminated) == (0, False)


@pytest.mark.parametrize("env_id", FROZEN)
def test_a_first_observation_that_does_not_fit_is_a_config_error(env_id: str) -> None:
    async def begin() -> None:
        environment = registry.make(env_id, {"max_observation_chars": 64})
        await environment.reset(registry.tasks(env_id)[0].task_id)

    with pytest.raises(ConfigError, match="max_observation_chars is 64"):
        asyncio.run(begin())
