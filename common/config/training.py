"""What a run trains on and for how long: the sections of model, tasks, episodes, phases, evaluations and optimizer."""

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from horizonrl.common.arrays import MAX_TOKENS
from horizonrl.common.config.deepspeed import refuse_unsafe
from horizonrl.common.config.rates import RateSchedule
from horizonrl.common.config.section import AboveZero, ByKind, Positive, Seconds, Section
from horizonrl.common.state import ContextRule
from horizonrl.common.types import MAX_GROUP_SIZE, MAX_TEMPERATURE, HorizonTurns, Kind, Name

LEAST_TEMPERATURE = 0.01
"""vLLM samples at this one where it is asked for less."""


def _sampled(temperature: float) -> float:
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"below {LEAST_TEMPERATURE} vLLM samples at {LEAST_TEMPERATURE}, which would not be the temperature that "
            f"is scored and reported: give {LEAST_TEMPERATURE} or more"
        )
    return temperature


Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE), AfterValidator(_sampled)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


class ModelSection(Section):
    name: Annotated[str, Field(min_length=1)] = "smollm2-135m-instruct"
    """Model to train: a Hugging Face directory, the id of one that `hf download` fetched, or one that is made once:
    `smollm2-135m-instruct` or `pocket`."""
    max_context_tokens: Annotated[int, Field(ge=64, le=MAX_TOKENS)] = 1024
    """Longest sequence of an episode, in tokens. `rollout.context` decides what happens when it is full."""


class EnvSection(Section):
    id: Name = "textcraft"
    """Environment, as `horizonrl envs list` shows it."""
    weight: AboveZero = 1.0
    """Relative share of the tickets, exact to a thousandth."""
    split: Literal["train", "validation", "test", "all"] = "train"
    """Tasks to train on. Evaluations use `eval.split`."""
    categories: tuple[str, ...] = ()
    """Task categories to use. Empty uses all."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment. Actors read them from the broker: never put secrets here."""
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = tuple(Kind)
    """Uses of this environment: imitation (`demo`), RL (`train`), evaluation (`eval`)."""
    horizons: tuple[HorizonTurns, ...] = ()
    """Horizons of this environment, in turns. Empty uses `horizon.horizons`."""
    step_timeout_s: Seconds = 30.0
    """Longest reset or step, in seconds. A longer one breaks the episode."""


class RolloutSection(Section):
    group_size: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)] = 8
    """Episodes per ticket, which are compared with each other. 1 needs an advantage that compares none: gae, vtrace,
    reinforce_pp or return."""
    temperature: Annotated[Temperature, Field(gt=0)] = 1.0
    """Sampling temperature. Logprobs are those after it."""
    max_turn_tokens: Positive = 64
    """Longest reply, in tokens."""
    system_prompt: str | None = None
    """System message. None keeps the default of the chat template."""
    context: ContextRule = ContextRule.STOP
    """What follows a full context. stop: the episode is truncated. window: it continues with the task and the newest
    turns. summarise: with the task and the policy's summary, which takes a turn and is trained."""


class HorizonSection(Section):
    """What every kind of horizon has."""

    kind: str
    """How the horizon grows. fixed: the last of `horizons`. staged (ScalingInter-RL): one after the other. linear: from
    first to last. adaptive: to the next when many episodes are truncated and success has levelled off. shuffled,
    reversed: controls, with staged's horizons drawn per ticket or in reverse."""
    horizons: Annotated[tuple[HorizonTurns, ...], Field(min_length=1)] = (10, 20, 30)
    """Most turns of an episode, stage by stage."""
    announce: bool = False
    """Whether observations end with a line `[N turns left]`."""


class GrowingHorizon(HorizonSection):
    steps_per_stage: Positive = 100
    """RL steps per stage. For adaptive, the window it looks at and the fewest steps between growths."""


class StagedHorizon(GrowingHorizon):
    kind: Literal["staged", "linear", "shuffled", "reversed"] = "staged"


class AdaptiveHorizon(GrowingHorizon):
    kind: Literal["adaptive"] = "adaptive"

    @model_validator(mode="after")
    def _has_two_halves(self) -> Self:
        if self.steps_per_stage < 2:
            raise ValueError(
                f"steps_per_stage is {self.steps_per_stage} but adaptive compares the two halves of that many steps: "
                "set it to 2 or more"
            )
        return self


class FixedHorizon(HorizonSection):
    kind: Literal["fixed"] = "fixed"


Horizon = Annotated[StagedHorizon | AdaptiveHorizon | FixedHorizon, ByKind("staged")]


class ImitationSection(Section):
    steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps on expert demonstrations before RL. 0 turns imitation off."""
    groups_per_step: Positive = 8
    """Demonstrations per optimizer step."""
    lr: Annotated[float, Field(gt=0)] = 3e-5
    """Learning rate of AdamW in this phase, after the warm-up."""
    lr_schedule: RateSchedule = "constant"
    """How the learning rate falls to 0 over this phase's steps. Raising `steps` stretches the decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up at the start of this phase."""


class CurriculumSection(Section):
    kind: Literal["uniform", "adaptive"] = "uniform"
    """How train tasks are drawn. uniform: each once before any comes twice. adaptive: up to two thirds are tasks whose
    last group differed in return; the rest favours categories with many such groups."""


class RlSection(Section):
    steps: Annotated[int, Field(ge=0)] = 100
    """Optimizer steps of RL, after imitation."""
    groups_per_step: Positive = 8
    """Groups trained per optimizer step, without dropped ones."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """Most versions that a group may be behind when it is consumed. 0 is synchronous."""
    stale: Literal["wait", "drop"] = "wait"
    """What bounds staleness. wait: a step waits for tickets that no later step may train. drop: late groups are dropped
    as `stale`, which is faster and loses slow tasks."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate of AdamW in this phase, after the warm-up."""
    lr_schedule: RateSchedule = "constant"
    """How the learning rate falls to 0 over this phase's steps. Raising `steps` stretches the decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up at the start of this phase."""
    demos_per_step: Annotated[int, Field(ge=0)] = 0
    """Demonstrations cloned in addition to a step's groups, on average."""
    publish_every: Positive = 1
    """Versions per publication to actors. Above 1, training proceeds in rounds (AgentEvol); raise `max_staleness`
    too."""


class EvalSection(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """RL steps between evaluations on held-out tasks; the initial model, the start of RL and the end are evaluated too.
    0 turns it off."""
    split: Literal["validation", "test"] = "validation"
    """Tasks to evaluate on. Choose recipes, rates and versions on `validation`: a choice on `test`
    flatters the result there. `horizonrl eval` plays `test` for a result."""
    tasks: Positive = 64
    """Tasks per environment, spread evenly over its categories."""
    samples: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)] = 1
    """Episodes per task. More than one also gives pass@k."""
    temperature: Temperature = 1.0
    """Sampling temperature. 0 takes the most likely token."""
    horizon: HorizonTurns | None = None
    """Most turns of an evaluation episode. None uses the longest horizon."""


class LearnerSection(Section):
    backend: str = "deepspeed"
    """`deepspeed`, `torch` (one process), `hash` (trains nothing, for tests with scripted actors), or `MODULE:FUNCTION`
    of another package. A run may change between the first two."""
    ranks: Positive = 1
    """Learner processes per machine, the same on all. On GPUs, use one per GPU."""
    nodes: Positive = 1
    """Machines that train together. Start `horizonrl learner` on each."""
    min_nodes: Positive | None = None
    """Fewest machines to go on with, after `join_timeout_s`. None waits for all."""
    node_rank: Annotated[int, Field(ge=0)] = 0
    """Number of this machine, from 0. Machine 0 holds the run directory."""
    rendezvous: str | None = None
    """Address `HOST:PORT` of machine 0, for `nodes` above 1."""
    join_timeout_s: Seconds = 600.0
    """Seconds that machines wait for each other."""
    threads: Positive = 1
    """CPU threads per rank, at most the free cores. On a GPU, a rank has at least its share of the cores."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """ZeRO stage. Stage 0 sums micro-batches' gradients in bfloat16, others in float32."""
    micro_batch_tokens: Positive = 2048
    """Size of a micro-batch in tokens."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient norm above which gradients are scaled down."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    gradient_checkpointing: bool = False
    """Whether layers are computed twice to save memory."""
    checkpoint_every: Positive = 5
    """Steps between checkpoints. Phase ends and SIGTERM write one too."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints to keep, with the log from the oldest on."""
    keep_log: bool = False
    """Whether to keep the whole group log for replays. The run ends with an error at `broker.max_log_bytes`."""
    keep_episodes_bytes: Positive = 8 << 30
    """Largest size of `episodes/`, in bytes; the oldest steps are removed."""
    step_timeout_s: Seconds = 1800.0
    """Longest step, checkpoint or collective, in seconds, before the learner ends with an error."""
    shutdown_s: Seconds = 120.0
    """Seconds after SIGTERM for the step in progress and a checkpoint. Give the platform's grace period 10 s more."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Keys of DeepSpeed's configuration, such as `zero_optimization.offload_optimizer`. Those that change results are
    refused."""

    @field_validator("deepspeed")
    @classmethod
    def _is_exact(cls, value: dict[str, Any]) -> dict[str, Any]:
        refuse_unsafe(value)
        return value

    @property
    def rendezvous_address(self) -> tuple[str, int]:
        """Host and port of `rendezvous`."""
        parts = urlsplit(f"//{self.rendezvous}")
        return parts.hostname or "", parts.port or 0

    @model_validator(mode="after")
    def _finds_its_nodes(self) -> Self:
        if self.nodes == 1:
            if self.node_rank or (self.min_nodes or 1) > 1:
                raise ValueError(
                    f"learner.node_rank is {self.node_rank} and learner.min_nodes {self.min_nodes}, but learner.nodes "
                    "is 1: set nodes to the number of machines"
                )
            return self
        if self.node_rank >= self.nodes or (self.min_nodes or 1) > self.nodes:
            raise ValueError(
                f"learner.node_rank is {self.node_rank} and learner.min_nodes {self.min_nodes}, but learner.nodes is "
                f"{self.nodes}: node_rank goes from 0 to {self.nodes - 1}, min_nodes from 1 to {self.nodes}"
            )
        try:
            complete = all(self.rendezvous_address)
        except ValueError:  # a port that is no number, or too large
            complete = False
        if self.rendezvous is None or not complete:
            raise ValueError(
                f"learner.nodes is {self.nodes} but learner.rendezvous is {self.rendezvous!r}: give an address of "
                "machine 0 as HOST:PORT, such as 10.0.0.1:29400"
            )
        return self

    @model_validator(mode="after")
    def _fits_its_backend(self) -> Self:
        if self.backend != "deepspeed" and self.deepspeed:
            raise ValueError(
                f"learner.deepspeed has keys but learner.backend is {self.backend}: leave them out, or set backend to "
                "deepspeed"
            )
        # DeepSpeed partitions nothing at stage 0, gradients from stage 2, parameters at stage 3.
        zero = self.deepspeed.get("zero_optimization", {})
        for key, stage in (("offload_optimizer", 1), ("overlap_comm", 2), ("offload_param", 3)):
            if zero.get(key) not in (None, False) and self.zero_stage < stage:
                raise ValueError(
                    f"learner.deepspeed.zero_optimization.{key} is set but learner.zero_stage is {self.zero_stage}: "
                    f"leave it out, or set zero_stage to {stage} or more"
                )
        if self.backend != "deepspeed" and self.zero_stage != 1:
            raise ValueError(
                f"learner.zero_stage is {self.zero_stage} but learner.backend is {self.backend}, which has no ZeRO "
                "stages: leave zero_stage out, or set backend to deepspeed"
            )
        return self


class LoraSection(Section):
    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapters on each linear layer of the frozen model; use about ten times the learning rate. 0 trains
    the whole model."""
