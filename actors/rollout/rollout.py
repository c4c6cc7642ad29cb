"""The rollout: one episode of one environment with one agent. It knows nothing of NATS, metrics or config.

Place in the flow: Ticket → **Episode** → Group. Token exactness: the ids of a branch only ever grow, by
the ids that were sampled and by the template's own rendering of each observation. What is trained is never tokenised
again. An episode has one branch unless its context fills up and `context.py` shortens it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from horizonrl.actors.chat.template import Chat
from horizonrl.actors.chat.tool_calls import ToolParser
from horizonrl.actors.episode_ends import environment_stop, failure_stop, step_stop
from horizonrl.actors.gateway.server import Gateway
from horizonrl.actors.policy import Generation, Policy
from horizonrl.actors.rollout.agents import Agent, ExpertAgent, PolicyAgent, within
from horizonrl.actors.rollout.context import SUMMARY_REQUEST, Exchange, Opening, summary, window
from horizonrl.actors.rollout.faults import Faults
from horizonrl.actors.rollout.programs import play_program
from horizonrl.actors.rollout.replies import Speech, speech_of
from horizonrl.common.errors import ContextFull, EngineDead, EpisodeUnfit, PolicyFailure
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
    StopReason,
    Ticket,
    Turn,
)
from horizonrl.envs import contract
from horizonrl.envs.api import Environment, Program, make_expert, state_digest
from horizonrl.envs.text_limits import readable

log = get_logger()

CLOSE_S = 10.0
"""Longest time that an environment may take to close; the episode does not wait longer for it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rollout:
    """What all episodes of an environment have in common."""

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
        return await EpisodePlay(self, environment, ticket, index).run()


@dataclass
class EpisodePlay:
    """One episode while it is played."""

    rollout: Rollout
    environment: Environment
    ticket: Ticket
    index: int
    """Its number within the group."""
    task: str = ""
    """The first observation, in the environment's own words."""
    prompt: str = ""
    prompt_ids: tuple[int, ...] = ()
    ids: list[int] = field(default_factory=list)
    """Everything that the policy has read and written in the present branch."""
    turns: list[Turn] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    """The turns that a window may keep: all of them, whichever branch they were played in."""
    branches: list[Branch] = field(default_factory=list)
    success: bool = False
    unanswered: str = ""
    """The reply that the environment is about to answer."""
    generate_s: float = 0.0
    environment_s: float = 0.0

    async def run(self) -> Episode:
        """Play to the stop reason. Raises EngineDead and nothing else."""
        try:
            return self._finish(await self._play())
        except EngineDead:
            raise
        except (EpisodeUnfit, PolicyFailure) as error:
            stop = failure_stop(error, len(self.turns))
            name = f"{type(error).__name__}: " if stop is StopReason.POLICY_ERROR else ""
            return self._finish(stop, f"{name}{error}" if stop.broken else None)
        except Exception as error:  # noqa: BLE001 - an environment is anybody's code: its failure is the episode's
            fault = self.rollout.faults.tell(
                error, self.environment, self.ticket, self.prompt, self.turns, self.unanswered
            )
            return self._finish(environment_stop(error), fault)

    async def _play(self) -> StopReason:
        # 1. Reset, and render the first prompt.
        await turn()  # the episodes of a group begin together
        reset = contract.reset(self.environment, self.ticket.task.task_id)
        observation = self.task = (await self._timed(reset)).text
        self.prompt = self._announce_turns(observation)
        self.prompt_ids = self.speech.open(self.rollout.system_prompt, self.prompt)
        self.ids += self.prompt_ids
        while True:
            # 2. Is there room for one more turn, or can some be made?
            if self._must_shorten():
                await self._shorten(observation)
            self._check_room()
            # 3. Generate.
            state = state_digest(self.environment) if self.rollout.states else ""
            generation = await self._generate(observation)
            # 4. Let the environment answer, and record the turn.
            # The environment reads text; the episode keeps the sampled ids, which decoding might not give back.
            text = self.unanswered = self.rollout.chat.decode(generation.ids)
            await turn()  # replies come in bursts, since the engine answers its whole batch at once
            step = await self._timed(self.speech.step(generation.ids, text))
            turns_taken = len(self.turns) + 1
            stop = step_stop(step, turns_taken, self.ticket.horizon_turns)
            observation = step.observation
            read = self._announce_turns(observation, turns_taken) if stop is None else observation
            # After the last turn nobody reads the observation, so it gets no ids.
            answer_ids = self.speech.delta(generation.ids, read) if stop is None else ()
            self._record(
                generation,
                text,
                observation_ids=answer_ids,
                reward=step.reward,
                observation=read,
                state=state,
            )
            self.unanswered = ""
            self.exchanges.append(Exchange(generation.ids, answer_ids, text, read))
            # Only that of the last step counts: an environment decides about success when it ends the episode.
            self.success = step.success
            # 5. Stop, or go on with the observation appended.
            if stop is not None:
                return stop
            # Append only (token exactness). Sampled ids do not survive decoding and encoding: 11 of 32 sequences came
            # back as other ids.
            self.ids += generation.ids + answer_ids

    @cached_property
    def speech(self) -> Speech:
        """How replies reach the environment. Raises ConfigError for tools that nothing here reads."""
        return speech_of(self.environment, self.rollout.chat, self.rollout.parser)

    @cached_property
    def agent(self) -> Agent:
        """What answers the observations, once the environment is reset."""
        rollout, sampling = self.rollout, self.ticket.sampling
        if self.ticket.kind is not Kind.DEMO:
            return PolicyAgent(
                rollout.policy,
                rollout.chat.stop_ids,
                sampling.max_turn_tokens,
                sampling.temperature,
            )
        return ExpertAgent(
            # An environment without an expert raises here; the ticket goes back, and ends as void after `max_deliver`.
            make_expert(self.environment),
            self.speech,
            self.ticket.issued_at_version,
            sampling.max_turn_tokens,
            rollout.step_timeout_s,
        )

    @property
    def _room_tokens(self) -> int:
        """Tokens that the policy may read before a turn: a whole one must fit.

        A turn that the context cut would look as if the agent had stopped there.
        """
        return self.rollout.policy.max_context_tokens - self.ticket.sampling.max_turn_tokens

    def _check_room(self) -> None:
        """Raise ContextFull if the next turn does not fit, EpisodeUnfit for a demonstration.

        Demonstrations are trained whole, so one that does not fit is rejected, not cut.
        """
        if len(self.ids) <= self._room_tokens:
            return
        turns = len(self.turns)
        what = f"demonstration up to turn {turns}" if turns else "first prompt"
        message = (
            f"the {what} has {len(self.ids)} tokens: with max_turn_tokens {self.ticket.sampling.max_turn_tokens} "
            f"it exceeds max_context_tokens {self.rollout.policy.max_context_tokens}"
        )
        raise (EpisodeUnfit if self.ticket.kind is Kind.DEMO else ContextFull)(message)

    def _must_shorten(self) -> bool:
        """Return whether the conversation is to be shortened before the next turn."""
        rule, ticket = self.rollout.context, self.ticket
        # A demonstration is trained whole.
        if rule is ContextRule.STOP or ticket.kind is Kind.DEMO:
            return False
        # A branch without a turn would be followed by one just as long.
        if not self.turns or self.turns[-1].branch < len(self.branches):
            return False
        if len(self.branches) >= MAX_BRANCHES - 1:
            return False
        room_tokens = self._room_tokens
        if rule is ContextRule.SUMMARISE:
            # The summary takes one of the horizon's turns, and is worth it only with another one to follow.
            if ticket.horizon_turns - len(self.turns) < 2:
                return False
            # Room is kept for it, after one more turn of full length: later there would be none to ask for it.
            request = len(self.rollout.chat.delta((), SUMMARY_REQUEST))
            room_tokens -= request + ticket.sampling.max_turn_tokens
        return len(self.ids) > room_tokens

    async def _shorten(self, observation: str) -> None:
        """Go on in a shorter branch, if one can be made; `observation` is the one that the next turn answers."""
        render = partial(self.speech.open, self.rollout.system_prompt)
        if self.rollout.context is ContextRule.WINDOW:
            opening = window(render, self.task, self.exchanges, self._room_tokens)
            if opening is not None:
                self._go_on_from(opening)
            return
        # The request takes the place of the last observation, for which there may be no room.
        last = self.turns[-1]
        request_ids = self.rollout.chat.delta(last.output_ids, SUMMARY_REQUEST)
        ids = self.ids[: len(self.ids) - len(last.observation_ids)] + list(request_ids)
        # Nor is it asked for if no branch could begin with it: the episode then plays on while it can.
        least = summary(render, self.task, len(self.turns), "", self._announce_turns(observation))
        least_tokens = len(least.ids) + self.ticket.sampling.max_turn_tokens
        if max(len(ids), least_tokens) > self._room_tokens:
            return
        self.turns[-1] = last.model_copy(
            update={"observation_ids": request_ids, "observation": SUMMARY_REQUEST}
        )
        self.ids = ids
        generation = await self._generate(SUMMARY_REQUEST)
        text = self.rollout.chat.decode(generation.ids)
        self._record(generation, text)
        turns = len(self.turns)
        read = self._announce_turns(observation, turns)
        self._go_on_from(summary(render, self.task, turns - 1, readable(text), read))

    def _go_on_from(self, opening: Opening) -> None:
        """Begin another branch."""
        self._end_branch()
        self.branches.append(Branch(prompt_ids=opening.ids, prompt=opening.text))
        self.ids = list(opening.ids)

    def _end_branch(self) -> None:
        """Leave the last observation as text only, since no turn has read its tokens, and only what was read counts."""
        self.turns[-1:] = [
            turn.model_copy(update={"observation_ids": ()}) for turn in self.turns[-1:]
        ]

    async def _generate(self, observation: str) -> Generation:
        base = self.ticket.sampling.seed
        # 4096 exceeds the most turns of an episode (1024), so that no two generations of a group share a seed.
        seed = None if base is None else (base + self.index) * 4096 + len(self.turns)
        started = time.monotonic()
        generation = await self.agent.answer(self.ids, observation, seed)
        self.generate_s += time.monotonic() - started
        return generation

    async def _timed(self, call: Awaitable[T]) -> T:
        """Await an environment's call within its deadline."""
        started = time.monotonic()
        try:
            return await within(self.rollout.step_timeout_s, call)
        finally:
            # In `finally`, since a step that times out is the environment's time too.
            self.environment_s += time.monotonic() - started

    def _announce_turns(self, text: str, turns_taken: int = 0) -> str:
        """Return an observation as the policy reads it: with its remaining turns, where the ticket says so.

        These are the turns that the horizon leaves; the context or the environment's own limit may end the episode
        earlier. An expert reads the environment's own words.
        """
        remaining = self.ticket.horizon_turns - turns_taken
        return f"{text}\n[{remaining} turns left]" if self.ticket.announce_horizon else text

    def _record(self, generation: Generation, text: str, **answer: Any) -> None:
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

    def _finish(self, stop: StopReason, error: str | None = None) -> Episode:
        """Return the episode; a branch that was begun in vain is left out."""
        self._end_branch()
        return Episode(
            index=self.index,
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


async def play(
    make: Callable[[], Environment | Program], rollout: Rollout, ticket: Ticket, index: int
) -> Episode:
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
        index=index,
        prompt_ids=(),
        turns=(),
        stop=StopReason.ENV_ERROR,
        error=printable(error, MAX_SHORT_TEXT),
    )


async def _close(environment: Environment | Program, env_id: str) -> None:
    try:
        # An environment that never closes must not hold up the other episodes of its group.
        async with asyncio.timeout(CLOSE_S):
            await environment.close()
    except Exception as error:  # noqa: BLE001 - the episode is over: what its environment leaves is only told
        log.warning("environment_not_closed", env=env_id, error=repr(error))
