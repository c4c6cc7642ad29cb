"""An episode of a program: it drives itself, and the gateway serves and records its calls.

Place in the flow: Ticket → **Episode** → Group, where the environment is an `envs.api.Program`.
"""

import asyncio
import contextlib
import time

from horizonrl.actors.episode_ends import environment_stop, program_stop
from horizonrl.actors.gateway.server import Gateway
from horizonrl.actors.gateway.session import Session
from horizonrl.common.errors import EngineDead, EnvironmentFailure
from horizonrl.common.texts import printable
from horizonrl.common.types import MAX_SHORT_TEXT, Episode, Kind, StopReason, Ticket
from horizonrl.envs.api import Endpoint, Outcome, Program

GRACE_S = 10.0
"""Time that a program has to end by itself once no call is left and the last one has been sampled."""


async def play_program(
    program: Program, gateway: Gateway | None, ticket: Ticket, index: int
) -> Episode:
    """Let a program play one task. A failure that is not the agent's is a broken episode, not an error.

    Raises EngineDead. What the program has sampled is in the episode however it ended.
    """
    if gateway is None:
        return _broken(
            index,
            "this policy is not served to programs: play them in an actor or with a local model",
        )
    if ticket.kind is Kind.DEMO:
        return _broken(
            index, f"{ticket.task.env_id} has no expert: use transcripts as demonstrations"
        )
    started = time.monotonic()
    async with gateway.session(ticket, index) as session:
        failure = await _drive(program, session, Endpoint(gateway.base_url, session.key))
        lost = len(session.graph.samples) - session.answered
        gateway.metrics.count("gateway_calls_total", lost, reason="undelivered")
        # Before the grader: what the program has left behind changes nothing more.
        await session.close()
    if isinstance(session.failure, EngineDead):
        raise session.failure
    error, outcome = None, Outcome(0.0, False)
    stop = program_stop(
        failure,
        engine_failed=session.failure is not None,
        refused=session.cut,
        answered=session.answered,
    )
    if stop.broken:
        error = _error(session, failure, stop)
    else:
        try:
            outcome = await program.grade(finished=failure is None and session.cut is None)
        except Exception as problem:  # noqa: BLE001 - a grader is anybody's code: its failure is the episode's
            stop = environment_stop(problem)
            error = f"{type(problem).__name__}: {problem}"
        if outcome.truncated and stop is StopReason.TERMINATED:
            stop = StopReason.ENV_TRUNCATED
    return session.graph.episode(
        index,
        stop,
        error=error and printable(error, MAX_SHORT_TEXT),
        reward=float(outcome.reward),
        success=outcome.success,
        refused=session.refusals.total(),
        refusal=session.last_refusal,
        generate_s=session.generate_s,
        environment_s=max(0.0, time.monotonic() - started - session.generate_s),
    )


async def _drive(program: Program, session: Session, endpoint: Endpoint) -> Exception | None:
    """Wait until the program has ended, or has had GRACE_S since its calls ran out; return its failure."""
    async with asyncio.TaskGroup() as group:
        driving = group.create_task(
            _failure_of(program, session.ticket.task.task_id, endpoint),
            name=str(session.ticket.task),
        )
        over = group.create_task(session.exhausted())
        await asyncio.wait({driving, over}, return_when=asyncio.FIRST_COMPLETED)
        if not driving.done():
            await asyncio.wait({driving}, timeout=0.0 if session.failure else GRACE_S)
        over.cancel()
        driving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        return driving.result()
    return None


async def _failure_of(program: Program, task_id: str, endpoint: Endpoint) -> Exception | None:
    try:
        await program.drive(task_id, endpoint)
    except Exception as error:  # noqa: BLE001 - an environment is anybody's code: its failure is the episode's
        return error
    return None


def _error(session: Session, failure: Exception | None, stop: StopReason) -> str:
    if stop is StopReason.POLICY_ERROR:
        return f"{type(session.failure).__name__}: {session.failure}"
    if stop is StopReason.UNFIT:
        return "the program's first call does not fit into the context, and it made no other"
    if failure is None:
        return "the program ended without a call of the model that it waited for"
    name = "" if isinstance(failure, EnvironmentFailure) else f"{type(failure).__name__}: "
    return f"{name}{failure}"


def _broken(index: int, error: str) -> Episode:
    return Episode(index=index, prompt_ids=(), turns=(), stop=StopReason.ENV_ERROR, error=error)
