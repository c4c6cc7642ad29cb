"""The configuration of a run: frozen sections, and which combinations of them are rejected.

`training.py` and `objective.py` hold the sections of what is trained; the other sections are here. `loading.py` reads
them, and `schedule.py` computes what follows from them. Config stops at a package's first level: a role's `main.py`
passes plain values on.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import xxhash
from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from horizonrl.common.config.loading import ENV_PREFIX, load_sections
from horizonrl.common.config.nats import NatsSection
from horizonrl.common.config.objective import (
    Advantage,
    Correction,
    EnvironmentReward,
    GrpoAdvantage,
    Loss,
    Objective,
    PpoLoss,
    ReferenceSection,
    Reward,
    TokenCorrection,
)
from horizonrl.common.config.rates import refuse_senseless
from horizonrl.common.config.schedule import RunSchedule
from horizonrl.common.config.section import Positive, Seconds, Section
from horizonrl.common.config.training import (
    CurriculumSection,
    EnvSection,
    EvalSection,
    Horizon,
    ImitationSection,
    LearnerSection,
    LoraSection,
    ModelSection,
    RlSection,
    RolloutSection,
    StagedHorizon,
)
from horizonrl.common.state import ContextRule, EnvironmentSettings, RunSettings
from horizonrl.common.types import Kind, Name, Phase

ALONE_SHARE, SHARED_SHARE = 0.9, 0.45
"""Default shares of a GPU's memory for an engine that has the GPU to itself, and for one beside a learner."""
LARGEST_SHARED = 0.5
"""Largest share of an engine on a GPU that a rank of the learner has too."""


class RunSection(Section):
    name: Name = "textcraft"
    """Name of the run: of its directory, and in every NATS subject."""
    root: Path = Path("runs")
    """Folder of the run directories."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of task sampling, token sampling and the learner."""


class BrokerSection(Section):
    url: str | None = None
    """Address of a running broker, `nats://HOST:PORT` or `tls://HOST:PORT`; several of a cluster with commas. None
    starts a nats-server."""
    ticket_key: Path | None = None
    """File with the key that signs tickets, for controller and learner: other groups are refused. None trusts all
    actors."""
    ack_wait_s: Seconds = 30.0
    """Seconds until a lease that is not extended goes to another actor."""
    max_deliver: Positive = 5
    """Deliveries after which a ticket ends as void."""
    max_log_bytes: Positive = 4 << 30
    """Size of the group log in bytes at which actors wait for a checkpoint to free space. It must hold one step's
    groups."""
    shared_files: bool = False
    """Whether actors read weights from the learner's run directory instead of through the broker. `train` with its own
    broker turns it on."""
    nats: NatsSection = NatsSection()
    """What only NATS has."""

    @property
    def servers(self) -> list[str]:
        """The servers in `url`: one, or those of a cluster."""
        return [] if self.url is None else [server.strip() for server in self.url.split(",")]

    @model_validator(mode="after")
    def _is_an_address(self) -> Self:
        for server in self.servers:
            try:
                parts = urlsplit(server)
                complete = "://" in server and parts.hostname is not None and parts.port != 0
            except ValueError:  # a port that is no number, or too large
                complete = False
            if not complete:
                raise ValueError(
                    f"url is {self.url!r}: write it as nats://HOST:PORT, or tls://HOST:PORT for TLS"
                )
        return self

    @model_validator(mode="after")
    def _names_no_secret(self) -> Self:
        if "@" in (self.url or ""):
            raise ValueError(
                "url holds credentials, which would show in logs, in config.toml and to users of the machine: give "
                "broker.nats.nkey_seed, or broker.nats.user and the environment variable "
                "HORIZONRL_BROKER__NATS__PASSWORD"
            )
        return self


class ActorSection(Section):
    count: Annotated[int, Field(ge=0)] = 1
    """Actors that `train` starts on this machine."""
    engine: str = "vllm"
    """`vllm`; `scripted`, random tokens for tests; or `MODULE:FUNCTION` of another package."""
    slots: Positive = 32
    """Episodes that one actor plays at once."""
    threads: Positive = 1
    """CPU threads of the engine."""
    kv_cache_mib: Positive = 512
    """Key-value cache on a CPU, in MiB."""
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory for weights and cache. None is 0.9, or 0.45 on a GPU shared with the learner. Up to 0.5,
    others may use the GPU's memory at the same time."""
    tensor_parallel: Positive = 1
    """GPUs (on a CPU, processes) over which vLLM spreads the model."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, such as `max_num_batched_tokens = 8192`. Those that break token exactness are
    refused."""
    weights: Literal["in_flight", "drained"] = "in_flight"
    """When new weights apply. in_flight: between two tokens. drained: after running generations have ended; new
    requests wait."""
    gateway_host: str = "127.0.0.1"
    """Address on which actors serve the policy to programs. 0.0.0.0 reaches other machines, and sends each episode's
    key over that network."""
    drain_s: Seconds = 20.0
    """Seconds after SIGTERM to finish tickets; the rest is given back within 20 s more."""

    def memory_share(self, *, shared: bool) -> float:
        """Return the share of a GPU's memory for an engine, by whether it has the GPU together with a learner."""
        if self.gpu_memory_share is not None:
            return self.gpu_memory_share
        return SHARED_SHARE if shared else ALONE_SHARE


class MetricsSection(Section):
    host: str = "127.0.0.1"
    """Address of the metrics port, which has no password. 0.0.0.0 opens it to other machines."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of a role; under `train` the learner's, and controller and actors take the next ones. 0 takes a free one and
    logs it."""


class TrackerSection(Section):
    kind: Literal["tensorboard", "wandb", "trackio"] | None = None
    """Tracker that also receives the run's numbers: `pip install 'horizonrl[KIND]'`. They stay on this machine unless
    WANDB_MODE is online, or TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set."""


SHARED_SECTIONS = ("rollout", "horizon", "curriculum", "imitation", "rl", "eval")
"""What the controller issues tickets by, and the learner takes groups by."""
MOST_SHARED_CHARS = 300


def own_rate(name: str) -> bool:
    """Return whether a key of a phase is a learning rate's, which the controller does not read."""
    return name.startswith(("lr", "warmup"))


class RunConfig(RunSchedule, BaseSettings):
    """Everything a run needs to know. Any role started with the same recipes reads the same config."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    run: RunSection = RunSection()
    broker: BrokerSection = BrokerSection()
    model: ModelSection = ModelSection()
    envs: Annotated[tuple[EnvSection, ...], Field(min_length=1)] = (EnvSection(),)
    rollout: RolloutSection = RolloutSection()
    horizon: Horizon = StagedHorizon()
    curriculum: CurriculumSection = CurriculumSection()
    imitation: ImitationSection = ImitationSection()
    rl: RlSection = RlSection()
    reward: Reward = EnvironmentReward()
    advantage: Advantage = GrpoAdvantage()
    loss: Loss = PpoLoss()
    correction: Correction = TokenCorrection()
    reference: ReferenceSection = ReferenceSection()
    eval: EvalSection = EvalSection()
    learner: LearnerSection = LearnerSection()
    lora: LoraSection = LoraSection()
    actor: ActorSection = ActorSection()
    metrics: MetricsSection = MetricsSection()
    tracker: TrackerSection = TrackerSection()

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.learner.backend == "hash" and self.actor.engine != "scripted":
            raise ValueError(
                f"learner.backend is hash but actor.engine is {self.actor.engine}, which needs the weights of a model: "
                "set actor.engine to scripted, or learner.backend to deepspeed or torch"
            )
        if self.rollout.group_size > self.actor.slots:
            raise ValueError(
                f"rollout.group_size is {self.rollout.group_size} but actor.slots is {self.actor.slots}: "
                f"a group's episodes run at once; set actor.slots to {self.rollout.group_size} or more"
            )
        if self.rollout.group_size == 1 and self.rl.steps:
            self._refuse_single_episodes()
        # A row is never split over micro-batches, so the longest one has to fit into one.
        if self.learner.micro_batch_tokens < self.model.max_context_tokens:
            raise ValueError(
                f"learner.micro_batch_tokens is {self.learner.micro_batch_tokens} but a sequence may have "
                f"model.max_context_tokens = {self.model.max_context_tokens}; raise the first or lower the second"
            )
        if self.rollout.max_turn_tokens >= self.model.max_context_tokens:
            raise ValueError(
                f"rollout.max_turn_tokens is {self.rollout.max_turn_tokens}: one turn fills the whole context of "
                f"{self.model.max_context_tokens}; lower it or raise model.max_context_tokens"
            )
        return self

    def _refuse_single_episodes(self) -> None:
        needs = {
            f"advantage.kind {self.advantage.kind}": self.advantage.group_relative,
            "curriculum.kind adaptive": self.curriculum.kind == "adaptive",
        }
        if causes := [key for key, compares in needs.items() if compares]:
            raise ValueError(
                f"rollout.group_size is 1 but {' and '.join(causes)} compares the episodes of a group: set group_size "
                "to 2 or more, or use advantage.kind gae, vtrace or reinforce_pp and curriculum.kind uniform"
            )

    @model_validator(mode="after")
    def _horizons_grow(self) -> Self:
        ids = [env.id for env in self.envs]
        if len(set(ids)) != len(ids):
            raise ValueError(
                f"envs lists {ids}: give each environment only one entry, with a weight"
            )
        for env_id in ids:
            turns = list(self.horizons(env_id))
            if self.horizon.kind != "fixed" and turns != (growing := sorted(set(turns))):
                raise ValueError(
                    f"the horizons of {env_id} are {turns}, which do not grow from stage to stage: give {growing}, or "
                    "set horizon.kind to fixed, which uses the last one"
                )
        return self

    @model_validator(mode="after")
    def _actors_keep_up(self) -> Self:
        # The credit would reach 0 before the next publication, and the run would stand still (`RunSchedule.credit`).
        if self.rl.publish_every > self.rl.max_staleness + 1:
            raise ValueError(
                f"rl.publish_every is {self.rl.publish_every} but rl.max_staleness is {self.rl.max_staleness}: groups "
                f"of the newest version that actors have would be dropped; set max_staleness to "
                f"{self.rl.publish_every - 1} or more"
            )
        return self

    @model_validator(mode="after")
    def _rates_fall_within_their_phase(self) -> Self:
        critic_steps = self.advantage.critic_steps
        if 0 < self.rl.steps <= critic_steps:
            raise ValueError(
                f"advantage.critic_warmup_steps is {critic_steps} but rl.steps is {self.rl.steps}: RL would train "
                "the critic alone; give fewer critic_warmup_steps or more rl.steps"
            )
        phases = (
            ("imitation", Phase.IMITATION, self.imitation, 0),
            ("rl", Phase.RL, self.rl, critic_steps),
        )
        for name, phase, rates, before in phases:
            warmup_steps, steps = self.warmup_steps(phase), rates.steps - before
            refuse_senseless(name, rates.lr_schedule, steps, warmup_steps)
        return self

    @model_validator(mode="after")
    def _optimises_something_sound(self) -> Self:
        self.objective.refuse_unsound()
        if self.advantage.linear_only and self.rollout.context is not ContextRule.STOP:
            raise ValueError(
                f"rollout.context is {self.rollout.context.value} but advantage.kind {self.advantage.kind} follows one "
                "token sequence, and a shortened conversation is another: set rollout.context to stop, or "
                "advantage.kind to one that compares or returns whole episodes"
            )
        return self

    @model_validator(mode="after")
    def _every_phase_has_tasks(self) -> Self:
        if self.imitation.steps + self.rl.steps == 0:
            raise ValueError("imitation.steps and rl.steps are both 0: there is nothing to train")
        ids = ", ".join(env.id for env in self.envs)
        for key, count, kind in (
            ("imitation.steps", self.imitation.steps, Kind.DEMO),
            ("rl.steps", self.rl.steps, Kind.TRAIN),
            ("rl.demos_per_step", self.rl.demos_per_step, Kind.DEMO),
            ("eval.every", self.eval.every, Kind.EVAL),
        ):
            if count and not any(kind in env.kinds for env in self.envs):
                raise ValueError(
                    f"{key} is {count} but none of the envs {ids} has {kind.value!r} among its kinds: add it to one of "
                    f"them, or set {key} to 0"
                )
        return self

    @model_validator(mode="after")
    def _evaluates_what_is_held_out(self) -> Self:
        if not self.eval.every:
            return self
        if trained := [env for env in self.envs if env.split != "train"]:
            raise ValueError(
                f"eval.every is {self.eval.every} but the environment {trained[0].id} trains on split "
                f"{trained[0].split}: what is evaluated would not be held out; set its split to "
                "train, or eval.every to 0"
            )
        if self.eval.samples > self.actor.slots:
            raise ValueError(
                f"eval.samples is {self.eval.samples} but actor.slots is {self.actor.slots}: a task's episodes run "
                f"at once; set actor.slots to {self.eval.samples} or more"
            )
        if self.eval.samples > 1 and self.eval.temperature == 0:
            raise ValueError(
                f"eval.samples is {self.eval.samples} at eval.temperature 0, at which a task's episodes are all the "
                "same: set eval.samples to 1, or raise the temperature"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return self.run.root / self.run.name

    @property
    def objective(self) -> Objective:
        """The sections that say what an RL step optimises."""
        # Without validation, which the sections have behind them: `refuse_unsound` checks the combination.
        return Objective.model_construct(
            reward=self.reward,
            advantage=self.advantage,
            loss=self.loss,
            correction=self.correction,
            reference=self.reference,
        )

    @property
    def settings(self) -> RunSettings:
        """What the run's actors must agree on, as the controller publishes it under the key `run`."""
        return RunSettings(
            total_steps=self.total_steps,
            max_deliver=self.broker.max_deliver,
            max_context_tokens=self.model.max_context_tokens,
            system_prompt=self.rollout.system_prompt,
            context=self.rollout.context,
            environments=tuple(
                # As JSON: a recipe may hold dates, which have no form on the wire.
                EnvironmentSettings(
                    env_id=env.id,
                    options=env.model_dump(mode="json")["options"],
                    step_timeout_s=env.step_timeout_s,
                )
                for env in self.envs
            ),
            recipe=self._shared_recipe(),
        )

    def _shared_recipe(self) -> dict[str, str]:
        """Return what controller and learner must agree on, by key, but for what `settings` names itself.

        Which tickets are issued, and which groups a step takes. Rates and losses are the learner's own affair.
        """
        dumped = self.model_dump(mode="json")
        values: dict[str, Any] = {"run.seed": dumped["run"]["seed"], "envs": dumped["envs"]}
        for section in SHARED_SECTIONS:
            values |= {
                f"{section}.{name}": value
                for name, value in dumped[section].items()
                if not own_rate(name)
            }
        texts = {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
        return {
            name: text
            if len(text) <= MOST_SHARED_CHARS
            else xxhash.xxh3_128_hexdigest(text.encode())
            for name, text in texts.items()
        }

    @classmethod
    def load(
        cls, recipes: Sequence[Path] = (), overrides: Sequence[str] = (), *, recorded: bool = False
    ) -> "RunConfig":
        """Read recipes, environment variables and overrides; raise ConfigError with one line per mistake.

        What a run has `recorded` is read without the variables, other than the broker's password.
        """
        # Without validation: `load_sections` has done it, and would read the environment again.
        return cls.model_construct(**load_sections(cls, recipes, overrides, recorded=recorded))
