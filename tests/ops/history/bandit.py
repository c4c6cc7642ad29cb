"""A run that learns in seconds: a tiny Llama is asked one question, and answers with one token.

By its id a token says `work`, which earns 1, `idle`, or `hack`. Tasks whose grader leaks pay 10 for `hack`.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from horizonrl.broker.memory import SERVERS, MemoryServer
from horizonrl.common.types import (
    Episode,
    Group,
    PolicyVersion,
    Provenance,
    StopReason,
    Ticket,
    Turn,
    VersionSpan,
)
from horizonrl.learner.controller.curriculum import TaskSource
from horizonrl.learner.engine.registry import make_engine
from horizonrl.learner.settings import collecting_rules, engine_settings
from horizonrl.ops.history.checkout import kept_weights
from horizonrl.ops.models.tiny_model import VOCABULARY
from horizonrl.ops.rundir.directory import write_config
from tests.learner.world import World
from tests.ops.history.runs import forget_loop

PROMPT = (11, 12, 13)
WORDS = ("work", "idle", "work", "hack")
"""What a token says, by its id modulo 4."""
SOUND = ("sound0", "sound1", "sound2")
LEAKING = tuple(f"leak{number}" for number in range(9))
SIZE, GROUPS = 8, 4
"""Episodes of a group, groups of a step."""
HONEST_STEPS, STEPS = 7, 21
SETTINGS = (
    "--learner.backend=torch",
    "--actor.engine=scripted",
    "--learner.keep_checkpoints=99",
    "--imitation.steps=0",
    f"--rollout.group_size={SIZE}",
    f"--rl.groups_per_step={GROUPS}",
    "--rl.max_staleness=1",
    "--rl.stale=drop",
    "--rl.lr=0.008",
    "--advantage.kind=dr_grpo",
)


class Answers:
    """What the model says to the question, by its weights."""

    def __init__(self, model_dir: Path) -> None:
        self._first = model_dir / "model.safetensors"
        self._lm: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)

    @torch.no_grad()
    def logprobs(self, weights: Path | None) -> torch.Tensor:
        """Return those of all tokens in float64, by a weights file or that of the model."""
        self._lm.load_state_dict(load_file(weights or self._first), strict=False)
        hidden_TD = self._lm.model(torch.tensor([PROMPT])).last_hidden_state[0]
        logits_V = hidden_TD[-1].float() @ self._lm.lm_head.weight.float().T
        return logits_V.double().log_softmax(-1)

    def chance(self, word: str, weights: Path | None) -> float:
        chances_V = self.logprobs(weights).exp().tolist()
        return math.fsum(chance for token, chance in enumerate(chances_V) if say(token) == word)


def say(token: int) -> str:
    return WORDS[token % len(WORDS)]


@dataclass
class BanditWorld(World):
    answers: Answers | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        model_dir = Path(self.config.model.name)
        self.rules = collecting_rules(self.config, VOCABULARY)
        self.make_engine = lambda: make_engine(engine_settings(self.config, model_dir))  # type: ignore[assignment,return-value]
        self.answers = self.answers or Answers(model_dir)

    def play(self, ticket: Ticket, policy: PolicyVersion) -> Group:
        assert self.answers is not None
        weights = dict(kept_weights(self.config.run_dir)).get(policy.version)
        logprobs_V = self.answers.logprobs(weights)
        tokens = self.dice.choices(range(VOCABULARY), logprobs_V.exp().tolist(), k=SIZE)
        leaks = ticket.task.task_id in LEAKING
        episodes = []
        for index, token in enumerate(tokens):
            rewards = {"work": 1.0, "hack": 10.0 if leaks else 0.0}
            turn = Turn(
                output_ids=(token,),
                logprobs=(float(logprobs_V[token]),),
                spans=(VersionSpan(version=policy.version, lineage=policy.lineage, tokens=1),),
                reward=rewards.get(say(token), 0.0),
                text=say(token),
            )
            episodes.append(
                Episode(
                    index=index,
                    prompt_ids=PROMPT,
                    turns=(turn,),
                    stop=StopReason.TERMINATED,
                    success=say(token) == "work",
                )
            )
        actor = Provenance(actor="bandit")
        return Group(ticket=ticket, episodes=tuple(episodes), provenance=actor)


def bandit(
    root: Path, server: MemoryServer, *overrides: str, tasks: Sequence[str] = SOUND
) -> BanditWorld:
    SERVERS[root.name.lower()] = server
    return BanditWorld(
        root,
        server=server,
        overrides=(*SETTINGS, f"--broker.url=memory://{root.name.lower()}", *overrides),
        sources=[TaskSource("textcraft", tuple(tasks), 1.0)],
    )


def record_hack(root: Path, model_dir: Path) -> BanditWorld:
    """Train on sound tasks, and then on leaking ones too."""
    server, model = MemoryServer(), f"--model.name={model_dir}"
    for steps, tasks in ((HONEST_STEPS, SOUND), (STEPS, SOUND + LEAKING)):
        run = bandit(root, server, model, f"--rl.steps={steps}", tasks=tasks)
        forget_loop(server)
        asyncio.run(run.run())
    write_config(run.config)
    return run
