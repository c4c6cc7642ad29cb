"""reasoning-gym: generated questions with one answer each, and the package's own scores. An episode is one turn.

A task is `NAME-NUMBER`: an item of the dataset NAME in blocks of 500, as the package's own `ReseedingDataset` has them,
so that the numbers never end.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from pydantic import validate_call

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import Unreadable
from horizonrl.envs.game import Move, MoveExpert, words
from horizonrl.envs.hubs.answers import answer_part, may_be_scored, read_literals_only
from horizonrl.envs.hubs.hub import HubEnvironment, TaskCount, numbered_tasks
from horizonrl.envs.hubs.packages import hub_module, hub_version
from horizonrl.envs.hubs.randomness import OwnRandom
from horizonrl.envs.text_limits import Chars

PACKAGE = "reasoning-gym"
BLOCK = 500
"""The package's own default size of a dataset. Some datasets depend on it."""
MIXTURE = "composite"
"""A mixture of other datasets, which has no questions of its own."""
HASHED = words("isomorphic_strings knight_swap polynomial_multiplication ransom_note word_ladder")
"""Datasets that iterate over sets, so that processes with different hash seeds generate different questions."""
EXAMPLES = ("example_correct_answer", "example_answer", "possible_answer")
"""Where the metadata of questions with many right answers has one of them."""
Prompt = Literal["default", "simple", "direct", "chain_of_draft", "DeepSeekZero", "none"]


@dataclass
class Question:
    """One question, until it is answered."""

    name: str
    dataset: Any
    entry: dict[str, Any]

    @property
    def answer(self) -> str | None:
        """An answer that the package knows to be right, if it gives one."""
        answers = (self.entry["answer"], *(self.entry["metadata"].get(key) for key in EXAMPLES))
        answer_given = next((answer for answer in answers if answer), None)
        return json.dumps(answer_given) if isinstance(answer_given, dict) else answer_given

    def follow(self, action: str) -> Step:
        """Score the answer between the last `<answer>` and `</answer>` of a reply."""
        answer = hub_module("reasoning_gym.utils").extract_answer(answer_part(action))
        if answer is not None and not may_be_scored(self.name, answer):
            answer = None
        try:
            score = float(self.dataset.score_answer(answer, self.entry))
        except Exception:  # noqa: BLE001 - some scorers raise on an answer that they cannot parse
            # It earns what no answer earns. A scorer that is broken raises here too, and breaks the episode.
            score = float(self.dataset.score_answer(None, self.entry))
        return Step(f"Score: {score:g}", reward=score, terminated=True, success=score >= 1.0)

    def close(self) -> None: ...


class ReasoningGym(HubEnvironment[Question]):
    """One question at a time.

    tasks: how many questions of each dataset are listed
    prompt: which of the package's instructions stand before the question; `none` for the question alone
    max_observation_chars: bound of every observation; a question that does not fit is a ConfigError
    """

    env_id = "reasoning-gym"
    version = hub_version(1, PACKAGE)

    @validate_call
    def __init__(
        self,
        *,
        tasks: TaskCount = 20,
        prompt: Prompt = "default",
        max_observation_chars: Chars = 32_768,
    ) -> None:
        super().__init__("plain", max_observation_chars)
        hub_module("reasoning_gym")
        hashed = f" PYTHONHASHSEED={hash_seed()}" if hash_seed() else ""
        self.version = f"{type(self).version} tasks:{tasks}{hashed}"
        self._prompt = prompt

    @classmethod
    @validate_call
    def tasks(cls, *, tasks: TaskCount = 20) -> Sequence[TaskSpec]:
        """Return the first questions of every dataset."""
        return numbered_tasks(datasets(), tasks)

    def begin(self, task_id: str) -> tuple[str, Question]:
        """Generate a question."""
        name, number = self.parse_id(task_id, datasets())
        dataset = _block(name, number // BLOCK)
        # Again, because making the dataset may have drawn some, or was done by an earlier episode.
        with OwnRandom(task_id).random_for():
            entry = dataset[number % BLOCK]
        instructions = hub_module("reasoning_gym.utils").SYSTEM_PROMPTS.get(self._prompt, "")
        return "\n".join(filter(None, (instructions, entry["question"]))), Question(
            name, dataset, entry
        )

    def read(self, text: str) -> str | Unreadable:
        """Return the whole reply: the package finds the answer in it."""
        return text

    def expert(self) -> MoveExpert:
        """Return an expert that knows the answer. Raises EnvironmentFailure for a question of unknown answer."""
        if (answer := self._current().answer) is None:
            raise EnvironmentFailure(
                "reasoning-gym gives no answer to this question: there is no expert for it"
            )
        return self._expert(lambda observation: Move(f"<answer>{answer}</answer>", "I know it."))


def datasets() -> tuple[str, ...]:
    """Return the names of the datasets, sorted; without a fixed hash seed, none that depends on it."""
    names = hub_module("reasoning_gym.factory").DATASETS
    left_out = {MIXTURE, *(() if hash_seed() else HASHED)}
    return tuple(sorted(name for name in names if name not in left_out))


def hash_seed() -> str:
    """Return the hash seed that this process was started with, or "" if Python drew one."""
    seed = os.environ.get("PYTHONHASHSEED", "")
    return seed if seed.isdecimal() else ""


@lru_cache(256)
def _block(name: str, number: int) -> Any:
    with OwnRandom(f"{name} {number}").random_for():
        dataset = hub_module("reasoning_gym").create_dataset(name, seed=number, size=BLOCK)
    read_literals_only(name, dataset)
    return dataset
