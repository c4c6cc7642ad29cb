"""The policy on an inference server that samples from token ids and returns them: vLLM's OpenAI-compatible server.

`POST /completions` takes a prompt of ids; with `return_token_ids` and `logprobs` it says which ids were sampled and how
likely they were. The server keeps its weights, so this policy is for evaluations. Start the server as the engine of an
actor is started: `--logprobs-mode processed_logprobs --generation-config vllm`; without the first, logprobs are those
before temperature.

An endpoint that only speaks in messages, such as OpenAI's own, is `conversation.py`'s.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, Field, SecretStr

from horizonrl.actors.engines.client import SEEDS, Endpoint, EndpointSettings
from horizonrl.actors.policy import ChangedWords, Generation, InferenceSettings, Policy
from horizonrl.common.arrays import MAX_TOKENS, TokenId
from horizonrl.common.errors import ConfigError, EngineDead, PolicyFailure, WeightsRejected
from horizonrl.common.types import PolicyVersion, VersionSpan

KEY_VARIABLE = "OPENAI_API_KEY"
UNSHAPED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent with every request: a server's own defaults would sample from another distribution than the logprobs' one."""


async def start(settings: InferenceSettings) -> Policy:
    """Return the policy of a server that answers. Raises EngineDead when it does not, ConfigError without its URL."""
    if settings.endpoint is None:
        raise ConfigError(
            "actor.engine is endpoint, but actor.endpoint is not set: give the server's URL"
        )
    key = os.environ.get(KEY_VARIABLE, "").strip()
    endpoint = Endpoint(
        EndpointSettings(settings.endpoint, model=None, key=SecretStr(key) if key else None)
    )
    policy = EndpointPolicy(endpoint, settings.max_context_tokens)
    # Entered by hand: the connections live as long as the policy, which closes them.
    await endpoint.__aenter__()
    try:
        await endpoint.reach()
    except EngineDead:
        await policy.close()
        raise
    return policy


class EndpointPolicy:
    """A Policy whose tokens a server samples. Its version is always 0: the server's weights are its own."""

    takes_weights = False
    takes_words = False

    def __init__(self, endpoint: Endpoint, max_context_tokens: int) -> None:
        """`endpoint` is open; the policy closes it."""
        self.max_context_tokens = max_context_tokens
        self.engine = endpoint.description
        self.version = PolicyVersion()
        self._endpoint = endpoint
        self._closed = False

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int | None,
    ) -> Generation:
        """Sample a continuation (see Policy). Raises ContextFull when the server has no room for it."""
        if self._closed:
            raise EngineDead("the policy was closed")
        answer = await self._endpoint.ask(
            "completions",
            _TokenCompletion,
            prompt=list(ids),
            max_tokens=max_tokens,
            temperature=temperature,
            seed=None if seed is None else seed % SEEDS,
            stop_token_ids=list(stop_ids),
            ignore_eos=True,  # `stop_ids` says it all
            logprobs=0,  # of the sampled token only
            return_token_ids=True,
            **UNSHAPED,
        )
        choice = answer.choices[0]
        # An aborted request has tokens too, but they are no turn that the policy ended.
        if choice.finish_reason not in ("stop", "length"):
            raise PolicyFailure(f"{self.engine} ended a request with {choice.finish_reason!r}")
        logprobs = choice.logprobs.token_logprobs
        # Token exactness: an id without its logprob cannot be used, and a missing one would shift all that follow.
        if len(logprobs) != len(choice.token_ids) or not all(map(math.isfinite, logprobs)):
            raise PolicyFailure(
                f"{self.engine} gave {len(choice.token_ids)} tokens and the logprobs {logprobs!s:.200}"
            )
        span = VersionSpan(
            version=self.version.version, lineage=self.version.lineage, tokens=len(logprobs)
        )
        # Rounding may lift the logprob of a certain token above 0, which a record rejects.
        return Generation(
            tuple(choice.token_ids), tuple(min(0.0, logprob) for logprob in logprobs), (span,)
        )

    async def apply(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None = None
    ) -> None:
        """Reject the weights: the server's are its own."""
        raise WeightsRejected(f"{self.engine} takes no weights: {version} is not applied")

    async def close(self) -> None:
        self._closed = True
        await self._endpoint.close()


class _TokenLogprobs(BaseModel):
    token_logprobs: list[float]


class _TokenChoice(BaseModel):
    token_ids: list[TokenId] = Field(min_length=1, max_length=MAX_TOKENS)
    logprobs: _TokenLogprobs
    finish_reason: str | None = None


class _TokenCompletion(BaseModel):
    """What is read of a reply; the rest is left alone."""

    choices: list[_TokenChoice] = Field(min_length=1)
