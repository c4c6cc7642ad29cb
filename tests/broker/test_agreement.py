"""Controller and learner must agree on a recipe and a ticket key, or the learner ends and names the key."""

import asyncio
from pathlib import Path

import pytest

from horizonrl.broker.agreement import differences, stays_agreed, wait_for_agreement
from horizonrl.broker.api import Key
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.signing import TicketSigner
from horizonrl.broker.state import StateStore
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.state import RunSettings

SEALED = TicketSigner("run", b"k" * 32).fingerprint


def settings(*overrides: str, ticket_key: str = "") -> RunSettings:
    return RunConfig.load((), ["--run.name=run", *overrides]).settings.model_copy(
        update={"ticket_key": ticket_key}
    )


@pytest.mark.parametrize(
    ("mine", "published", "named"),
    [
        (
            settings(ticket_key=SEALED),
            settings(),
            f"broker.ticket_key is {SEALED} here and not set in the run",
        ),
        (
            settings(),
            settings(ticket_key=SEALED),
            f"broker.ticket_key is not set here and {SEALED} in the run",
        ),
        (
            settings("--rollout.group_size=4"),
            settings(),
            "rollout.group_size is 4 here and 8 in the run",
        ),
        (
            settings("--rl.max_staleness=5"),
            settings(),
            "rl.max_staleness is 5 here and 2 in the run",
        ),
        (settings("--run.seed=7"), settings(), "run.seed is 7 here and 0 in the run"),
    ],
    ids=["controller without a key", "learner without a key", "group size", "staleness", "seed"],
)
def test_a_learner_that_differs_from_its_controller_ends_and_names_the_key(
    mine: RunSettings, published: RunSettings, named: str
) -> None:
    async def scenario() -> None:
        transport = MemoryTransport(MemoryServer())
        await StateStore(transport).put(Key.RUN, published)
        async with asyncio.timeout(10):
            await stays_agreed(transport, mine, wait_s=0.01)

    with pytest.raises(ConfigError, match="this learner's recipe is not the run's") as caught:
        asyncio.run(scenario())
    assert named in str(caught.value)


def test_a_learners_own_rates_and_losses_may_differ() -> None:
    assert (
        differences(settings("--rl.lr=1e-6", "--loss.kind=gspo", "--learner.ranks=2"), settings())
        == ""
    )


async def test_an_actor_needs_neither_the_key_nor_the_learners_settings() -> None:
    transport = MemoryTransport(MemoryServer())
    await StateStore(transport).put(Key.RUN, settings("--rl.max_staleness=5", ticket_key=SEALED))
    async with asyncio.timeout(10):
        await wait_for_agreement(transport, settings())


async def test_a_controller_with_another_recipe_is_noticed_and_one_that_is_put_right_forgiven() -> (
    None
):
    transport = MemoryTransport(MemoryServer())
    state, mine = StateStore(transport), settings()
    await state.put(Key.RUN, mine)
    watching = asyncio.create_task(stays_agreed(transport, mine, wait_s=0.3))
    for published in (settings("--rl.max_staleness=5"), mine):
        await asyncio.sleep(0.1)
        await state.put(Key.RUN, published)
    await asyncio.sleep(0.5)
    assert not watching.done()
    await state.put(Key.RUN, settings("--rl.max_staleness=6"))
    with pytest.raises(ConfigError, match=r"rl\.max_staleness is 2 here and 6 in the run"):
        await watching


def test_a_fingerprint_tells_keys_and_runs_apart_and_is_empty_without_a_key(tmp_path: Path) -> None:
    signers = [
        TicketSigner("run", b"k" * 32),
        TicketSigner("run", b"l" * 32),
        TicketSigner("other", b"k" * 32),
    ]
    assert len({signer.fingerprint for signer in signers}) == 3
    assert TicketSigner("run").fingerprint == ""
