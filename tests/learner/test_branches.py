"""Whole runs whose groups branch: every ticket ends once, and a replay trains the same batches to the same weights."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horizonrl.broker.groups import GroupLog
from horizonrl.broker.memory import MemoryTransport
from horizonrl.common.types import Group, Kind, PolicyVersion, StopReason, Ticket
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.registry import make_engine
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.records.replay import Replay
from horizonrl.ops.rundir.lines import read_lines
from tests.learner import world as world_module
from tests.learner.branching import branching_episode
from tests.learner.world import InlineExecutor, World
from tests.learner.world import played as played_linear


def played(ticket: Ticket, policy: PolicyVersion, dice: random.Random) -> Group:
    """Return what the tests' actor plays, with branching episodes for train tickets."""
    group = played_linear(ticket, policy, dice)
    if ticket.kind is not Kind.TRAIN:
        return group
    rng, episodes = np.random.default_rng(dice.randrange(1 << 32)), list(group.episodes)
    for index, episode in enumerate(episodes):
        made = branching_episode(rng, index, max(policy.version, 1))
        turns = [
            turn.model_copy(update={"reward": 0.0}) for turn in made.turns[: ticket.horizon_turns]
        ]
        spanned = [
            turn.model_copy(
                update={
                    "spans": tuple(
                        span.model_copy(
                            update={"version": policy.version, "lineage": policy.lineage}
                        )
                        for span in turn.spans
                    )
                }
            )
            for turn in turns
        ]
        spanned[-1] = spanned[-1].model_copy(update={"reward": episode.episode_return})
        used = max(turn.branch for turn in spanned)
        last = {turn.branch: place for place, turn in enumerate(spanned)}
        spanned = [
            turn.model_copy(update={"observation_ids": (), "trained": True})
            if last[turn.branch] == place
            else turn
            for place, turn in enumerate(spanned)
        ]
        episodes[index] = type(made)(
            index=index,
            prompt_ids=made.prompt_ids,
            turns=tuple(spanned),
            branches=made.branches[:used],
            stop=StopReason.HORIZON,
        )
    return Group.model_validate(vars(group) | {"episodes": tuple(episodes)})


class Branching(World):
    """A world whose train groups branch; an episode takes one to `horizon` turns."""

    def _check_journal(self, ledger: list[dict[str, Any]]) -> None:
        lines = read_lines(self.config.run_dir / "metrics.jsonl")
        assert [line["step"] for line in lines] == [line["step"] for line in ledger]
        assert sum(line["environment_steps"] for line in lines) > 2 * len(lines)


@pytest.fixture(autouse=True)
def actor_that_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "played", played)


@pytest.mark.parametrize("deaths", [{}, {"learner": [31, 17]}])
def test_a_run_of_branching_groups_settles_every_ticket_once_and_replays(
    tmp_path: Path, deaths: dict[str, list[int]]
) -> None:
    world = Branching(tmp_path, deaths=deaths)

    async def scenario() -> None:
        await world.run()
        await world.check()

    asyncio.run(scenario())
    episodes = [
        line for file in (world.config.run_dir / "episodes").iterdir() for line in read_lines(file)
    ]
    forked = [line for line in episodes if line.get("branches")]
    assert forked
    for line in forked:
        assert {turn["branch"] for turn in line["turns"]} == set(range(len(line["branches"]) + 1))


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_a_model_trains_on_branching_groups_and_a_replay_makes_the_same_weights(
    tmp_path: Path, tiny_model: Path, normalisation: str
) -> None:
    world = Branching(tmp_path / "run", overrides=(f"--loss.normalisation={normalisation}",))

    def engine() -> Any:
        settings = EngineSettings(
            model_dir=tiny_model, backend="torch", objective=world.config.objective
        )
        return make_engine(settings)

    world.make_engine = engine

    async def scenario() -> list[bool]:
        await world.run()
        transport = MemoryTransport(world.server, "run")
        replay = Replay(
            world.config,
            transport,
            GroupLog(transport),
            EngineThread(engine(), InlineExecutor()),
            world.rules,
            world.config.run_dir / "frame",
        )
        return [done.equal async for done in replay.steps(None, world.ledger())]

    assert asyncio.run(scenario()) == [True] * world.config.total_steps
    lines = read_lines(world.config.run_dir / "metrics.jsonl")
    assert all(line["grad_norm"] > 0 for line in lines)
