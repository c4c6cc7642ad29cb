"""The rows of a dataset of episodes: one pydantic model per table, from which schema and card are made."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict


class DatasetRow(BaseModel):
    """A field of the dataset is a column of the same name."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class TurnRow(DatasetRow):
    """One generation and the observation that answers it."""

    text: str
    """What the policy wrote, special tokens left out."""
    observation: str | None
    """The environment's answer; null after the last turn of some environments."""
    reward: float
    """Of this turn."""
    token_ids: list[int]
    """The ids that were sampled, the end-of-turn token included; what is trained is these, never the text."""
    logprobs: list[float]
    """Natural log of each id's probability under the policy that sampled it, to three decimals."""
    versions: list[list[int]]
    """Runs of tokens that one policy version sampled: [version, lineage, tokens]. A version is an optimizer step."""
    branch: int = 0
    """The token sequence that it continues: 0 begins with the episode's prompt, K with its branch K."""
    trained: bool = True
    """False: the generation is context of what follows in its branch, but carried no loss."""


class EpisodeRow(DatasetRow):
    """One episode."""

    run: str
    """The run's name."""
    step: int
    """The optimizer step that consumed the episode; steps count from 1."""
    kind: Literal["train", "demo", "eval"]
    """`train`: sampled by the policy. `demo`: an expert's demonstration; its logprobs are 0. `eval`: held-out, and in
    no dataset."""
    ticket: str
    """The group: episodes of one ticket play the same task under the same horizon."""
    episode: int
    """Number in its group."""
    env: str
    """The environment."""
    task: str
    """The task, deterministic on every machine."""
    horizon: int
    """The most turns that the episode might take."""
    end: str
    """What became of its group: `trained into version N`, or `dropped: reason`."""
    stop: str
    """Why it ended: `terminated` by the environment; cut by `horizon`, `context` or `env_truncated`; or what broke."""
    success: bool
    """Whether the task was solved."""
    episode_return: float
    """Sum of the turns' rewards."""
    error: str | None
    """What broke, of a broken episode. Such a one says nothing about the policy: leave it out of any mean."""
    prompt: str
    """What the agent read first."""
    turns: list[TurnRow]
    """In order of time, over all branches."""
    branches: list[str] = []
    """What branches 1, 2, ... begin with: an agent's shortened or edited conversation, or a sub-agent's."""


@dataclass
class DatasetCounts:
    """What has been written to a dataset, and what has been left out."""

    rows: int = 0
    tokens: int = 0
    unreadable: int = 0
    by_env: Counter[str] = field(default_factory=Counter)
    solved: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)

    def add(self, row: EpisodeRow) -> None:
        self.rows += 1
        self.tokens += sum(len(turn.token_ids) for turn in row.turns)
        self.by_env[row.env] += 1
        self.solved[row.env] += row.success
        self.broken[row.env] += row.error is not None
