import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.launch.roles import stop_within_s


@pytest.mark.parametrize(
    ("role", "override", "within_s"),
    [
        ("controller", "--learner.shutdown_s=7", 10),
        ("learner", "--learner.shutdown_s=7", 7),
        ("actor", "--actor.drain_s=5", 25),
    ],
)
def test_a_role_ends_within_the_time_that_its_key_gives_it(
    role: str, override: str, within_s: float
) -> None:
    assert stop_within_s(role, RunConfig.load((), [override])) == within_s
