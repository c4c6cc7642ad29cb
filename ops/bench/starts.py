"""From the command to the first useful thing, and the memory of each role at that moment.

Each round starts a role as `horizonrl ROLE` does, against a broker that holds one ticket and one finished group. The
actor is timed until it has leased the ticket, and beside it bare vLLM until its first token; the learner until its
first step is announced.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path

import psutil

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
from horizonrl.common.types import (
    Episode,
    Group,
    Kind,
    Provenance,
    StopReason,
    Task,
    Ticket,
    Turn,
    VersionSpan,
)
from horizonrl.ops.bench.case import Case, Request, Side, constant
from horizonrl.ops.bench.programs import program
from horizonrl.ops.bench.rollouts import CONTEXT_TOKENS

RECIPE = """\
[run]
name = "start"

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
BARE = "bare vLLM, to first token"
ACTOR_GOAL_S = 6.0
GOAL = f"goal of {ACTOR_GOAL_S:g} s"
KV_CACHE_MIB, SMALL_KV_CACHE_MIB = 512, 32
SLOTS = 32
LIMIT_S = 120.0
POLL_S = 0.02

Done = Callable[[Transport], Awaitable[bool]]


async def cases(request: Request) -> AsyncIterator[Case]:
    """Yield a case per role."""
    model_dir = request.model_dir()
    kv_cache_mib = SMALL_KV_CACHE_MIB if request.small else KV_CACHE_MIB
    recipe = request.scratch / "recipe.toml"
    text = RECIPE.format(model=model_dir, context=CONTEXT_TOKENS, kv_cache_mib=kv_cache_mib)
    recipe.write_text(text, encoding="utf-8")
    start = partial(_start, recipe, model_dir, count())
    engine = (model_dir, CONTEXT_TOKENS, SLOTS, kv_cache_mib)
    actor: dict[str, Side] = {
        "ours": partial(start, "actor", _has_leased),
        BARE: partial(_start_bare, list(map(str, engine))),
        GOAL: constant("s", ACTOR_GOAL_S),
    }
    yield Case("actor start to first ticket", actor, {BARE: 1.0, GOAL: 1.0})
    yield Case("learner start to first step", {"ours": partial(start, "learner", _has_stepped)})
    yield Case("controller start to first ticket", {"ours": partial(start, "controller", _issues)})


async def _start_bare(words: Sequence[str]) -> Mapping[str, float]:
    started = time.perf_counter()
    async with program("horizonrl.ops.bench.bare_vllm", *words) as bare:
        return {"s": time.perf_counter() - started, "MiB": resident_mib(bare.pid)}


async def _start(
    recipe: Path, model_dir: Path, numbers: Iterator[int], role: str, done: Done
) -> Mapping[str, float]:
    """Start a role on a broker of its own; return the seconds until `done`, and its memory then."""
    directory = recipe.parent / str(next(numbers))
    async with EmbeddedServer(directory / "nats") as server:
        options = (f"--broker.url={server.url}", f"--run.root={directory}/runs")
        config = RunConfig.load([recipe], options)
        async with connected(config.run.name, config.broker) as transport:
            await _prepare(transport, config, model_dir)
            started = time.perf_counter()
            async with _role(role, recipe, *options) as process:
                while not await done(transport):
                    late = time.perf_counter() - started > LIMIT_S
                    if late or process.returncode is not None:
                        raise RunFailed(
                            f"the {role} ended, or did nothing for {LIMIT_S:g} s: run `horizonrl {role}` to see why"
                        )
                    await asyncio.sleep(POLL_S)
                seconds = time.perf_counter() - started
                return {"s": seconds, "MiB": resident_mib(process.pid)}


async def _has_leased(transport: Transport) -> bool:
    queue = await transport.queue()
    return queue.leased > 0 or queue.floor > 0  # a tiny model has played it before anyone looks


async def _has_stepped(transport: Transport) -> bool:
    progress = await StateStore(transport).get(Key.PROGRESS)
    return isinstance(progress, Progress) and progress.step > 0


async def _issues(transport: Transport) -> bool:
    return await TicketQueue(transport).count_issued(Kind.TRAIN) > 1


def resident_mib(pid: int) -> float:
    """Return the memory of a process and its children, with what they share counted once, in MiB."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(float(member.memory_full_info().pss) for member in family) / 2**20


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
            turns=(
                Turn(
                    output_ids=(5, 6, 7, 8),
                    logprobs=(-1.0,) * 4,
                    spans=(span,),
                    reward=float(index % 2),
                ),
            ),
            stop=StopReason.TERMINATED,
        )
        for index in range(ticket.group_size)
    )
    provenance = Provenance(
        actor="bench", model_digest=identity["model"], template_digest=identity["template"]
    )
    # Already there: what the actor makes of the ticket is refused as a repeat, and need not be any good.
    await GroupLog(transport).publish(
        Group(ticket=ticket, episodes=episodes, provenance=provenance)
    )


def _first_task() -> str:
    from horizonrl.envs import registry

    return registry.tasks("textcraft")[0].task_id


@asynccontextmanager
async def _role(
    role: str, recipe: Path, *options: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *horizonrl_command(role, str(recipe), *options), **detached(asyncio.subprocess.DEVNULL)
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
