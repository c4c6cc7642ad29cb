import pytest

from horizonrl.ops.cli.replay import may_differ


@pytest.mark.parametrize(
    ("overrides", "may"),
    [
        ([], False),
        (["--broker.url=nats://host:4222"], False),
        (["--broker.url", "nats://host:4222"], False),
        (["--broker.url", "nats://host:4222", "--loss.kind", "reinforce"], True),
    ],
)
def test_another_address_of_the_broker_excuses_no_digest_that_differs(overrides: list[str], may: bool) -> None:
    assert may_differ(overrides) is may
