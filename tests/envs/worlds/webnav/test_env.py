import asyncio

import pytest
from pydantic import ValidationError

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import Step
from horizonrl.envs.worlds.webnav.env import WebNav
from tests.envs.hash_seeds import printed_under_hash_seeds

OBSERVATIONS = """
import asyncio, hashlib
from horizonrl.envs.worlds.webnav.env import WebNav

async def main():
    digest = hashlib.sha256()
    for style in ("full", "compact"):
        environment = WebNav(style=style, format="plain")
        for task in environment.tasks()[::9]:
            observation = (await environment.reset(task.task_id)).text
            expert = environment.expert()
            while observation != "Stopped.":
                digest.update(observation.encode())
                observation = (await environment.step(expert.act(observation))).observation
    print(digest.hexdigest())

asyncio.run(main())
"""


def play(task_id: str, *actions: str) -> Step:
    """Return the last step; `expert` lets the expert act until it would stop."""

    async def played() -> Step:
        environment = WebNav(style="compact", format="plain")
        observation = (await environment.reset(task_id)).text
        expert = environment.expert()
        for action in actions:
            if action != "expert":
                step = await environment.step(action)
                observation = step.observation
                continue
            while not (chosen := expert.act(observation)).startswith("stop"):
                observation = (await environment.step(chosen)).observation
        return step

    return asyncio.run(played())


def test_observations_do_not_depend_on_the_hash_seed() -> None:
    assert len(printed_under_hash_seeds(OBSERVATIONS)) == 1


def test_the_compact_first_observation_is_terse() -> None:
    text = asyncio.run(WebNav(style="compact", format="plain").reset("star-repo-0")).text
    assert text == (
        "Actions: click [id] | type [id] [text] [1] | scroll [down] | go_back | stop [answer]\n"
        "Task: Star compass.\n"
        "Code\n"
        "[1] link 'compass'\n"
        "[2] link 'teapot'"
    )


def test_a_write_task_wants_the_change_and_nothing_else() -> None:
    assert play("star-repo-0", "stop [done]").reward == 0
    assert play("star-repo-0", "expert", "stop [done]").reward == 1
    meddle = ("goto [http://shop/account]", "type [1] [1] [1]", "goto [http://code/]")
    meddled = play("star-repo-0", *meddle, "expert", "stop [done]")
    assert meddled.info == {"answer_is_right": True, "sites_are_right": False}


def test_a_read_task_wants_the_answer_and_sites_as_they_were() -> None:
    assert play("stars-of-repo-0", "expert", "stop [-1]").info == {
        "answer_is_right": False,
        "sites_are_right": True,
    }
    assert not play("stars-of-repo-0", "expert", "stop []").success


async def test_an_episode_ends_with_stop_and_is_paid_once() -> None:
    environment = WebNav(format="plain")
    await environment.reset("star-repo-0")
    assert (await environment.step("stop")).terminated
    with pytest.raises(EnvironmentFailure, match="the episode is over"):
        await environment.step("stop")


def test_a_reply_without_an_action_is_told_what_there_is() -> None:
    assert play("star-repo-0", "dance").observation.startswith(
        "There is no such action. The actions are: click [{id}]"
    )


def test_two_instances_share_no_site() -> None:
    async def meddle() -> str:
        one, other = WebNav(format="plain"), WebNav(format="plain")
        await one.reset("star-repo-0")
        await other.reset("star-repo-0")
        await one.step("goto [http://shop/account]")
        await one.step("type [14] [changed] [1]")
        return (await one.step("goto [http://shop/account]")).observation + (
            await other.step("goto [http://shop/account]")
        ).observation

    assert asyncio.run(meddle()).count("changed") == 1


def test_the_expert_says_so_when_it_is_lost() -> None:
    with pytest.raises(EnvironmentFailure, match="finds no 'compass'"):
        asyncio.run(lost())


async def lost() -> None:
    environment = WebNav(style="compact")
    await environment.reset("star-repo-0")
    environment.expert().act("an empty page")


@pytest.mark.parametrize("task_id", ["", "star-repo", "star-repo-999", "star_repo-0"])
def test_a_task_that_does_not_exist_is_a_config_error(task_id: str) -> None:
    with pytest.raises(ConfigError, match="webnav has no task"):
        asyncio.run(WebNav().reset(task_id))


def test_a_first_observation_that_does_not_fit_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="max_observation_chars is 100: raise the limit"):
        asyncio.run(WebNav(max_observation_chars=100).reset("star-repo-0"))


@pytest.mark.parametrize(
    "options", [{"style": "tiny"}, {"format": "xml"}, {"max_observation_chars": 3}, {"x": 1}]
)
def test_a_wrong_option_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        WebNav(**options)  # type: ignore[arg-type]


def test_the_version_names_the_style() -> None:
    assert {WebNav().version, WebNav(style="compact").version} == {"2-full", "2-compact"}
