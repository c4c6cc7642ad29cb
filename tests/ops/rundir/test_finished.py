"""A finished run: who may end at once, and who has something left to do."""

import asyncio
from pathlib import Path

import pytest

from horizonrl.broker.api import Key, Role
from horizonrl.broker.connect import connected
from horizonrl.broker.memory import SERVERS
from horizonrl.broker.state import StateStore
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import BrokerUnreachable
from horizonrl.common.run_dir import CHECKPOINTS
from horizonrl.common.state import Progress, WeightsManifest
from horizonrl.common.types import PolicyVersion
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.ops.launch.roles import is_over
from horizonrl.ops.rundir.finished import finished_step, how_to_go_on

ROLES = (Role.CONTROLLER, Role.LEARNER, Role.ACTOR)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    place = (f"--broker.url=memory://{tmp_path.name.replace('_', '-')}", f"--run.root={tmp_path}")
    return RunConfig.load((), ["--run.name=done", "--imitation.steps=2", "--rl.steps=6", *place])


def announce(config: RunConfig, progress: Progress | None, finished_step: int | None) -> None:
    """Let a learner say how far the run is, and with which weights."""
    manifest = WeightsManifest(policy=PolicyVersion(version=8), weights_bytes=1, digest="0" * 32)

    async def scenario() -> None:
        async with connected("done", config.broker) as transport:
            state = StateStore(transport)
            if progress is not None:
                await state.put(Key.PROGRESS, progress)
            await state.put(
                Key.POLICY, manifest.model_copy(update={"finished_step": finished_step})
            )

    asyncio.run(scenario())


def seal(config: RunConfig, step: int) -> None:
    CheckpointStore(config.run_dir / CHECKPOINTS, keep=2).write(step, lambda place: None, {})


def steps(config: RunConfig) -> dict[Role, int | None]:
    return {role: finished_step(config, role) for role in ROLES}


def test_no_role_of_a_finished_run_has_anything_left_to_do(config: RunConfig) -> None:
    announce(config, Progress(step=8, finished=True), 8)
    seal(config, 8)
    assert steps(config) == dict.fromkeys(ROLES, 8)
    said = how_to_go_on(config, 8)
    assert (
        "run done is finished at step 8: to go on, start all of its roles with a higher --rl.steps (now 6)"
        in said
    )


def test_a_run_that_has_yet_to_begin_is_not_finished_and_nobody_makes_its_streams(
    config: RunConfig,
) -> None:
    assert steps(config) == dict.fromkeys(ROLES)
    assert not SERVERS[str(config.broker.url).removeprefix("memory://")].runs
    assert not config.run_dir.exists()


@pytest.mark.parametrize(
    ("progress", "finished_step"),
    [
        (None, None),
        (Progress(step=8), None),  # the last evaluation round is under way
        (Progress(step=8, finished=True), None),  # a learner that died between its last two words
        (Progress(step=6, finished=True), 6),  # the end of a shorter run: it was given more steps
        (Progress(step=8), 8),  # a learner that goes on has not published a version yet
    ],
)
def test_a_run_that_goes_on_is_not_finished(
    config: RunConfig, progress: Progress | None, finished_step: int | None
) -> None:
    announce(config, progress, finished_step)
    seal(config, 8)
    assert steps(config) == dict.fromkeys(ROLES)


@pytest.mark.parametrize("step", [None, 4])
def test_a_learner_without_the_end_in_its_directory_says_so_itself(
    config: RunConfig, step: int | None
) -> None:
    announce(config, Progress(step=8, finished=True), 8)
    if step is not None:
        seal(config, step)
    assert steps(config) == {Role.CONTROLLER: 8, Role.LEARNER: None, Role.ACTOR: 8}


@pytest.mark.parametrize(
    ("overrides", "over"),
    [
        ((), True),
        (("--rl.steps=9",), False),
        (("--broker.url=none",), False),  # as before: the node waits for node 0
        (("--broker.url=memory://elsewhere", "--broker.nats.nkey_seed=/none"), False),
    ],
    ids=["finished", "more steps", "no address", "no run there"],
)
def test_another_node_of_a_finished_run_ends_if_it_can_ask(
    config: RunConfig, overrides: tuple[str, ...], over: bool
) -> None:
    """It has no run directory, so that the broker's word is enough."""
    announce(config, Progress(step=8, finished=True), 8)
    place = (f"--broker.url={config.broker.url}", f"--run.root={config.run.root}/elsewhere")
    nodes = ("--learner.nodes=2", "--learner.node_rank=1", "--learner.rendezvous=127.0.0.1:29400")
    other = RunConfig.load(
        (), ["--run.name=done", "--imitation.steps=2", "--rl.steps=6", *place, *nodes, *overrides]
    )
    assert is_over("learner", other) == over


def test_another_node_goes_on_without_a_broker_that_does_not_answer(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizonrl.broker.nats.connect.CONNECT_S", 0.2)
    away = ("--broker.url=nats://127.0.0.1:1",)
    nodes = ("--learner.nodes=2", "--learner.node_rank=1", "--learner.rendezvous=127.0.0.1:29400")
    assert not is_over("learner", RunConfig.load((), [*away, *nodes]))
    with pytest.raises(BrokerUnreachable):
        is_over("learner", RunConfig.load((), [*away]))
