"""The pocket model: a Llama of a million parameters that half knows TextCraft, made from nothing in minutes.

Place in the flow: tasks → a careless expert's episodes → **lessons** → weights. Learning studies begin from it. Who
imitates an expert that wastes two turns of five knows how to craft and wastes turns: under a horizon some episodes of a
task succeed and others fail, and how to do better is there to be found by RL.

    python -m horizonrl.ops.models.pocket DIRECTORY

Lessons are an actor's own rollouts of the train split, so that what is imitated is what is deployed. Each exchanges
some of the items' words at random, which leaves one way to know a recipe: to read it in the prompt.
"""

import asyncio
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.common.types import Episode, Kind, Sampling, Task, Ticket
from horizonrl.envs import registry
from horizonrl.envs.api import Expert, Observation, Split
from horizonrl.envs.worlds.textcraft.env import TextCraft
from horizonrl.ops.models.models import save_model
from horizonrl.ops.models.tiny_model import make_tokenizer

SEED = 0

ENVIRONMENT = "textcraft"
OPTIONS: dict[str, Any] = {"format": "plain", "style": "compact", "distractors": 0}
HORIZONS = {"depth1": 12, "depth2": 20, "depth3": 30}
"""The categories taught, and the most turns of a lesson: a careful expert takes 2.2, 5.1 and 10.2 on average."""
CARELESSNESS = 0.4
"""Share of the turns in which the expert does something else that the prompt speaks of."""
ROUNDS = 3
"""How often each task is played, carelessly in another way each time."""
SHARES = (0.3, 0.4, 0.3)
"""How often a category's lessons are drawn."""
CONTEXT_TOKENS = 512
"""Longer episodes are no lessons."""
MAX_TURN_TOKENS = 24
FIXED_WORDS = (
    "Commands: get N item | craft N item using M item, M item | inventory\nGet what no recipe makes.\n"
    "For use one kind, such as\nGoal: craft\nGot Crafted"
)
"""The environment's own words, which no lesson exchanges."""

VOCABULARY = 1152
THREADS = 2
"""Fixed, because sums depend on it."""
COPYING_STEPS, IMITATION_STEPS = 400, 1200
"""First nothing but items that repeat, in short rows: heads that copy form many times sooner than in episodes."""
COPYING_ROWS, COPYING_TOKENS = 32, 40
EMBEDDING_SCALE = 2.0
"""It is the output too: a smaller one cannot be sure of any token."""
LOOK_BACK, LOOK_BACK_TOKENS = 8.0, (1, 1, 2, 2)
"""Size of the first layer's biases, and how far back each of its heads looks before it is trained."""
BATCH_TOKENS = 2_048
POOL = 64
"""Lessons that are sorted by length before they are cut into batches."""
PROMPT_WEIGHT, OBSERVATION_WEIGHT = 0.03, 0.5
"""In the loss, where an action's token has 1: observations repeat the action, and so teach to copy."""
MATRIX_LR, OTHER_LR = 0.015, 1e-3
"""Of Muon, which moves the layers' matrices, and of AdamW, which moves the rest."""
WARMUP_STEPS = 30
REPORT_EVERY = 50

_A_WORD = re.compile("Ġ[a-z]{2,}")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PocketExample:
    """T tokens: `ids` [T] and their `weights` [T] in the loss."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]


def make_pocket(
    path: Path,
    seed: int = SEED,
    steps: tuple[int, int] = (COPYING_STEPS, IMITATION_STEPS),
    say: Say = lambda _: None,
) -> Path:
    """Write the model as a Hugging Face directory (bfloat16, tied embeddings) and return it.

    The same seed gives the same weights on one machine. `steps`: on items that repeat, then on lessons.
    """
    import torch

    tokenizer = asyncio.run(make_pocket_tokenizer())
    lessons = asyncio.run(make_lessons(ChatTemplate(tokenizer)))
    names, draw = name_ids(tokenizer), np.random.default_rng(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = new_model(tokenizer)
        copying = islice(copying_batches(names, draw), steps[0])
        _train(
            model,
            chain(copying, islice(lesson_batches(lessons, names, draw), steps[1])),
            sum(steps),
            say,
        )
    finally:
        torch.set_num_threads(threads)
    save_model(model.to(torch.bfloat16), tokenizer, path)
    return path


async def make_pocket_tokenizer() -> Any:
    """Train the tokenizer on the first prompts of all tasks, so that each of their 327 words is one token.

    Renaming teaches every such token alike; a held-out word in pieces would be spelled with what no lesson taught.
    """
    environment = registry.make(ENVIRONMENT, OPTIONS)
    texts = [(await environment.reset(task.task_id)).text for task in registry.select(ENVIRONMENT)]
    return make_tokenizer(texts=texts, vocabulary=VOCABULARY)


class CarelessTextCraft(TextCraft):
    """TextCraft whose expert may ask for the inventory, get what it does not need, or craft what it cannot."""

    def __init__(self, carelessness: float, draw: Random) -> None:
        super().__init__(**OPTIONS)
        self._carelessness = carelessness
        self._draw = draw
        self._recipes: list[str] = []

    async def reset(self, task_id: str) -> Observation:
        observation = await super().reset(task_id)
        self._recipes = [
            line for line in observation.text.splitlines() if line.startswith("craft ")
        ]
        return observation

    def expert(self) -> Expert:
        return CarelessExpert(super().expert(), self._recipes, self._carelessness, self._draw)


@dataclass(frozen=True, slots=True)
class CarelessExpert:
    careful: Expert
    recipes: Sequence[str]
    carelessness: float
    draw: Random

    def act(self, observation: str) -> str:
        if self.draw.random() >= self.carelessness:
            return self.careful.act(observation)
        recipe = self.draw.choice(self.recipes)
        ingredient = self.draw.choice(recipe.partition(" using ")[2].split(", ")).partition(" ")[2]
        return self.draw.choice(
            ["inventory", recipe, f"get {self.draw.randint(1, 9)} {ingredient}"]
        )


async def expert_episodes(
    chat: ChatTemplate,
    split: Split,
    category: str,
    carelessness: float = CARELESSNESS,
    draw: Random | None = None,
) -> list[Episode]:
    """Play every task of a category as an actor plays a demonstration; leave out what a context does not hold."""
    environment = CarelessTextCraft(carelessness, draw or Random(SEED))
    rollout = Rollout(
        ScriptedPolicy(max_context_tokens=CONTEXT_TOKENS),
        chat,
        system_prompt=None,
        step_timeout_s=30.0,
    )
    episodes = []
    for number, task in enumerate(registry.select(ENVIRONMENT, split, (category,))):
        ticket = Ticket(
            number=number,
            kind=Kind.DEMO,
            task=Task(env_id=ENVIRONMENT, task_id=task.task_id),
            group_size=1,
            horizon_turns=HORIZONS[category],
            sampling=Sampling(max_turn_tokens=MAX_TURN_TOKENS),
        )
        episodes.append(await rollout.episode(environment, ticket, 0))
    return [episode for episode in episodes if episode.success]


async def make_lessons(chat: ChatTemplate) -> list[list[PocketExample]]:
    """Return the lessons of the train split by category."""
    rounds = [Random(number) for number in range(ROUNDS)]
    return [
        [
            lesson(episode)
            for draw in rounds
            for episode in await expert_episodes(chat, "train", category, draw=draw)
        ]
        for category in HORIZONS
    ]


def lesson(episode: Episode) -> PocketExample:
    """Weigh an episode's tokens."""
    ids, weights = list(episode.prompt_ids), [PROMPT_WEIGHT] * len(episode.prompt_ids)
    for turn in episode.turns:
        ids += turn.output_ids + turn.observation_ids
        weights += [1.0] * len(turn.output_ids) + [OBSERVATION_WEIGHT] * len(turn.observation_ids)
    return PocketExample(np.array(ids), np.array(weights, np.float32))


def name_ids(tokenizer: Any) -> NDArray[np.int64]:
    """Return the tokens that begin a word of an item's name, and of nothing that the environment itself says."""
    fixed = set(tokenizer.encode(FIXED_WORDS)) | set(
        tokenizer.encode(FIXED_WORDS.replace("\n", " "))
    )
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return np.array(
        [
            number
            for number, token in enumerate(tokens)
            if _A_WORD.fullmatch(token) and number not in fixed
        ]
    )


def copying_batches(
    names: NDArray[np.int64], draw: np.random.Generator
) -> Iterator[list[PocketExample]]:
    """Yield rows of a few random items of three tokens that repeat in random order: the first tells the next two."""
    while True:
        yield [_repetitions(names, draw) for _ in range(COPYING_ROWS)]


def _repetitions(names: NDArray[np.int64], draw: np.random.Generator) -> PocketExample:
    items = draw.choice(names, (draw.integers(3, 10), 3))
    rounds = [
        items[draw.permutation(len(items))].ravel()
        for _ in range(math.ceil(COPYING_TOKENS / items.size))
    ]
    weights = np.ones(COPYING_TOKENS, np.float32)
    weights[: items.size] = weights[::3] = 0.0
    return PocketExample(np.concatenate(rounds)[:COPYING_TOKENS], weights)


def lesson_batches(
    lessons: Sequence[Sequence[PocketExample]], names: NDArray[np.int64], draw: np.random.Generator
) -> Iterator[list[PocketExample]]:
    """Yield batches of at most BATCH_TOKENS, padding included, of lessons of similar length in random order."""
    while True:
        drawn = [lessons[int(category)] for category in draw.choice(len(lessons), POOL, p=SHARES)]
        pool = [renamed(among[int(draw.integers(len(among)))], names, draw) for among in drawn]
        batches: list[list[PocketExample]] = [[]]
        for item in sorted(pool, key=lambda lesson: len(lesson.ids)):
            if (len(batches[-1]) + 1) * len(item.ids) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(item)
        yield from (batches[index] for index in draw.permutation(len(batches)))


def renamed(
    lesson: PocketExample, names: NDArray[np.int64], draw: np.random.Generator
) -> PocketExample:
    """Exchange some of the items' words among each other: from none to all of them."""
    some = names[draw.random(len(names)) < draw.random()]
    exchange = np.arange(VOCABULARY)
    exchange[some] = draw.permutation(some)
    return PocketExample(exchange[lesson.ids], lesson.weights)


def new_model(tokenizer: Any) -> Any:
    """Begin at random, but for the first layer's biases. vLLM on CPU wants heads of 32 or 64 dimensions.

    It has Qwen2's shape under Llama's name: of a Qwen2, transformers replaces the tokenizer when it loads it.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_bias=True,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    llama: Any = LlamaForCausalLM
    model = llama(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(EMBEDDING_SCALE)
        _look_back(model.model)
    return model


def _look_back(decoder: Any) -> None:
    """Let the first layer's heads begin by looking a fixed number of tokens back, which copying is built upon.

    Query and key get biases of every frequency of the rotary position: their product is highest where the query's
    rotation by its own position, less the distance, is the key's. Left to gradients, it takes more steps than all else.
    """
    import torch

    attention = decoder.layers[0].self_attn
    frequencies = decoder.rotary_emb.inv_freq
    ones, zeros = torch.ones_like(frequencies), torch.zeros_like(frequencies)
    angles = [distance * frequencies for distance in LOOK_BACK_TOKENS]
    attention.q_proj.bias.copy_(
        LOOK_BACK * torch.cat([torch.cat([a.cos(), -a.sin()]) for a in angles])
    )
    attention.k_proj.bias.copy_(LOOK_BACK * torch.cat([ones, zeros]).repeat(len(angles)))


def _train(model: Any, batches: Iterable[list[PocketExample]], steps: int, say: Say) -> None:
    """Take a step on each batch: Muon on the layers' matrices, AdamW on the rest, a cosine over both."""
    import torch

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]

    def rate(step: int) -> float:
        """Warm up, stay while copying is learned, and follow a cosine to 0.04."""
        done = max(0.0, (step - COPYING_STEPS) / max(1, steps - COPYING_STEPS))
        return min(1.0, (step + 1) / WARMUP_STEPS) * (0.52 + 0.48 * math.cos(math.pi * done))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    started = time.monotonic()
    for step, batch in enumerate(batches, 1):
        loss = _loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        if step % REPORT_EVERY == 0:
            say(
                f"pocket model: step {step} of {steps}, loss {loss.item():.2f}, {time.monotonic() - started:.0f} s"
            )


def _loss(model: Any, batch: Sequence[PocketExample]) -> Any:
    """Return the weighted mean of the tokens' losses. Padding follows a lesson, so causal attention never sees it."""
    import torch

    ids_BT = np.zeros((len(batch), max(len(lesson.ids) for lesson in batch)), np.int64)
    weights_BT = np.zeros(ids_BT.shape, np.float32)
    for row, lesson in enumerate(batch):
        ids_BT[row, : len(lesson.ids)], weights_BT[row, : len(lesson.ids)] = (
            lesson.ids,
            lesson.weights,
        )
    ids, weights = torch.from_numpy(ids_BT), torch.from_numpy(weights_BT)[:, 1:].flatten()
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return (losses * weights).sum() / weights.sum()


if __name__ == "__main__":
    make_pocket(Path(sys.argv[1]), say=lambda line: print(line, flush=True))
