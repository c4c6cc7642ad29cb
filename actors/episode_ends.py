"""Why an episode ends: one policy for the turns of a rollout and for the calls of a program.

Place in the flow: what happened → **StopReason** → Episode. Pure functions. Broken is not zero: a failure ends an
episode with its reason, and never with a reward.
"""

from collections.abc import Mapping

from horizonrl.common.errors import ContextFull, EnvironmentTimeout, EpisodeUnfit, PolicyFailure
from horizonrl.common.types import StopReason
from horizonrl.envs.api import Step

REFUSAL_STOPS: Mapping[str, StopReason] = {
    "horizon_reached": StopReason.HORIZON,
    "context_length_exceeded": StopReason.CONTEXT,
    "too_many_branches": StopReason.ENV_TRUNCATED,
}
"""What a program's episode ends with if the gateway refuses a call with one of these codes."""


def step_stop(step: Step, turns_taken: int, horizon_turns: int) -> StopReason | None:
    """Return why the episode ends after this step, or None.

    The environment's verdict comes before the horizon's.
    """
    if step.terminated:
        return StopReason.TERMINATED
    # Truncated is not failed: the learner must tell a limit from a task that is over.
    if step.truncated:
        return StopReason.ENV_TRUNCATED
    return StopReason.HORIZON if turns_taken >= horizon_turns else None


def failure_stop(failure: Exception, turns: int) -> StopReason:
    """Return what a failure ends an episode of so many turns with."""
    match failure:
        case EpisodeUnfit():
            return StopReason.UNFIT
        case ContextFull():  # before PolicyFailure, of which it is one
            return context_stop(turns)
        case PolicyFailure():
            return StopReason.POLICY_ERROR
        case _:
            return environment_stop(failure)


def environment_stop(failure: Exception | None) -> StopReason:
    """Return what an environment's failure ends an episode with; None: it just ended too early."""
    timed_out = isinstance(failure, EnvironmentTimeout)
    return StopReason.ENV_TIMEOUT if timed_out else StopReason.ENV_ERROR


def context_stop(turns: int) -> StopReason:
    """Return what a full context ends an episode with: no retry makes a first prompt shorter."""
    return StopReason.CONTEXT if turns else StopReason.UNFIT


def program_stop(
    failure: Exception | None,
    *,
    engine_failed: bool,
    refused: StopReason | None,
    answered: int,
) -> StopReason:
    """Return why a program's episode ended, before it is graded.

    `failure` is the program's own, `engine_failed` that of its last call, `refused` why the gateway
    serves no further call, and `answered` how many it has served.
    """
    if engine_failed:
        return StopReason.POLICY_ERROR
    if refused is StopReason.CONTEXT:
        return context_stop(answered)
    if answered and refused is not None:  # a program may well fail when its calls run out
        return refused
    return StopReason.TERMINATED if answered and failure is None else environment_stop(failure)
