import pytest

from horizonrl.actors.episode_ends import failure_stop, program_stop, step_stop
from horizonrl.common.errors import (
    ContextFull,
    EnvironmentFailure,
    EnvironmentTimeout,
    EpisodeUnfit,
    PolicyFailure,
)
from horizonrl.common.types import StopReason
from horizonrl.envs.api import Step


def test_the_environments_verdict_comes_before_its_limit_and_its_limit_before_the_horizon() -> None:
    over = Step("", 0.0, terminated=True, truncated=True)
    assert step_stop(over, 1, 1) is StopReason.TERMINATED
    assert (
        step_stop(Step("", 0.0, terminated=False, truncated=True), 1, 1) is StopReason.ENV_TRUNCATED
    )
    assert step_stop(Step("", 0.0, terminated=False), 1, 1) is StopReason.HORIZON
    assert step_stop(Step("", 0.0, terminated=False), 1, 2) is None


@pytest.mark.parametrize(
    ("failure", "turns", "stop"),
    [
        (EnvironmentTimeout(), 1, StopReason.ENV_TIMEOUT),
        (EnvironmentFailure(), 1, StopReason.ENV_ERROR),
        (RuntimeError(), 1, StopReason.ENV_ERROR),
        (EpisodeUnfit(), 1, StopReason.UNFIT),
        (ContextFull(), 1, StopReason.CONTEXT),
        (ContextFull(), 0, StopReason.UNFIT),
        (PolicyFailure(), 0, StopReason.POLICY_ERROR),
    ],
)
def test_a_failure_breaks_the_episode_unless_the_agent_has_filled_its_context(
    failure: Exception, turns: int, stop: StopReason
) -> None:
    assert failure_stop(failure, turns) is stop
    assert stop.broken == (stop is not StopReason.CONTEXT)


CRASH = EnvironmentTimeout()


@pytest.mark.parametrize(
    ("failure", "engine_failed", "refused", "answered", "stop"),
    [
        (None, False, None, 1, StopReason.TERMINATED),
        (None, False, None, 0, StopReason.ENV_ERROR),
        (CRASH, False, None, 1, StopReason.ENV_TIMEOUT),
        (CRASH, False, StopReason.HORIZON, 1, StopReason.HORIZON),
        (CRASH, False, StopReason.HORIZON, 0, StopReason.ENV_TIMEOUT),
        (CRASH, False, StopReason.CONTEXT, 1, StopReason.CONTEXT),
        (CRASH, False, StopReason.CONTEXT, 0, StopReason.UNFIT),
        (CRASH, True, StopReason.HORIZON, 1, StopReason.POLICY_ERROR),
    ],
)
def test_a_program_may_fail_once_its_calls_have_run_out_and_not_before(
    failure: Exception | None,
    engine_failed: bool,
    refused: StopReason | None,
    answered: int,
    stop: StopReason,
) -> None:
    reason = program_stop(failure, engine_failed=engine_failed, refused=refused, answered=answered)
    assert reason is stop
