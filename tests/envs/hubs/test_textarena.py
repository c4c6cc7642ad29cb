"""TextArena's own package: every listed game is begun and played, and its rewards are the package's."""

import asyncio
from collections.abc import Sequence

import pytest

from horizonrl.envs.api import Step
from horizonrl.envs.hubs.textarena import GAMES, TextArena


def played(task_id: str, *replies: str) -> tuple[str, list[Step]]:
    async def play() -> tuple[str, list[Step]]:
        environment = TextArena(format="plain")
        try:
            first, steps = (await environment.reset(task_id)).text, list[Step]()
            for reply in replies:
                steps.append(await environment.step(reply))
                if steps[-1].terminated or steps[-1].truncated:
                    break
            return first, steps
        finally:
            await environment.close()

    return asyncio.run(play())


@pytest.mark.parametrize("game", GAMES)
def test_a_second_invalid_move_in_a_row_ends_every_game_with_the_packages_reward(game: str) -> None:
    first, steps = played(f"{game}-1", "[nonsense]", "[nonsense]", "[nonsense]")
    assert len(first) > 100
    assert steps[0].observation
    assert len(steps) == 2 or not any(step.reward for step in steps)
    assert not steps[-1].success
    assert -1.0 <= steps[-1].reward < 1.0


@pytest.mark.parametrize(
    "game", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0", "ThreeCardMonte-v0"]
)
def test_games_that_swap_reason_and_reward_say_the_reason(game: str) -> None:
    _, steps = played(f"{game}-0", "[nonsense]", "[nonsense]")
    assert "Reason: " in steps[0].observation
    assert not any(f"Reason: {digit}" in steps[0].observation for digit in range(10))


def test_a_game_is_won_by_its_rules() -> None:
    solution = ("A C", "A B", "C B", "A C", "B A", "B C", "A C")
    first, steps = played("TowerOfHanoi-v0-0", *(f"[{move}]" for move in solution))
    assert "Tower of Hanoi" in first
    assert (steps[-1].reward, steps[-1].success, len(steps)) == (1.0, True, 7)
    # Only what is new: the rules are not said again, and the agent's own words are in its chat already.
    assert all(
        "Tower of Hanoi" not in step.observation and "[A C]" not in step.observation
        for step in steps[:-1]
    )


def test_the_packages_turn_limit_truncates() -> None:
    wander: Sequence[str] = ["[A B]", "[B A]"] * 10
    _, steps = played("TowerOfHanoi-v0-0", *wander)
    assert (steps[-1].truncated, steps[-1].terminated, steps[-1].success) == (True, False, False)


def test_two_seeds_are_two_tasks_and_one_seed_is_one() -> None:
    assert played("Sudoku-v0-easy-1") == played("Sudoku-v0-easy-1")
    assert played("Sudoku-v0-easy-1") != played("Sudoku-v0-easy-2")
