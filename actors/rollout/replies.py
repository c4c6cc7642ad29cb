"""How the replies of an agent reach its environment: as words, or as calls of tools in its chat template's own syntax.

Place in the flow: Generation → **reply** → Step → Observation → ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from horizonrl.actors.chat.messages import ChatMessage
from horizonrl.actors.chat.template import Chat, ChatTemplate
from horizonrl.actors.chat.tool_calls import ToolParser, parser_for
from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs import contract, registry
from horizonrl.envs.api import (
    CallsTools,
    Environment,
    Expert,
    OffersTools,
    Reply,
    Step,
    ToolCall,
    tool_user,
)
from horizonrl.envs.text_limits import MAX_CALLS, readable

UNMADE = f"Not made: a reply makes at most {MAX_CALLS} calls."


class Speech(Protocol):
    """One episode's way between ids and its environment."""

    def open(self, system: str | None, observation: str) -> tuple[int, ...]:
        """Return the first prompt."""

    async def step(self, output_ids: Sequence[int], text: str) -> Step:
        """Let the environment answer a generation, given with its text."""

    def delta(self, output_ids: Sequence[int], observation: str) -> tuple[int, ...]:
        """Return what follows a generation that was answered."""

    def advise(self, expert: Expert, observation: str) -> Reply:
        """Return an expert's reply. It may take long."""

    def encode(self, reply: Reply) -> tuple[int, ...]:
        """Return the ids of an expert's reply."""


@dataclass(frozen=True, slots=True)
class Words:
    """The environment reads the text."""

    chat: Chat
    environment: Environment

    def open(self, system: str | None, observation: str) -> tuple[int, ...]:
        return self.chat.open(system, observation)

    async def step(self, output_ids: Sequence[int], text: str) -> Step:
        return await contract.step(self.environment, readable(text))

    def delta(self, output_ids: Sequence[int], observation: str) -> tuple[int, ...]:
        return self.chat.delta(output_ids, observation)

    def advise(self, expert: Expert, observation: str) -> Reply:
        return Reply(expert.act(observation))

    def encode(self, reply: Reply) -> tuple[int, ...]:
        return self.chat.encode_turn(reply.text)


@dataclass(slots=True)
class Calls:
    """The environment's tools stand in the prompt, its results in the role `tool`. A reply without a call is text."""

    chat: ChatTemplate
    parser: ToolParser
    environment: Environment
    user: OffersTools
    results: list[str] = field(default_factory=list)
    """Of the calls of the last reply."""

    def open(self, system: str | None, observation: str) -> tuple[int, ...]:
        first = () if system is None else (ChatMessage("system", system),)
        return self.chat.render((*first, ChatMessage("user", observation)), self.user.tools())

    async def step(self, output_ids: Sequence[int], text: str) -> Step:
        # The tokens of a family's call syntax may be special ones, which `text` leaves out.
        written = self.chat.thought + self.chat.spell(output_ids)
        reply = self.parser.parse(readable(written), self.user.tools())
        self.results = []
        if not reply.calls:
            # Without thoughts: they are no answer.
            return await contract.step(self.environment, readable(reply.content))
        steps: list[Step] = []
        for call in reply.calls[:MAX_CALLS]:
            steps.append(
                await contract.call(self.user, ToolCall(call.name, readable(call.arguments)))
            )
            if steps[-1].terminated or steps[-1].truncated:
                break
        self.results = [step.observation for step in steps] + [UNMADE] * (
            len(reply.calls) - len(steps)
        )
        return replace(
            steps[-1],
            observation="\n".join(self.results),
            reward=sum(step.reward for step in steps),
        )

    def delta(self, output_ids: Sequence[int], observation: str) -> tuple[int, ...]:
        if not self.results:
            return self.chat.extend(output_ids, (ChatMessage("user", observation),))
        # What was announced stands behind the results.
        announced = observation.removeprefix("\n".join(self.results))
        results = (*self.results[:-1], self.results[-1] + announced)
        return self.chat.extend(output_ids, [ChatMessage("tool", result) for result in results])

    def advise(self, expert: Expert, observation: str) -> Reply:
        if not isinstance(expert, CallsTools):
            raise EnvironmentFailure(
                f"the expert of {self.environment.env_id} calls no tools: it has no `reply`"
            )
        return expert.reply(observation)

    def encode(self, reply: Reply) -> tuple[int, ...]:
        return self.chat.encode_reply(ChatMessage("assistant", reply.text, reply.calls))


async def parser_if_needed(
    chat: ChatTemplate, environments: Mapping[str, Mapping[str, Any]]
) -> ToolParser | None:
    """Return a parser if any of the environments, given by id with their options, offers tools.

    Raises ConfigError if none reads what the template writes.
    """
    for env_id, options in environments.items():
        if await registry.offers_tools(env_id, options):
            try:
                return parser_for(chat)
            except ConfigError as error:
                raise ConfigError(f"{env_id} is played by calling tools: {error}") from None
    return None


def speech_of(environment: Environment, chat: Chat, parser: ToolParser | None) -> Speech:
    """Return an environment's way to speak. Raises ConfigError for tools without a template and a parser for them."""
    user = tool_user(environment)
    if user is None:
        return Words(chat, environment)
    if parser is None or not isinstance(chat, ChatTemplate):
        raise ConfigError(
            f"{environment.env_id} is played by calling tools, and nothing here reads the calls: use another `format`"
        )
    return Calls(chat, parser, environment, user)
