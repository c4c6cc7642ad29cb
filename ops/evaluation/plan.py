"""What an evaluation plays: scenarios, their rows, and the episodes that fill them.

The table is that of arXiv 2509.08755: 27 tasks of five scenarios, here on our native counterparts, so that it runs on
any machine (docs/evaluation.md says what compares). An episode is known by its task and its number among the task's
samples; its seed is a function of these and of the run's seed, so that a second evaluation plays the same ones.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import xxhash

from horizonrl.common.config.arguments import require_kinds
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import EnvSection
from horizonrl.common.errors import ConfigError
from horizonrl.common.types import MAX_GROUP_SIZE, MAX_TURNS, Kind, Sampling, Task, Ticket
from horizonrl.envs import registry
from horizonrl.learner.controller.curriculum import EvalTask, spread

ALL = "all"
"""The row of a whole scenario."""
SEED_BITS = 40
"""The rollout makes of an episode's seed one a turn, with 12 bits more; engines take 63."""
DEFAULT_TURNS = 30
STEP_TIMEOUT_S = 120.0
"""Of environments that no recipe names: starting a JVM took 40 s on a busy machine, and nobody waits for a step."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A block of the table."""

    name: str
    env_id: str
    turns: int
    """The paper's, for evaluations."""
    rows: Mapping[str, str]
    """Tasks of the paper, by the category that plays them. What has no row counts in `all`."""


TABLE = (
    Scenario(
        "Web navigation",
        "webnav",
        15,
        {"Shopping": "Shopping", "CMS": "CMS", "Maps": "Maps", "GitLab & Reddit": "GitlabReddit"},
    ),
    Scenario(
        "Deep search",
        "deepsearch",
        10,
        {
            "NQ": "nq",
            "TriviaQA": "triviaqa",
            "PopQA": "popqa",
            "HotpotQA": "hotpotqa",
            "2Wiki": "2wiki",
            "Musique": "musique",
            "Bamboogle": "bamboogle",
        },
    ),
    Scenario(
        "Digital games",
        "textcraft",
        30,
        {f"Depth {depth}": f"depth{depth}" for depth in range(1, 5)},
    ),
    Scenario(
        "Embodied",
        "babyai",
        20,
        {family: family for family in ("GoTo", "Pickup", "AOD", "FindObj", "Room", "SynthLoc")},
    ),
    Scenario(
        "Science",
        "sciworld",
        30,
        {family: family for family in ("Measure", "Test-Cond", "Find", "Chem-Mix", "Lifespan")},
    ),
)
"""26 categories and web navigation's `all` are the paper's 27; the other scenarios have their `all` beside them."""


@dataclass(frozen=True)
class Choice:
    """What is asked for: the environments, the tasks in them, and how they are played.

    Raises ConfigError for a value of a wrong type or out of bounds.
    """

    env_ids: Sequence[str] = ()
    """Environments; the run's or the recipe's by default."""
    table: bool = False
    """Whether the paper's 27 tasks are played, on our own environments; then `categories` stays empty."""
    split: Literal["train", "validation", "test", "all"] = "test"
    categories: Sequence[str] = ()
    """Only these; all by default."""
    tasks: int | None = None
    """Of each category; all by default."""
    samples: Sequence[int] = ()
    """The k of each pass@k; the largest is how often each task is played. `eval.samples` by default."""
    turns: Sequence[int] = ()
    """Turn limits, with a block of results for each; else the run's, the recipe's, the paper's or 30."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of every environment, over those of its recipe."""

    def __post_init__(self) -> None:
        require_kinds("Choice", vars(self), {field.name: field.type for field in fields(self)})
        for name, values, most in (
            ("--tasks", () if self.tasks is None else (self.tasks,), sys.maxsize),
            ("--samples", self.samples, MAX_GROUP_SIZE),
            ("--turns", self.turns, MAX_TURNS),
        ):
            if wrong := [value for value in values if not 1 <= value <= most]:
                bounds = "1 or more" if most == sys.maxsize else f"a number from 1 to {most}"
                raise ConfigError(f"{name} is {wrong[0]}: give {bounds}")
        if self.table and self.categories:
            raise ConfigError(
                "--table has its own categories: leave --categories out, or choose with --env"
            )


@dataclass(frozen=True, slots=True)
class EvalPart:
    """One environment's share of an evaluation."""

    scenario: str
    env: EnvSection
    tasks: tuple[EvalTask, ...]
    rows: Mapping[str, str | None]
    """Label to category; None is all of them."""
    turns: tuple[int, ...]
    """What the episodes are judged at; they are played under the last, the most."""


@dataclass(frozen=True, slots=True)
class Play:
    """An episode to be played."""

    env: EnvSection
    task: EvalTask
    ticket: Ticket
    sample: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.env.id, self.task.task.task_id, self.sample


@dataclass(frozen=True, slots=True)
class Plan:
    split: str
    parts: tuple[EvalPart, ...]
    samples: tuple[int, ...]
    """The k of pass@k, growing; the last is how often each task is played."""
    plays: tuple[Play, ...] = field(repr=False)


def make_plan(config: RunConfig, choice: Choice, *, own_envs: bool) -> Plan:
    """Return what is to be played. `own_envs` says that the config names the environments it wants.

    Raises ConfigError, before anything starts, for what cannot be played or would say nothing.
    """
    samples = tuple(sorted(set(choice.samples))) or (config.eval.samples,)
    # pass@k of k equal episodes would look like a measurement.
    if samples[-1] > 1 and config.eval.temperature == 0:
        raise ConfigError(
            f"--samples is {samples[-1]} at eval.temperature 0, where a task's episodes are all the same: give "
            "--samples 1, or raise the temperature"
        )
    if len(set(choice.turns)) > 1 and config.horizon.announce:
        raise ConfigError(
            "horizon.announce tells the agent its turns, so that an episode under fewer is not the begin of one under "
            "more: evaluate one value of --turns at a time, each with its own --out"
        )
    parts = tuple(
        _part(config, choice, scenario, env, own_envs)
        for scenario, env in _chosen(config, choice, own_envs)
    )
    plays = tuple(
        Play(part.env, task, _ticket(config, part, task, sample), sample)
        for part in parts
        for task in part.tasks
        for sample in range(samples[-1])
    )
    return Plan(choice.split, parts, samples, plays)


def _chosen(
    config: RunConfig, choice: Choice, own_envs: bool
) -> Sequence[tuple[Scenario | None, EnvSection]]:
    named = {env.id: env for env in config.envs}

    def section(env_id: str) -> EnvSection:
        env = (
            named[env_id]
            if own_envs and env_id in named
            else EnvSection(id=env_id, step_timeout_s=STEP_TIMEOUT_S)
        )
        return env.model_copy(update={"options": {**env.options, **choice.options}})

    if choice.table:
        scenarios = {scenario.env_id: scenario for scenario in TABLE}
        if strange := [env_id for env_id in choice.env_ids if env_id not in scenarios]:
            raise ConfigError(
                f"--table has no environment {strange[0]!r}, only {', '.join(scenarios)}"
            )
        wanted: Sequence[str] = [
            env_id for env_id in scenarios if not choice.env_ids or env_id in choice.env_ids
        ]
        return [(scenarios[env_id], section(env_id)) for env_id in wanted]
    if not choice.env_ids and not own_envs:
        raise ConfigError(
            "on what? Give --env ID (`horizonrl envs list` shows them), --table, or --recipe FILE"
        )
    # Each once: an episode is known by its environment, so that another one of the same would replace it.
    env_ids = tuple(dict.fromkeys(choice.env_ids)) or tuple(
        env.id for env in config.envs if Kind.EVAL in env.kinds
    )
    if not env_ids:
        raise ConfigError("none of the envs has 'eval' among its kinds: give --env ID")
    return [(None, section(env_id)) for env_id in env_ids]


def _part(
    config: RunConfig, choice: Choice, scenario: Scenario | None, env: EnvSection, own_envs: bool
) -> EvalPart:
    if registry.demonstrations_only(env.id, env.options):
        raise ConfigError(
            f"environment {env.id!r} only replays what others did: no policy can be evaluated in it"
        )
    categories = () if scenario else choice.categories or env.categories
    specs = registry.select(env.id, choice.split, categories, env.options)
    names = sorted({spec.category for spec in specs})
    tasks = tuple(
        EvalTask(Task(env_id=env.id, task_id=spec.task_id), category)
        for category in names
        for spec in spread(
            [spec for spec in specs if spec.category == category], choice.tasks or len(specs)
        )
    )
    rows: dict[str, str | None] = (
        dict(scenario.rows) if scenario else {category: category for category in names}
    )
    return EvalPart(
        scenario=scenario.name if scenario else env.id,
        env=env,
        tasks=tasks,
        rows=rows | ({ALL: None} if len(names) > 1 else {}),
        turns=tuple(sorted(set(choice.turns)))
        or (_turns(config, env, from_config=own_envs and not choice.table),),
    )


def _turns(config: RunConfig, env: EnvSection, from_config: bool) -> int:
    if not from_config:
        return next(
            (scenario.turns for scenario in TABLE if scenario.env_id == env.id), DEFAULT_TURNS
        )
    return config.eval.horizon or max(env.horizons or config.horizon.horizons)


def _ticket(config: RunConfig, part: EvalPart, task: EvalTask, sample: int) -> Ticket:
    name = f"{config.run.seed} {part.env.id} {task.task.task_id} {sample}"
    return Ticket(
        number=sample,
        kind=Kind.EVAL,
        task=task.task,
        group_size=1,
        horizon_turns=part.turns[-1],
        announce_horizon=config.horizon.announce,
        sampling=Sampling(
            temperature=config.eval.temperature,
            max_turn_tokens=config.rollout.max_turn_tokens,
            # A hash of names and not of positions: the same episode has the same seed in a smaller or larger choice.
            seed=xxhash.xxh3_64_intdigest(name.encode()) >> (64 - SEED_BITS),
        ),
    )
