"""Rows of the start: from the command to the first useful thing, and the memory of each role at that moment.

Each round starts an actor, a learner and a controller as `horizonrl ROLE` does, one after the other, against a broker
that holds one ticket and one finished group. The actor is timed until it has leased the ticket, and beside it bare vLLM
until its first token; the learner until its first step is announced.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from horizonrl.broker.api import Key, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import RunFailed
from horizonrl.common.processes import detached, horizonrl_command
from horizonrl.common.state import Progress
from horizonrl.common.types import Episode, Group, Kind, Provenance, StopReason, Task, Ticket, Turn, VersionSpan
from horizonrl.ops.bench.table.programs import program
from horizonrl.ops.bench.table.rollouts import CONTEXT_TOKENS, MODEL
from horizonrl.ops.bench.table.rows import NOBODY, Request, Row, against_limit, resident_mib

RECIPE = """\
[run]
name = "start"
root = "{directory}/runs"

[model]
name = "{model}"
max_context_tokens = {context}

[[envs]]
id = "textcraft"

[rollout]
group_size = 2

[imitation]
steps = 0

[rl]
steps = 2
groups_per_step = 1

[learner]
micro_batch_tokens = 2048

[actor]
kv_cache_mib = {kv_cache_mib}
"""
ACTOR_GOAL_S = 6.0
KV_CACHE_MIB, SMALL_KV_CACHE_MIB = 512, 32
SLOTS = 32
LIMIT_S = 120.0
POLL_S = 0.02


def rows(request: Request) -> list[Row]:
    """Measure the starts in `request.rounds` rounds."""
    from horizonrl.ops.models.models import resolve_model
    from horizonrl.ops.models.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory(prefix="horizonrl-bench-") as name:
        directory = Path(name)
        model_dir = make_tiny_model(directory / "model") if request.small else resolve_model(MODEL)
        kv_cache_mib = SMALL_KV_CACHE_MIB if request.small else KV_CACHE_MIB
        recipe = directory / "recipe.toml"
        filled = {"directory": directory, "model": model_dir, "context": CONTEXT_TOKENS, "kv_cache_mib": kv_cache_mib}
        recipe.write_text(RECIPE.format(**filled), encoding="utf-8")
        config = RunConfig.load([recipe])
        seen: dict[str, list[float]] = {}
        for number in range(request.rounds):
            for what, value in uvloop.run(_round(config, recipe, model_dir, directory / f"{number}")).items():
                seen.setdefault(what, []).append(value)
    actor_s, bare_s, bare_mib = (seen.pop(name) for name in ("actor_s", "bare_s", "bare"))
    made = [
        Row("actor start to first ticket", "bare vLLM, to first token", "s", actor_s, bare_s, 1.0, True),
        against_limit("actor start to first ticket", "s", actor_s, ACTOR_GOAL_S),
        Row("learner start to first step", NOBODY, "s", seen.pop("learner_s"), ()),
        Row("memory of the actor", "bare vLLM", "MiB", seen.pop("actor"), bare_mib, None, True),
    ]
    return made + [Row(f"memory of the {role}", NOBODY, "MiB", values, ()) for role, values in seen.items()]


async def _round(config: RunConfig, recipe: Path, model_dir: Path, directory: Path) -> dict[str, float]:
    """Start each role once; return seconds, and MiB by role."""
    seen: dict[str, float] = {}
    arguments = (str(model_dir), str(CONTEXT_TOKENS), str(SLOTS), str(config.actor.kv_cache_mib))
    started = time.perf_counter()
    async with program("horizonrl.ops.bench.table.bare_vllm", *arguments) as bare:
        seen["bare_s"] = time.perf_counter() - started
        seen["bare"] = resident_mib(bare.pid)
    async with EmbeddedServer(directory / "nats") as server:
        broker = config.broker.model_copy(update={"url": server.url})
        async with connected(config.run.name, broker) as transport:
            await _prepare(transport, config, model_dir)

            async def leased() -> bool:
                queue = await transport.queue()
                return queue.leased > 0 or queue.floor > 0  # a tiny model has played it before anyone looks

            async def stepped() -> bool:
                progress = await StateStore(transport).get(Key.PROGRESS)
                return isinstance(progress, Progress) and progress.step > 0

            async def issued() -> bool:
                return await TicketQueue(transport).count_issued(Kind.TRAIN) > 1

            own = ("--broker.url", server.url, f"--run.root={directory}/runs")
            seen["actor_s"], seen["actor"] = await _until(leased, "actor", recipe, *own)
            seen["learner_s"], seen["learner"] = await _until(stepped, "learner", recipe, *own)
            _, seen["controller"] = await _until(issued, "controller", recipe, *own)
    return seen


async def _prepare(transport: Transport, config: RunConfig, model_dir: Path) -> None:
    """Set what an actor waits for, issue one ticket, and publish the group that the learner will train."""
    from horizonrl.ops.models.models import model_identity

    await StateStore(transport).put(Key.RUN, config.settings)
    await StateStore(transport).put(Key.PROGRESS, Progress())
    ticket = Ticket(
        number=0,
        kind=Kind.TRAIN,
        task=Task(env_id="textcraft", task_id=_first_task()),
        group_size=config.rollout.group_size,
        horizon_turns=8,
    )
    await TicketQueue(transport).issue(ticket)
    identity = model_identity(model_dir)
    span = VersionSpan(version=0, lineage=0, tokens=4)
    episodes = tuple(
        Episode(
            index=index,
            prompt_ids=tuple(range(10, 40)),
            turns=(Turn(output_ids=(5, 6, 7, 8), logprobs=(-1.0,) * 4, spans=(span,), reward=float(index % 2)),),
            stop=StopReason.TERMINATED,
        )
        for index in range(ticket.group_size)
    )
    provenance = Provenance(actor="bench", model_digest=identity["model"], template_digest=identity["template"])
    # Already there: what the actor makes of the ticket is refused as a repeat, and need not be any good.
    await GroupLog(transport).publish(Group(ticket=ticket, episodes=episodes, provenance=provenance))


def _first_task() -> str:
    from horizonrl.envs import registry

    return registry.tasks("textcraft")[0].task_id


async def _until(done: Callable[[], Awaitable[bool]], role: str, recipe: Path, *own: str) -> tuple[float, float]:
    """Start a role; return the seconds until `done`, and its memory then."""
    started = time.perf_counter()
    async with _role(role, recipe, *own) as process:
        while not await done():
            if process.returncode is not None or time.perf_counter() - started > LIMIT_S:
                raise RunFailed(
                    f"the {role} ended, or did nothing for {LIMIT_S:g} s: run `horizonrl {role}` to see why"
                )
            await asyncio.sleep(POLL_S)
        return time.perf_counter() - started, resident_mib(process.pid)


@asynccontextmanager
async def _role(role: str, recipe: Path, *own: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *horizonrl_command(role, str(recipe), *own), **detached(asyncio.subprocess.DEVNULL)
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
