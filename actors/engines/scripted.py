"""The policy without a model: scripted or pseudo-random tokens, for tests and for chaos runs."""

import asyncio
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

from horizonrl.actors.policy import ChangedWords, Generation, InferenceSettings, Policy
from horizonrl.common.errors import EngineDead, PolicyFailure, WeightsRejected
from horizonrl.common.types import PolicyVersion, VersionSpan

Script = Callable[[Sequence[int]], Sequence[int]]
"""From the ids read to the ids answered."""
STOP_SHARE = 1 / 16
"""How often a random token is a stop token."""


async def start(settings: InferenceSettings) -> Policy:
    """Return a policy of random tokens, in a process that then never imports torch, unless it already has.

    transformers imports torch where it finds it, which takes 8 seconds; its tokenizers work without.
    """
    # None is what an import takes for "not installed". A process that has just made its model has torch already, and
    # transformers knows that it does.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    return ScriptedPolicy(
        vocabulary=json.loads((settings.model_dir / "config.json").read_text(encoding="utf-8"))[
            "vocab_size"
        ],
        max_context_tokens=settings.max_context_tokens,
        seed=os.getpid(),  # two actors that play one ticket answer differently, as two engines would
    )


class ScriptedPolicy:
    """A Policy that answers at once, or a token every `token_s`. It follows a script, or draws random ids.

    With a seed, the same ids get the same answer. Without one, every request gets another answer.
    """

    engine = "scripted"
    takes_words = False

    def __init__(
        self,
        script: Script | None = None,
        *,
        vocabulary: int = 512,
        max_context_tokens: int = 1024,
        seed: int = 0,
        token_s: float = 0.0,
    ) -> None:
        self.max_context_tokens = max_context_tokens
        self._script = script
        self._vocabulary = vocabulary
        self._seed = seed
        self._token_s = token_s
        self._version = PolicyVersion()
        self._numbers = count()
        self._closed = False

    @property
    def version(self) -> PolicyVersion:
        return self._version

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int | None,
    ) -> Generation:
        if len(ids) >= self.max_context_tokens:
            raise PolicyFailure(
                f"{len(ids)} tokens leave no room in a context of {self.max_context_tokens}"
            )
        stream = f"request {next(self._numbers)}" if seed is None else f"seed {seed}"
        # Python digests a text as a seed alike in every process, unlike `hash()`.
        dice = random.Random(f"{self._seed} {stream} {list(ids)}")
        answer: Iterable[int] = (
            self._script(ids) if self._script else self._random_ids(dice, stop_ids)
        )
        output: list[int] = []
        versions: list[PolicyVersion] = []
        for token in itertools.islice(answer, min(max_tokens, self.max_context_tokens - len(ids))):
            # Also with 0 s, so that weights are applied and requests cancelled between two tokens, as in a real engine.
            await asyncio.sleep(self._token_s)
            if self._closed:
                raise EngineDead("the policy was closed")
            output.append(token)
            versions.append(self._version)
            if token in stop_ids:
                break
        # Possible values: at most 0, and 0 at temperature 0, where nothing is left to chance.
        logprobs = tuple(-dice.expovariate(1.0) * temperature for _ in output)
        return Generation(ids=tuple(output), logprobs=logprobs, spans=_spans(versions))

    async def apply(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None = None
    ) -> None:
        """Change the version. Raises WeightsRejected when there is no file."""
        if not await asyncio.to_thread(weights.is_file):
            raise WeightsRejected(f"there is no {weights}: {version} is not applied")
        self._version = version

    async def close(self) -> None:
        self._closed = True

    def _random_ids(self, dice: random.Random, stop_ids: Sequence[int]) -> Iterator[int]:
        while True:
            token, stops = dice.randrange(self._vocabulary), dice.random() < STOP_SHARE
            yield stop_ids[token % len(stop_ids)] if stops and stop_ids else token


def _spans(versions: Sequence[PolicyVersion]) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(version=version.version, lineage=version.lineage, tokens=len(list(run)))
        for version, run in itertools.groupby(versions)
    )
