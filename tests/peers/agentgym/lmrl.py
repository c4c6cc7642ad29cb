"""Our Maze and Wordle in AgentGym's style against LMRL-Gym's, which AgentGym's server plays, turn by turn.

LMRL-Gym's learner (jax) is not needed: empty modules replace its imports. For Wordle, AgentGym's server adds 1 to every
reward that is not above 0 and says `invalid word` where LMRL-Gym says nothing; the comparison does the same.
"""

import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType

from horizonrl.envs import registry
from horizonrl.envs.api import make_expert
from horizonrl.envs.worlds.games.maze import LMRL_GOAL, LMRL_STARTS

SEEDS = 980
WALKS = 20
"""Episodes from each of the maze's starts."""
_TEXT = namedtuple("_TEXT", "text is_action")


@dataclass(frozen=True, slots=True)
class LmrlComparison:
    game: str
    episodes: int
    turns: int
    same: int
    """Turns with the same text, reward and end."""
    solved: int


async def compare(agentgym: Path, lmrl: Path) -> list[LmrlComparison]:
    """Play both games on both sides. An expert makes about half of the moves, the others are random."""
    _answer_imports()
    sys.path[:0] = [str(lmrl), str(agentgym / "agentenv-lmrlgym" / "agentenv_lmrlgym" / "maze")]
    return [await _maze(), await _wordle(lmrl)]


def _answer_imports() -> None:
    """Install empty modules for the packages that LMRL-Gym imports but its games do not use."""
    names = ("termcolor", "IPython", "skimage", "skimage.draw", "LLM_RL", "LLM_RL.environment")
    modules = {name: ModuleType(name) for name in names}
    vars(modules["termcolor"])["colored"] = lambda text, colour: text
    vars(modules["IPython"])["embed"] = None
    vars(modules["skimage.draw"]).update(disk=None, random_shapes=None, rectangle=None)
    vars(modules["LLM_RL.environment"]).update(Text=_TEXT, TextEnv=object, TextHistory=tuple)
    sys.modules.update(modules)


async def _maze() -> LmrlComparison:
    from utils import manhatten_actions, setup_maze_env  # type: ignore[import-not-found]

    goal = [LMRL_GOAL[1], LMRL_GOAL[0]]
    ours = registry.make("maze", {"style": "agentgym", "format": "plain", "mazes": "lmrl"})
    turns = same = solved = 0
    for number, (column, row) in enumerate(LMRL_STARTS):
        for walk in range(WALKS):
            draw, done = Random(f"{number} {walk}"), False
            theirs, _, _ = setup_maze_env("double_t_maze", start_position=(row, column))
            first = theirs.reset(options={"goal": goal, "init_position": (row, column)})[0].text
            # A first observation that differs takes one off: `same` reaches `turns` only if these agree too.
            same -= (await ours.reset(f"lmrl-{number:02d}")).text != first
            while not done:
                action = draw.choice([*map(str.strip, manhatten_actions), "jump"])
                action = action if draw.random() < walk / WALKS else make_expert(ours).act("")
                history, reward, done = theirs.step((_TEXT(action + "\n", True),))
                step = await ours.step(action)
                turns, solved = turns + 1, solved + step.success
                same += (step.observation, step.reward, step.terminated) == (
                    history[-1].text,
                    reward,
                    done,
                )
    return LmrlComparison("maze", len(LMRL_STARTS) * WALKS, turns, same, solved)


async def _wordle(lmrl: Path) -> LmrlComparison:
    from llm_rl_scripts.wordle.env.env import ReformatWordleEnvironment, WordleEnvironment  # type: ignore[import-not-found]
    from llm_rl_scripts.wordle.env.game import Vocabulary  # type: ignore[import-not-found]

    words = lmrl / "llm_rl_scripts" / "wordle" / "vocab" / "tweet_words.txt"
    vocabulary = Vocabulary.from_file(str(words))
    theirs = ReformatWordleEnvironment(WordleEnvironment(vocabulary))
    ours = registry.make("wordle", {"style": "agentgym", "format": "plain", "words": str(words)})
    turns = same = solved = 0
    for seed in range(SEEDS):
        draw, done = Random(seed), False
        await ours.reset(f"wordle-{seed:03d}")
        theirs.reset(seed)
        while not done:
            guess = draw.choice(
                [
                    make_expert(ours).act(""),
                    " ".join(draw.choice(vocabulary.all_vocab)),
                    "q q q q q",
                ]
            )
            history, reward, done = theirs.step((_TEXT("", False), _TEXT(guess, True)))
            step = await ours.step(guess)
            text = (history[-1].text.strip() and history[-1].text) or "invalid word"
            turns, solved = turns + 1, solved + step.success
            same += (step.observation, step.reward, step.terminated) == (
                text,
                reward + (reward <= 0),
                done,
            )
    return LmrlComparison("wordle", SEEDS, turns, same, solved)
