"""TextWorld's own package, where it is installed: games are made here, won by their walkthroughs, and kept."""

import asyncio
from pathlib import Path

import pytest

from horizonrl.envs.api import Step

pytest.importorskip("textworld", reason="320 MB: pip install 'horizonrl[textworld]'")

from horizonrl.envs.hubs.textworld import FAMILIES, TextWorld, clean_feedback


def won(task_id: str, games: Path) -> tuple[str, list[Step]]:
    async def play() -> tuple[str, list[Step]]:
        environment = TextWorld(games=games)
        try:
            first, steps = (await environment.reset(task_id)).text, list[Step]()
            expert = environment.expert()
            while not (steps and steps[-1].terminated):
                steps.append(await environment.step(expert.act("")))
            return first, steps
        finally:
            await environment.close()

    return asyncio.run(play())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_game_is_won_by_its_walkthrough_and_is_the_same_when_it_is_made_again(
    family: str, tmp_path: Path
) -> None:
    first, steps = won(f"{family}-0", tmp_path / "one")
    assert steps[-1].success
    assert sum(step.reward for step in steps) == pytest.approx(1.0)
    assert (first, steps) == won(f"{family}-0", tmp_path / "other")
    assert "$$" not in first
    assert "RESTART" not in steps[-1].observation


@pytest.mark.parametrize("command", ["quit", "restart", "save", "RESTORE", "undo", "script x", "é"])
def test_commands_to_the_interpreter_are_answered_here(
    command: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    games = tmp_path_factory.getbasetemp() / "games"

    async def play() -> Step:
        environment = TextWorld(games=games, format="plain")
        await environment.reset("coin_collector-0")
        step = await environment.step(command)
        await environment.close()
        return step

    step = asyncio.run(play())
    assert "That command is not played here" in step.observation
    assert not step.terminated


def test_what_a_terminal_would_show_is_left_out() -> None:
    assert (
        clean_feedback("   |  \\$$\n Who's there?\n\n\n\n> \n" + " " * 60 + "-= Kitchen =-0/3")
        == "Who's there?"
    )
