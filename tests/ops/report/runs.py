"""Run directories for tests of the report: written by the learner's own journal, with texts as hostile as a model's."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.statistics import wilson
from horizonrl.common.types import (
    Episode,
    Group,
    Kind,
    Phase,
    PolicyVersion,
    Provenance,
    StopReason,
    Task,
    Ticket,
    Turn,
    VersionSpan,
)
from horizonrl.learner.intake.collector import Drop, PendingBatch
from horizonrl.learner.records.journal import Journal
from horizonrl.learner.records.report import StepTimes, metrics_line
from horizonrl.ops.rundir.directory import write_config
from tests.learner.records.test_journal import STATS
from tests.records import branched_episode, half_trained_episode, make_ticket

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!-- {{facts}}"
THOUGHT = "Thought: I need wood, naïvely 🪵.\nAction: get 2 logs"
TASKS = ("stick", "oak_planks", "wooden_axe", "torch", HOSTILE[:120])
END = "<|im_end|>"


def write_tokenizer(model_dir: Path) -> Tokenizer:
    """Write a tokenizer of single bytes, so that every letter beyond ASCII is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    return tokenizer


@dataclass(frozen=True)
class Scale:
    steps: int = 6
    groups: int = 6
    size: int = 4
    turns: int = 4
    held_out: int = 0
    """Episodes of each evaluation."""


def run_config(root: Path, *overrides: str) -> RunConfig:
    """Return the config of a run of two environments whose model is a tokenizer beside it."""
    envs = '[{"id": "textcraft"}, {"id": "parity"}]'
    return RunConfig.load(
        [],
        [
            *(
                f"--run.root={root}",
                "--run.name=small",
                f"--model.name={root / 'model'}",
                f"--envs={envs}",
            ),
            *(
                "--rl.steps=6",
                "--eval.every=3",
                "--horizon.kind=staged",
                "--horizon.horizons=[4,8]",
            ),
            *("--horizon.steps_per_stage=3", "--imitation.steps=0", *overrides),
        ],
    )


def write_run(config: RunConfig, scale: Scale = Scale(), seed: int = 0) -> Path:
    """Write the directory of a run that took `scale.steps` steps, three evaluations among them.

    Where the config says so, its first steps are of imitation.
    """
    chance = random.Random(seed)
    tokenizer = write_tokenizer(Path(config.model.name))
    write_config(config)
    journal = Journal(config.run_dir)
    journal.write_lineage({"lineage": 0, "from_step": 0, "time": 1e9, "changed": {}})
    settled = 0
    for step in range(1, scale.steps + 1):
        phase, _ = config.phase(step - 1)
        make = make_group if phase is Phase.RL else make_demonstration
        groups = [
            make(tokenizer, chance, scale, step, step * scale.groups + number)
            for number in range(scale.groups)
        ]
        dropped = [Drop(1, groups[0].ticket.ticket_id, "zero_variance")]  # type: ignore[arg-type]
        draft = PendingBatch(admitted=list(enumerate(groups[1:])), consumed=groups, dropped=dropped)
        settled += len(groups)
        journal.write_ledger(
            {
                "step": step,
                "version": step,
                "lineage": 0,
                "cursor": settled,
                "voids": [],
                "repeats": 0,
                "trained": [
                    [sequence, group.ticket.ticket_id] for sequence, group in draft.admitted
                ],
                "dropped": [[1, groups[0].ticket.ticket_id, "zero_variance"]],
                "data_digest": "d",
                "weights_digest": "w",
            }
        )
        journal.write_episodes(step, groups)
        line = metrics_line(
            phase,
            PolicyVersion(version=step),
            draft,
            STATS,
            StepTimes(1.0, 2.0, 0.1, 2_000_000, 1e9),
        )
        line |= {
            "tickets_issued": settled + 3,
            "tickets_outstanding": 3,
            "growths": [],
            "time": 1e9 + 60 * step,
        }
        journal.write_metrics(line)
    for version, successes in ((0, 10), (3, 20), (scale.steps, 30)):
        journal.write_evaluation(evaluation(version, successes, scale.steps + 1))
        if scale.held_out:
            journal.write_held_out(version + 1, make_held_out(tokenizer, chance, scale, version))
    return config.run_dir


def write_branched_run(root: Path) -> Path:
    """Write a run that ends with a group of an episode that branches, and one with a turn that is not trained."""
    run_dir = write_run(run_config(root))
    forked = branched_episode(0)
    branches = tuple(branch.model_copy(update={"prompt": HOSTILE}) for branch in forked.branches)
    refused = half_trained_episode(1).model_copy(update={"refused": 2, "refusal": HOSTILE})
    episodes = (forked.model_copy(update={"branches": branches}), refused)
    group = Group(
        ticket=make_ticket(90, horizon_turns=5),
        episodes=episodes,
        provenance=Provenance(actor="test"),
    )
    Journal(run_dir).write_episodes(7, [group])
    return run_dir


def evaluation(version: int, successes: int, settled_step: int) -> dict[str, Any]:
    low, high = wilson(successes, 64)
    part = {
        "episodes": 64,
        "successes": successes,
        "success_rate": successes / 64,
        "low": low,
        "high": high,
    }
    measures = part | {
        "broken": 0,
        "dropped": 0,
        "return_mean": successes / 64,
        "turns_mean": 3.0,
        "truncated_share": 0.2,
    }
    measures |= {"pass_at": {"1": successes / 64, "2": 0.9}}
    return {
        "step": version,
        "version": version,
        "lineage": 0,
        "time": 1e9 + 60 * version,
        "settled_step": settled_step,
        "split": "validation",
        **measures,
        "environments": {"textcraft": measures | {"categories": {"depth1": part}}},
        "ends": [[1, f"eval-{version:08d}", "evaluated"]],
    }


def make_group(
    tokenizer: Tokenizer, chance: random.Random, scale: Scale, step: int, number: int
) -> Group:
    env, task, version = ("textcraft", "parity")[number % 2], TASKS[number % len(TASKS)], step - 1
    ticket = Ticket(
        number=number,
        kind="train",
        task=Task(env_id=env, task_id=task),
        group_size=scale.size,
        horizon_turns=scale.turns * (2 if step > 3 else 1),
    )
    episodes = [
        make_episode(tokenizer, chance, scale, version, index) for index in range(scale.size)
    ]
    return Group(ticket=ticket, episodes=tuple(episodes), provenance=Provenance(actor="test"))


def make_demonstration(
    tokenizer: Tokenizer, chance: random.Random, scale: Scale, step: int, number: int
) -> Group:
    """Return what an expert did: a group of one episode."""
    group = make_group(tokenizer, chance, scale, step, number)
    ticket = group.ticket.model_copy(update={"kind": Kind.DEMO, "group_size": 1})
    turn = make_turn(tokenizer, chance, "get 2 logs", 0, 1.0)
    expert = group.episodes[0].model_copy(
        update={"turns": (turn,), "stop": StopReason.TERMINATED, "success": True, "error": None}
    )
    return group.model_copy(update={"ticket": ticket, "episodes": (expert,)})


def make_held_out(tokenizer: Tokenizer, chance: random.Random, scale: Scale, version: int) -> Group:
    """Return the group of the ticket that `evaluation` ends."""
    size = scale.held_out
    group = make_group(tokenizer, chance, replace(scale, size=size), version + 1, version)
    return group.model_copy(update={"ticket": group.ticket.model_copy(update={"kind": Kind.EVAL})})


def make_episode(
    tokenizer: Tokenizer, chance: random.Random, scale: Scale, version: int, index: int
) -> Episode:
    stop = chance.choice(
        [StopReason.TERMINATED, StopReason.TERMINATED, StopReason.HORIZON, StopReason.ENV_ERROR]
    )
    success = stop is StopReason.TERMINATED and chance.random() < 0.6
    texts = [
        chance.choice((THOUGHT, "get 3 planks", f"craft {HOSTILE}"))
        for _ in range(chance.randint(1, scale.turns))
    ]
    turns = [make_turn(tokenizer, chance, text, version, 0.0) for text in texts]
    if success:
        turns[-1] = turns[-1].model_copy(update={"reward": 1.0})
    return Episode(
        index=index,
        prompt_ids=(1, 2),
        turns=tuple(turns),
        stop=stop,
        success=success,
        prompt=f"Goal: craft a thing {HOSTILE}",
        error=f"it broke {HOSTILE}" if stop.broken else None,
    )


def make_turn(
    tokenizer: Tokenizer, chance: random.Random, text: str, version: int, reward: float
) -> Turn:
    """Return a turn whose second half the next version sampled."""
    ids = tuple(tokenizer.encode(text + END).ids)
    half = len(ids) // 2
    return Turn(
        output_ids=ids,
        logprobs=tuple(-chance.expovariate(2.0) for _ in ids),
        spans=spans((version, half), (version + 1, len(ids) - half)),
        reward=reward,
        text=text,
        observation=f"You said: {text}",
    )


def spans(*parts: Sequence[int]) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(version=version, lineage=0, tokens=tokens) for version, tokens in parts
    )
