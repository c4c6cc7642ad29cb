"""The rollout: one episode of one environment with one agent. It knows nothing of NATS, metrics or config.

Place in the flow: Ticket → **Episode** → Group. Token exactness: the ids of a branch only ever grow, by
the ids that were sampled and by the template's own rendering of each observation. What is trained is never tokenised
again. An episode has one branch unless its context fills up and `context.py` shortens it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from horizonrl.actors.chat.template import Chat
from horizonrl.actors.chat.tool_calls import ToolParser
from horizonrl.actors.gateway.server import Gateway
from horizonrl.actors.policy import Generation, Policy
from horizonrl.actors.rollout.context import SUMMARY_REQUEST, Exchange, Opening, summary, window
from horizonrl.actors.rollout.faults import Faults
from horizonrl.actors.rollout.programs import play_program
from horizonrl.actors.rollout.replies import Speech, speech_of
from horizonrl.common.errors import ContextFull, EngineDead, EnvironmentTimeout, EpisodeUnfit, PolicyFailure
from horizonrl.common.lag import turn
from horizonrl.common.logs import get_logger
from horizonrl.common.state import ContextRule
from horizonrl.common.texts import printable
from horizonrl.common.types import (
    MAX_BRANCHES,
    MAX_SHORT_TEXT,
    Branch,
    Episode,
    Kind,
    PolicyVersion,
    StopReason,
    Ticket,
    Turn,
    VersionSpan,
)
from horizonrl.envs import contract
from horizonrl.envs.api import Environment, Expert, Program, Step, expert_of, state_digest
from horizonrl.envs.bounds import readable
from horizonrl.envs.in_thread import in_own_thread

log = get_logger()

CLOSE_S = 10.0
"""Longest time that an environment may take to close; the episode does not wait longer for it."""

T = TypeVar("T")


class Agent(Protocol):
    """What answers observations: the policy, or an environment's expert."""

    async def answer(self, ids: Sequence[int], observation: str, seed: int | None) -> Generation: ...


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
        advised = in_own_thread(self.speech.advise, self.expert, observation)
        output = self.speech.encode(await within(self.timeout_s, advised))
        # Rejected, not cut: imitation would take the cut for the end of the turn.
        if len(output) > self.max_turn_tokens:
            raise EpisodeUnfit(
                f"a turn of the demonstration has {len(output)} tokens and max_turn_tokens is {self.max_turn_tokens}"
            )
        # Nobody sampled these tokens, but each needs a version: PROTOCOL.md says the ticket's own.
        span = VersionSpan(version=self.version.version, lineage=self.version.lineage, tokens=len(output))
        return Generation(ids=output, logprobs=(0.0,) * len(output), spans=(span,))


@dataclass
class Recording:
    """An episode in the making."""

    speech: Speech = field(init=False)
    ids: list[int] = field(default_factory=list)
    """Everything that the policy has read and written in the present branch."""
    task: str = ""
    """The first observation, in the environment's own words."""
    prompt: str = ""
    prompt_ids: tuple[int, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    """The turns that a window may keep: all of them, whichever branch they were played in."""
    branches: list[Branch] = field(default_factory=list)
    success: bool = False
    unanswered: str = ""
    """The reply that the environment is about to answer."""
    generate_s: float = 0.0
    environment_s: float = 0.0

    @property
    def in_new_branch(self) -> bool:
        """Whether nothing has been generated yet in the present branch."""
        return not self.turns or self.turns[-1].branch < len(self.branches)

    def record(self, generation: Generation, text: str, **answer: Any) -> None:
        """Add a turn to the present branch."""
        self.turns.append(
            Turn(
                output_ids=generation.ids,
                logprobs=generation.logprobs,
                spans=generation.spans,
                text=text,
                branch=len(self.branches),
                **answer,
            )
        )

    def end_branch(self) -> None:
        """Leave the last observation as text only, since no turn has read its tokens, and only what was read counts."""
        self.turns[-1:] = [turn.model_copy(update={"observation_ids": ()}) for turn in self.turns[-1:]]

    def go_on_from(self, opening: Opening) -> None:
        """Begin another branch."""
        self.end_branch()
        self.branches.append(Branch(prompt_ids=opening.ids, prompt=opening.text))
        self.ids = list(opening.ids)

    def finish(self, index: int, stop: StopReason, error: str | None = None) -> Episode:
        """Return the episode; a branch that was begun in vain is left out."""
        self.end_branch()
        return Episode(
            index=index,
            prompt_ids=self.prompt_ids,
            turns=tuple(self.turns),
            branches=tuple(self.branches[: self.turns[-1].branch if self.turns else 0]),
            stop=stop,
            success=self.success,
            prompt=self.prompt,
            error=error and printable(error, MAX_SHORT_TEXT),
            generate_s=self.generate_s,
            environment_s=self.environment_s,
        )


@dataclass(frozen=True, slots=True)
class Rollout:
    policy: Policy
    chat: Chat
    system_prompt: str | None
    step_timeout_s: float
    context: ContextRule = ContextRule.STOP
    """What happens when the context is full before the horizon is."""
    parser: ToolParser | None = None
    """Reads the calls of replies, for environments that offer tools."""
    gateway: Gateway | None = None
    """Serves the policy to programs."""
    states: bool = False
    """Whether each turn records the state that it was taken in, for an advantage that compares turns within them."""
    faults: Faults = field(default_factory=Faults)

    async def episode(self, environment: Environment, ticket: Ticket, index: int) -> Episode:
        """Play one episode to its stop reason. A failure that is not the agent's is a broken episode, not an error.

        Raises EngineDead: without an engine there is no next episode either.
        """
        recording = Recording()
        try:
            stop = await self._play(environment, ticket, index, recording)
            return recording.finish(index, stop)
        except EngineDead:  # before PolicyFailure, of which it is one
            raise
        # Broken is not zero: a failure ends the episode with its reason, and never with a reward.
        except EnvironmentTimeout as error:
            return self._broken(error, StopReason.ENV_TIMEOUT, environment, ticket, index, recording)
        except EpisodeUnfit as error:
            return recording.finish(index, StopReason.UNFIT, str(error))
        except ContextFull as error:
            if recording.turns:  # the agent used up the context: a cut, as when our own count says so
                return recording.finish(index, StopReason.CONTEXT)
            return recording.finish(index, StopReason.UNFIT, str(error))
        except PolicyFailure as error:
            return recording.finish(index, StopReason.POLICY_ERROR, f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - an environment is anybody's code: its failure is the episode's
            return self._broken(error, StopReason.ENV_ERROR, environment, ticket, index, recording)

    def _broken(
        self,
        error: Exception,
        stop: StopReason,
        environment: Environment,
        ticket: Ticket,
        index: int,
        recording: Recording,
    ) -> Episode:
        """End an episode that its environment broke; the log and the record say where."""
        told = self.faults.tell(error, environment, ticket, recording.prompt, recording.turns, recording.unanswered)
        return recording.finish(index, stop, told)

    async def _play(self, environment: Environment, ticket: Ticket, index: int, recording: Recording) -> StopReason:
        # 1. Reset, and render the first prompt.
        await turn()  # the episodes of a group begin together
        first = await self._timed(contract.reset(environment, ticket.task.task_id), recording)
        observation = recording.task = first.text
        recording.prompt = announced(first.text, ticket, turns_taken=0)
        recording.speech = speech = speech_of(environment, self.chat, self.parser)
        recording.prompt_ids = speech.open(self.system_prompt, recording.prompt)
        recording.ids += recording.prompt_ids
        agent = self._agent(environment, speech, ticket)
        while True:
            # 2. Is there room for one more turn, or can some be made?
            # A whole turn must fit: a turn that the context cut would look as if the agent had stopped there.
            if self._shortens(recording, ticket):
                await self._shorten(agent, observation, ticket, index, recording)
            if not self._has_room(recording, ticket):
                return StopReason.CONTEXT
            # 3. Generate.
            state = state_digest(environment) if self.states else ""
            generation = await self._generate(agent, observation, ticket, index, recording)
            # 4. Let the environment answer, and record the turn.
            # The environment reads text; the episode keeps the sampled ids, which decoding might not give back.
            text = recording.unanswered = self.chat.decode(generation.ids)
            await turn()  # replies come in bursts, since the engine answers its whole batch at once
            step = await self._timed(speech.step(generation.ids, text), recording)
            turns_taken = len(recording.turns) + 1
            stop = stop_reason(step, turns_taken, ticket.horizon_turns)
            observation = step.observation
            read = announced(observation, ticket, turns_taken) if stop is None else observation
            # After the last turn nobody reads the observation, so it gets no ids.
            answer_ids = speech.delta(generation.ids, read) if stop is None else ()
            recording.record(
                generation, text, observation_ids=answer_ids, reward=step.reward, observation=read, state=state
            )
            recording.unanswered = ""
            recording.exchanges.append(Exchange(generation.ids, answer_ids, text, read))
            # Of the last step alone: an environment decides about success when it ends the episode.
            recording.success = step.success
            # 5. Stop, or go on with the observation appended.
            if stop is not None:
                return stop
            # Append only (token exactness). Sampled ids do not survive decoding and encoding: 11 of 32 sequences came
            # back as other ids.
            recording.ids += generation.ids + answer_ids

    def _has_room(self, recording: Recording, ticket: Ticket) -> bool:
        """Return whether one more turn fits. Raises EpisodeUnfit before the first turn, and for a demonstration.

        Demonstrations are trained whole, so one that does not fit is rejected, not cut.
        """
        tokens, turn_tokens, limit = len(recording.ids), ticket.sampling.max_turn_tokens, self.policy.max_context_tokens
        if tokens + turn_tokens <= limit:
            return True
        if recording.turns and ticket.kind is not Kind.DEMO:
            return False
        what = f"demonstration up to turn {len(recording.turns)}" if recording.turns else "first prompt"
        raise EpisodeUnfit(
            f"the {what} has {tokens} tokens: with max_turn_tokens {turn_tokens} it exceeds max_context_tokens {limit}"
        )

    def _shortens(self, recording: Recording, ticket: Ticket) -> bool:
        """Return whether the conversation is to be shortened before the next turn."""
        # A demonstration is trained whole. A branch without a turn would be followed by one just as long.
        if self.context is ContextRule.STOP or ticket.kind is Kind.DEMO or recording.in_new_branch:
            return False
        if len(recording.branches) >= MAX_BRANCHES - 1:
            return False
        needed = ticket.sampling.max_turn_tokens
        if self.context is ContextRule.SUMMARISE:
            # The summary takes one of the horizon's turns, and is worth it only with another one to follow.
            if ticket.horizon_turns - len(recording.turns) < 2:
                return False
            # Room is kept for it, after one more turn of full length: later there would be none to ask for it.
            needed += len(self.chat.delta((), SUMMARY_REQUEST)) + ticket.sampling.max_turn_tokens
        return len(recording.ids) + needed > self.policy.max_context_tokens

    async def _shorten(self, agent: Agent, observation: str, ticket: Ticket, index: int, recording: Recording) -> None:
        """Go on in a shorter branch, if one can be made; `observation` is the one that the next turn answers."""
        render = partial(recording.speech.open, self.system_prompt)
        room = self.policy.max_context_tokens - ticket.sampling.max_turn_tokens
        if self.context is ContextRule.WINDOW:
            opening = window(render, recording.task, recording.exchanges, room)
            if opening is not None:
                recording.go_on_from(opening)
            return
        # The request takes the place of the last observation, for which there may be no room.
        last = recording.turns[-1]
        request_ids = self.chat.delta(last.output_ids, SUMMARY_REQUEST)
        ids = recording.ids[: len(recording.ids) - len(last.observation_ids)] + list(request_ids)
        # Nor is it asked for if no branch could begin with it: the episode then plays on while it can.
        least = summary(render, recording.task, len(recording.turns), "", announced(observation, ticket, 0))
        if len(ids) > room or len(least.ids) + ticket.sampling.max_turn_tokens > room:
            return
        recording.turns[-1] = last.model_copy(update={"observation_ids": request_ids, "observation": SUMMARY_REQUEST})
        recording.ids = ids
        generation = await self._generate(agent, SUMMARY_REQUEST, ticket, index, recording)
        text = self.chat.decode(generation.ids)
        recording.record(generation, text)
        turns = len(recording.turns)
        read = announced(observation, ticket, turns)
        recording.go_on_from(summary(render, recording.task, turns - 1, readable(text), read))

    def _agent(self, environment: Environment, speech: Speech, ticket: Ticket) -> Agent:
        sampling = ticket.sampling
        if ticket.kind is Kind.DEMO:
            # An environment without an expert raises here; the ticket goes back, and ends as void after `max_deliver`.
            expert = expert_of(environment)
            return ExpertAgent(expert, speech, ticket.issued_at_version, sampling.max_turn_tokens, self.step_timeout_s)
        return PolicyAgent(self.policy, self.chat.stop_ids, sampling.max_turn_tokens, sampling.temperature)

    async def _generate(
        self, agent: Agent, observation: str, ticket: Ticket, index: int, recording: Recording
    ) -> Generation:
        base = ticket.sampling.seed
        # 4096 exceeds the most turns of an episode (1024), so that no two generations of a group share a seed.
        seed = None if base is None else (base + index) * 4096 + len(recording.turns)
        started = time.monotonic()
        generation = await agent.answer(recording.ids, observation, seed)
        recording.generate_s += time.monotonic() - started
        return generation

    async def _timed(self, call: Awaitable[T], recording: Recording) -> T:
        """Await an environment's call within its deadline."""
        started = time.monotonic()
        try:
            return await within(self.step_timeout_s, call)
        finally:
            # In `finally`, since a step that times out is the environment's time too.
            recording.environment_s += time.monotonic() - started


async def within(timeout_s: float, call: Awaitable[T]) -> T:
    """Await what an environment or its expert does. Raises EnvironmentTimeout."""
    try:
        # A TimeoutError that the environment itself raises ends here as well: either way there was no answer.
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise EnvironmentTimeout(f"no answer within {timeout_s:g} s") from error


async def play(make: Callable[[], Environment | Program], rollout: Rollout, ticket: Ticket, index: int) -> Episode:
    """Make an environment, play one episode in it, and close it. Raises EngineDead and nothing else."""
    try:
        environment = make()
    except Exception as error:  # noqa: BLE001 - an environment is anybody's code: its failure is the episode's
        return broken(index, rollout.faults.tell(error, make, ticket, "", (), ""))
    try:
        if isinstance(environment, Program):
            return await play_program(environment, rollout.gateway, ticket, index)
        return await rollout.episode(environment, ticket, index)
    except EngineDead:
        raise
    except Exception as error:  # noqa: BLE001 - what the environment gave makes no episode
        return broken(index, rollout.faults.tell(error, environment, ticket, "", (), ""))
    finally:
        # Here and not in `episode`, so that an environment is closed however its episode ended.
        await _close(environment, ticket.task.env_id)


def broken(index: int, error: str) -> Episode:
    """Return an episode that broke before its first turn."""
    return Episode(
        index=index, prompt_ids=(), turns=(), stop=StopReason.ENV_ERROR, error=printable(error, MAX_SHORT_TEXT)
    )


async def _close(environment: Environment | Program, env_id: str) -> None:
    try:
        # An environment that never closes must not hold up the other episodes of its group.
        async with asyncio.timeout(CLOSE_S):
            await environment.close()
    except Exception as error:  # noqa: BLE001 - the episode is over: what its environment leaves is only told
        log.warning("environment_not_closed", env=env_id, error=repr(error))


def stop_reason(step: Step, turns_taken: int, horizon_turns: int) -> StopReason | None:
    """Return why the episode ends after this step, or None. The environment's verdict comes before the horizon's."""
    if step.terminated:
        return StopReason.TERMINATED
    # Truncated is not failed: the learner must be able to tell a limit from a task that is over (broken is not zero).
    if step.truncated:
        return StopReason.ENV_TRUNCATED
    return StopReason.HORIZON if turns_taken >= horizon_turns else None


def announced(text: str, ticket: Ticket, turns_taken: int) -> str:
    """Return an observation as the policy reads it: with its remaining turns, where the ticket says so.

    These are the turns that the horizon leaves; the context or the environment's own limit may end the episode earlier.
    An expert reads the environment's own words.
    """
    remaining = ticket.horizon_turns - turns_taken
    return f"{text}\n[{remaining} turns left]" if ticket.announce_horizon else text
