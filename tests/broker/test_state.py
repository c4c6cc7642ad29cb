import asyncio

import msgpack
import pytest
from pydantic import ValidationError

from horizonrl.broker.api import Key
from horizonrl.broker.memory import MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.common.errors import StateConflict, UnknownSchema
from horizonrl.common.state import (
    EnvironmentSettings,
    HorizonState,
    Progress,
    RunSettings,
    WeightsManifest,
)
from horizonrl.common.types import Kind, Phase, PolicyVersion
from tests.brokers import Broker

RECORDS = {
    Key.PROGRESS: Progress(step=4, phase=Phase.RL, lowest_unsettled={Kind.TRAIN: 7}),
    Key.POLICY: WeightsManifest(
        policy=PolicyVersion(version=4), weights_bytes=9, digest="d", chunks=1
    ),
    Key.HORIZON: HorizonState(
        phase_step=4, horizons={"textcraft": 10}, tickets_issued={Kind.TRAIN: 12}
    ),
    Key.RUN: RunSettings(
        total_steps=9,
        max_deliver=5,
        max_context_tokens=1024,
        environments=(
            EnvironmentSettings(
                env_id="textcraft", options={"style": "compact", "sizes": [1, 2.5, None]}
            ),
        ),
    ),
}


@pytest.mark.parametrize("key", list(Key))
async def test_a_record_comes_back_from_its_key(broker: Broker, key: Key) -> None:
    async with broker.open() as transport:
        store = StateStore(transport)
        assert await store.get(key) is None
        await store.put(key, RECORDS[key])
        assert await store.get(key) == RECORDS[key]


def test_a_key_refuses_the_record_of_another() -> None:
    with pytest.raises(TypeError, match="policy holds a WeightsManifest"):
        asyncio.run(StateStore(MemoryTransport()).put(Key.POLICY, Progress()))


async def test_bytes_that_are_no_record_count_as_none_and_are_not_written_over_unseen() -> None:
    transport = MemoryTransport()
    state = StateStore(transport)
    revision = await state.put(Key.PROGRESS, Progress(step=1))
    junk = await transport.put(Key.PROGRESS, b"junk")
    assert await state.get(Key.PROGRESS) is None
    with pytest.raises(StateConflict):  # whoever wrote it was not expected
        await state.put(Key.PROGRESS, Progress(step=2), revision)
    watch = state.watch(Key.PROGRESS)
    await state.put(Key.PROGRESS, Progress(step=2), junk)
    assert await anext(watch) == Progress(step=2)


async def test_a_key_that_another_program_has_set_is_a_conflict() -> None:
    state = StateStore(MemoryTransport())
    revision = await state.put(Key.PROGRESS, Progress(step=1))
    await state.put(Key.PROGRESS, Progress(step=5))
    with pytest.raises(StateConflict):
        await state.put(Key.PROGRESS, Progress(step=2), revision)


async def test_a_record_of_another_schema_is_an_error() -> None:
    transport = MemoryTransport()
    await transport.put(Key.PROGRESS, msgpack.packb({"schema": 3, "type": "progress", "body": {}}))
    with pytest.raises(UnknownSchema):
        await StateStore(transport).get(Key.PROGRESS)


async def test_a_finished_run_that_was_given_more_steps_is_followed_to_its_new_end() -> None:
    state = StateStore(MemoryTransport())
    await state.put(Key.PROGRESS, Progress(step=4, finished=True))
    assert [progress.step async for progress in state.until_end(Progress, total_steps=4)] == [4]
    seen = []
    async with asyncio.timeout(10.0):
        async for progress in state.until_end(Progress, total_steps=8):
            seen.append((progress.step, progress.finished))
            if progress.step < 8:
                step = progress.step + 2
                await state.put(Key.PROGRESS, Progress(step=step, finished=step == 8))
    assert seen == [(4, True), (6, False), (8, True)]


def test_the_options_of_an_environment_hold_no_number_that_differs_from_itself() -> None:
    with pytest.raises(ValidationError, match="finite number"):
        EnvironmentSettings(env_id="textcraft", options={"sizes": [1, float("nan")]})
