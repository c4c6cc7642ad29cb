"""Odd replies to every game of TextArena and every dataset of reasoning-gym; minutes, so `pytest -m slow` runs it."""

import re
import time

import pytest

from horizonrl.envs.api import Environment
from horizonrl.envs.hubs.reasoning_gym import ReasoningGym, datasets
from horizonrl.envs.hubs.textarena import GAMES, TextArena
from horizonrl.envs.odd_texts import odd_texts
from horizonrl.envs.text_limits import readable

pytestmark = pytest.mark.slow
SLOW_S = 5.0
MOVE = re.compile(r"\[[^\]\n]{1,20}\]")
ANSWERS = ("9**9**9", "1/0", "[[1,2],[3]]", "{}", "[]", "1e9999", "0x10", "\N{VULGAR FRACTION ONE HALF}", "nan", "-inf",
           "[1, 2", "(" * 1_000, "a,b,c", "1 2 3 4 5 6 7")  # fmt: skip


async def await_answer(environment: Environment, task_id: str, replies: list[str]) -> None:
    """Every reply is answered in time, whatever it is."""
    await environment.reset(task_id)
    for reply in replies:
        began = time.thread_time()
        step = await environment.step(readable(reply))
        assert time.thread_time() - began < SLOW_S, reply[:40]
        assert -1.0 <= step.reward <= 1.0
        if step.terminated or step.truncated:
            await environment.reset(task_id)


@pytest.mark.parametrize("game", GAMES)
async def test_no_reply_breaks_a_game(game: str) -> None:
    environment = TextArena(format="plain")
    moves = list(dict.fromkeys(MOVE.findall((await environment.reset(f"{game}-0")).text)))[:6] or [
        "[1]"
    ]
    await await_answer(
        environment, f"{game}-0", [text for move in moves for text in (move, *odd_texts(move))]
    )
    await environment.close()


@pytest.mark.parametrize("name", datasets())
async def test_no_answer_breaks_a_scorer(name: str) -> None:
    environment = ReasoningGym(prompt="none", max_observation_chars=200_000)
    await environment.reset(f"{name}-1")
    known = environment._current().answer or "A+1 B-2"
    answers = [f"<answer>{text}</answer>" for text in (*odd_texts(known), *ANSWERS)]
    await await_answer(environment, f"{name}-1", answers)
    await environment.close()
