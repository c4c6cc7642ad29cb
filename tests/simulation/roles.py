"""The roles of a simulation: their real loops, on a link to the simulated broker, wired as their `main` wires them."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.loop import ActorLoop, ActorSettings
from horizonrl.actors.policy import ChangedWords, Generation
from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.actors.weights.follower import WeightsFollower
from horizonrl.broker.agreement import wait_for_agreement
from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import EnvironmentFailure
from horizonrl.common.lag import LoopLag
from horizonrl.common.metrics import Metrics
from horizonrl.common.run_dir import CHECKPOINTS, WEIGHTS
from horizonrl.common.service import until_stopped
from horizonrl.common.types import PolicyVersion, Provenance, Task
from horizonrl.envs.api import Observation, Step, TaskSpec
from horizonrl.learner.controller.curriculum import EvalTask, TaskSource
from horizonrl.learner.controller.main import build_controller
from horizonrl.learner.engine.backends.hash import HashEngine
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.main import build_loop, open_ports
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.learner.records.journal import Journal
from horizonrl.learner.settings import collecting_rules
from tests.simulation.broker import Link, SimulatedBroker
from tests.simulation.clock import LIFE, Life, VirtualLoop
from tests.simulation.history import History
from tests.simulation.storm import Profile

VOCABULARY, STOP, NEXT = 100, 2, 3
ENV_ID = "textcraft"
IDENTITY = {"model": "m", "template": "t", "stops": str(STOP)}
TASKS = tuple(f"task{number}" for number in range(20))
SOURCES = [TaskSource(ENV_ID, TASKS, 1.0, categories=tuple("ab"[n % 2] for n in range(20)))]
EVAL_TASKS = tuple(
    EvalTask(Task(env_id=ENV_ID, task_id=f"held{number}"), "ab"[number % 2]) for number in range(3)
)
HUNG_S = 100.0
"""How long a call of an environment hangs: longer than its deadline."""


class PlainChat:
    """A chat whose words are numbers."""

    stop_ids = (STOP,)

    def open(self, system: str | None, observation: str) -> tuple[int, ...]:
        return (1, *self._spell(observation))

    def delta(self, last_output_ids: Sequence[int], observation: str) -> tuple[int, ...]:
        ended = tuple(last_output_ids[-1:]) == (STOP,)
        return (*(() if ended else (STOP,)), NEXT, *self._spell(observation))

    def decode(self, output_ids: Sequence[int]) -> str:
        return " ".join(map(str, output_ids))

    def encode_turn(self, text: str) -> tuple[int, ...]:
        return (*map(int, text.split()), STOP)

    def _spell(self, text: str) -> tuple[int, ...]:
        return tuple(10 + ord(letter) % 80 for letter in text[:3])


@dataclass
class Tasks:
    """What environments do, by the profile of a run."""

    profile: Profile
    dice: random.Random
    loop: VirtualLoop
    playing: Counter[Life] = field(default_factory=Counter)
    """How many episodes each actor plays now."""
    most_playing: int = 0

    def duration_s(self, task_id: str) -> float:
        """Return how long a turn of a task takes: its own time, the same in every episode."""
        fixed = random.Random(f"duration {task_id}")
        quick = math.exp(fixed.gauss(0.0, self.profile.sigma))
        # Every sixth task is so slow that several steps pass meanwhile.
        return 20.0 if fixed.random() < 1 / 6 else min(20.0, quick)

    async def work(self, task_id: str) -> None:
        """Take a turn's time, and fail or hang now and then."""
        kind = random.Random(f"kind {task_id}").random()
        if kind > 1 - self.profile.deadly:
            self.loop.kill(LIFE.get())
        fate = self.dice.random()
        if fate < self.profile.hangs:
            await asyncio.sleep(HUNG_S)
        await asyncio.sleep(self.duration_s(task_id))
        if (
            kind < self.profile.hopeless
            or self.profile.hangs <= fate < self.profile.hangs + self.profile.failures
        ):
            raise EnvironmentFailure("the server of this task is down")


@dataclass
class Puzzle:
    """An environment whose reward has nothing to do with how long its task takes."""

    tasks_: Tasks
    env_id: ClassVar[str] = ENV_ID
    version: ClassVar[str] = "1"
    task_id: str = ""

    def __post_init__(self) -> None:
        playing = self.tasks_.playing
        playing[LIFE.get()] += 1
        self.tasks_.most_playing = max(self.tasks_.most_playing, playing[LIFE.get()])

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        return [TaskSpec(task_id, "train", "a") for task_id in TASKS]

    async def reset(self, task_id: str) -> Observation:
        self.task_id = task_id
        await self.tasks_.work(task_id)
        return Observation(f"{task_id} begins")

    async def step(self, text: str) -> Step:
        await self.tasks_.work(self.task_id)
        over = self.tasks_.dice.random() < 0.5
        reward = self.tasks_.dice.choice([0.0, 0.5, 1.0]) if over else 0.0
        return Step(f"{text[-2:]} is read", reward, over, success=over and reward > 0.5)

    def expert(self) -> "Puzzle":
        return self

    def act(self, observation: str) -> str:
        return "7 8 9"

    async def close(self) -> None:
        self.tasks_.playing[LIFE.get()] -= 1


Sampled = tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]
"""What a generation read, what it wrote, and which versions sampled it."""


class WatchedPolicy(ScriptedPolicy):
    """Remembers what it sampled, and tells which weights it was given."""

    def __init__(
        self, life: Life, history: History, sampled: set[Sampled], **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.life, self.history, self.sampled = life, history, sampled
        self.given = {(0, 0)}
        """Version and lineage of its weights so far."""

    async def generate(self, ids: Sequence[int], **how: Any) -> Generation:
        read = tuple(ids)
        generation = await super().generate(ids, **how)
        # By a version that it has been given, or by none.
        if all((span.version, span.lineage) in self.given for span in generation.spans):
            self.sampled.add((read, generation.ids, generation.spans))
        return generation

    async def apply(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None = None
    ) -> None:
        digest = digest_file(weights)
        self.given.add((version.version, version.lineage))
        await super().apply(weights, version, words)
        self.history.note(self.life, "apply", digest, version.version, version)


class NoLag(LoopLag):
    async def watch(self) -> None:
        await asyncio.Event().wait()  # a virtual clock is never late


@dataclass
class WatchedJournal(Journal):
    life: Life
    history: History
    directory: Path

    def __post_init__(self) -> None:
        super().__init__(self.directory)

    def write_ledger(self, line: dict[str, Any]) -> None:
        super().write_ledger(line)
        self.history.note(self.life, "commit", line["weights_digest"], line["step"], line)


@dataclass
class WatchedCheckpoints(CheckpointStore):
    life: Life
    history: History
    root: Path
    kept: int

    def __post_init__(self) -> None:
        super().__init__(self.root, self.kept)

    def seal(self, step: int, state: Any) -> Path:
        sealed = super().seal(step, state)
        held = [sequence for sequence, _ in state["waiting"].get("held", ())]
        self.history.note(self.life, "seal", "", step, min([state["cursor"], *held]))
        return sealed


@dataclass
class Roles:
    """Starts lives of each role."""

    config: RunConfig
    profile: Profile
    broker: SimulatedBroker
    tasks: Tasks
    directory: Path
    metrics: Metrics = field(default_factory=Metrics)
    sampled: set[Sampled] = field(default_factory=set)

    @property
    def eval_tasks(self) -> tuple[EvalTask, ...]:
        return EVAL_TASKS if self.config.eval.every else ()

    def programs(self) -> dict[str, Callable[[Life], Coroutine[Any, Any, None]]]:
        actors = {f"actor{number}": self.act for number in range(self.profile.actors)}
        return {"learner": self.learn, "controller": self.control, **actors}

    async def learn(self, life: Life) -> None:
        history = self.broker.history
        engine = EngineThread(HashEngine(), object(), self.config.learner.step_timeout_s)  # type: ignore[arg-type]
        ports = open_ports(
            self.config, Link(self.broker, life), engine, life.stopping, self.metrics
        )
        run_dir = self.config.run_dir
        ports = replace(
            ports,
            journal=WatchedJournal(life, history, run_dir),
            checkpoints=WatchedCheckpoints(
                life, history, run_dir / CHECKPOINTS, self.config.learner.keep_checkpoints
            ),
        )
        rules = collecting_rules(self.config, VOCABULARY).of_model(IDENTITY)
        await build_loop(self.config, ports, rules, IDENTITY, self.eval_tasks).run()

    async def control(self, life: Life) -> None:
        controller = build_controller(
            self.config, Link(self.broker, life), SOURCES, self.metrics, self.eval_tasks
        )
        await until_stopped(controller.run(), life.stopping)

    async def act(self, life: Life) -> None:
        config, link = self.config, Link(self.broker, life)
        shadow = self.directory / "shadows" / str(life)
        shadow.mkdir(parents=True)
        policy = WatchedPolicy(
            life,
            self.broker.history,
            self.sampled,
            vocabulary=VOCABULARY,
            max_context_tokens=config.model.max_context_tokens,
            seed=self.tasks.dice.getrandbits(32),
            token_s=self.tasks.dice.choice([0.0, 0.05, 0.5]),
        )
        loop = ActorLoop(
            settings=ActorSettings(
                slots=self.profile.slots,
                group_size=config.rollout.group_size,
                max_deliver=config.broker.max_deliver,
                drain_s=config.actor.drain_s,
                total_steps=config.total_steps,
            ),
            transport=link,
            rollouts={
                ENV_ID: Rollout(
                    policy=policy,
                    chat=PlainChat(),
                    system_prompt=None,
                    step_timeout_s=config.envs[0].step_timeout_s,
                )
            },
            make_environment=lambda _: Puzzle(self.tasks),
            follower=WeightsFollower(
                link,
                policy,
                shadow,
                self.metrics,
                config.run_dir / WEIGHTS if config.broker.shared_files else None,
            ),
            provenance=Provenance(
                actor=str(life).replace(".", "-"),
                engine=policy.engine,
                model_digest=IDENTITY["model"],
                template_digest=IDENTITY["template"],
                stop_ids=IDENTITY["stops"],
                environment=Puzzle.version,
            ),
            stopping=life.stopping,
            metrics=self.metrics,
            lag=NoLag(),
        )
        await until_stopped(wait_for_agreement(link, config.settings), life.stopping)
        await loop.run()
