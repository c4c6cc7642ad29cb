"""What answers an environment's observations: the policy, or the environment's own expert.

Place in the flow: ids → **Generation** → reply.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from horizonrl.actors.policy import Generation, Policy
from horizonrl.actors.rollout.replies import Speech
from horizonrl.common.errors import EnvironmentTimeout, EpisodeUnfit
from horizonrl.common.types import PolicyVersion, VersionSpan
from horizonrl.envs.api import Expert
from horizonrl.envs.in_thread import in_own_thread

T = TypeVar("T")


class Agent(Protocol):
    async def answer(
        self, ids: Sequence[int], observation: str, seed: int | None
    ) -> Generation: ...


@dataclass(frozen=True, slots=True)
class PolicyAgent:
    policy: Policy
    stop_ids: tuple[int, ...]
    max_turn_tokens: int
    temperature: float

    async def answer(self, ids: Sequence[int], observation: str, seed: int | None) -> Generation:
        return await self.policy.generate(
            ids,
            max_tokens=self.max_turn_tokens,
            temperature=self.temperature,
            stop_ids=self.stop_ids,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class ExpertAgent:
    """Plays demonstrations. Nothing is sampled, so every logprob is 0: certain."""

    expert: Expert
    speech: Speech
    version: PolicyVersion
    max_turn_tokens: int
    timeout_s: float

    async def answer(self, ids: Sequence[int], observation: str, seed: int | None) -> Generation:
        # An expert may plan, or ask a simulator: the other episodes do not wait for it, and it may hang like one.
        advice = in_own_thread(self.speech.advise, self.expert, observation)
        output = self.speech.encode(await within(self.timeout_s, advice))
        # Rejected, not cut: imitation would take the cut for the end of the turn.
        if len(output) > self.max_turn_tokens:
            raise EpisodeUnfit(
                f"a turn of the demonstration has {len(output)} tokens and rollout.max_turn_tokens is "
                f"{self.max_turn_tokens}: raise it"
            )
        # Nobody sampled these tokens, but each needs a version: PROTOCOL.md says the ticket's own.
        span = VersionSpan(
            version=self.version.version, lineage=self.version.lineage, tokens=len(output)
        )
        return Generation(ids=output, logprobs=(0.0,) * len(output), spans=(span,))


async def within(timeout_s: float, call: Awaitable[T]) -> T:
    """Await what an environment or its expert does. Raises EnvironmentTimeout."""
    try:
        # A TimeoutError that the environment itself raises ends here as well: either way there was no answer.
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise EnvironmentTimeout(f"no answer within {timeout_s:g} s") from error
