"""One role in this process, as pods and terminals run it."""

import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import xxhash

from horizonrl.broker.api import Role as BrokerRole
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError, HorizonError
from horizonrl.common.logs import configure_logs, get_logger
from horizonrl.common.metrics import Metrics, Role
from horizonrl.common.scratch import shared_scratch
from horizonrl.common.service import Service, run_role
from horizonrl.learner.ranks.nodes import Rendezvous
from horizonrl.learner.ranks.spawn import LAUNCHER
from horizonrl.ops.rundir.directory import write_config
from horizonrl.ops.rundir.finished import finished_step, how_to_go_on

log = get_logger()

STOP_S = 10.0
"""Seconds that a controller may take to end after SIGTERM."""
GIVE_BACK_S = 20.0
"""Seconds an actor needs to give its leases back, after its drain: first its environments are closed
(`actors/rollout/rollout.py`, CLOSE_S), then the broker is told."""
KILL_S = 5.0
"""A role that has not ended this long after its own deadline is killed."""
SHARED_MEMORY = Path("/dev/shm")
"""Where an actor keeps the weights it has fetched: the engine maps them without a copy."""
_ALIKE: dict[str, Any] = {
    "run": {"name", "seed"},
    "model": {"max_context_tokens"},
    **dict.fromkeys(
        ("rollout", "horizon", "advantage", "loss", "correction", "reference", "lora"), True
    ),
    "learner": True,
}
"""What a step depends on. Paths, the broker and the actors may differ from machine to machine."""


def stop_within_s(role: str, config: RunConfig) -> float:
    """Return the seconds after SIGTERM within which a role ends by itself, even if something in it hangs."""
    limits = {"learner": config.learner.shutdown_s, "actor": config.actor.drain_s + GIVE_BACK_S}
    return limits.get(role, STOP_S)


def run(role: str, config: RunConfig) -> int:
    """Run a role to its end and return the exit code."""
    # It would switch the metrics into multiprocess mode.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    configure_logs(run=config.run.name, role=role)
    if is_over(role, config):
        return 0
    service = _service(cast(Role, role), config)
    code = run_role(ROLES[role](config, service), config.run_dir)
    if code:  # a thread that is stuck in a step must not keep a failed role alive
        sys.stderr.flush()
        os._exit(code)
    # The launcher of a rank answers for the learner: a rank that was asked to stop has done what it should.
    return 0 if LAUNCHER in os.environ else service.exit_code


def is_over(role: str, config: RunConfig) -> bool:
    """Return whether the run is finished and this role has nothing left to do, and say so."""
    if LAUNCHER in os.environ:
        return False  # the launcher of a rank has asked
    if role == "learner" and config.learner.node_rank:
        return _has_ended_elsewhere(config)
    _require_url(config)
    return _say_over(finished_step(config, BrokerRole(role)), config)


def _has_ended_elsewhere(config: RunConfig) -> bool:
    """Return whether a node other than 0 hears from the broker that the run is over, if it has an address and a key."""
    if config.broker.url is None:
        return False
    try:
        # With the rights of one who looks: such a node has nothing to say to the broker.
        return _say_over(finished_step(config, BrokerRole.MONITOR), config)
    except HorizonError as error:  # node 0 is the one that has to reach the broker
        log.info("broker_not_asked", reason=str(error))
        return False


def _say_over(step: int | None, config: RunConfig) -> bool:
    if step is not None:
        log.info("run_finished", step=step, reason=how_to_go_on(config, step))
    return step is not None


# Each builder imports its own role: a controller starts without torch.
def _controller(config: RunConfig, service: Service) -> Callable[[], Awaitable[None]]:
    from horizonrl.learner.controller.main import run_controller

    return lambda: run_controller(config, service)


def _learner(config: RunConfig, service: Service) -> Callable[[], Awaitable[None]]:
    from horizonrl.learner.algorithm.own import require_functions
    from horizonrl.learner.disk import require_disk
    from horizonrl.learner.engine.registry import require_backend
    from horizonrl.learner.ranks.spawn import spawn_ranks
    from horizonrl.ops.models.models import model_identity, trainable_model
    from horizonrl.ops.observe.trackers import require

    require_backend(config.learner)
    require_functions(config.objective)
    leads = config.learner.node_rank == 0
    if leads:  # another machine needs the recipe and the model alone
        require(config.tracker.kind)
    model_dir = trainable_model(config.model)
    if leads and LAUNCHER not in os.environ and config.learner.backend != "hash":
        require_disk(config, model_dir)
    # With several ranks this process only launches them and ends with their code. Each rank runs what follows.
    meeting = rendezvous(config, model_identity(model_dir))
    spawn_ranks(config.learner.ranks, config.learner.shutdown_s, meeting)
    from horizonrl.learner.main import run_learner
    from horizonrl.ops.observe.tracking import tracked

    if leads:
        # The run directory is the learner's: export and status read it from there.
        write_config(config)

    async def learner() -> None:
        async with tracked(config, service.metrics):
            await run_learner(config, model_dir, model_identity(model_dir), service)

    return learner


def rendezvous(config: RunConfig, model: Mapping[str, str]) -> Rendezvous | None:
    """Return where this node meets the others, None if it is alone; `model` has the digests of the model's files."""
    learner = config.learner
    if learner.nodes == 1:
        return None
    host, port = learner.rendezvous_address
    sections = config.model_dump(mode="json", include=_ALIKE)
    for name in ("join_timeout_s", "min_nodes", "node_rank", "rendezvous"):
        sections["learner"].pop(name)
    alike = {
        f"{section}.{key}": value
        for section, keys in sections.items()
        for key, value in keys.items()
    }
    return Rendezvous(
        host=host,
        port=port,
        node_rank=learner.node_rank,
        nodes=learner.nodes,
        min_nodes=learner.min_nodes or learner.nodes,
        join_timeout_s=learner.join_timeout_s,
        alike={
            "release": metadata.version("horizonrl"),
            **{f"model.{name}": digest for name, digest in model.items()},
        }
        | alike
        # It depends on `envs`, whose options may differ.
        | {"longest_episode_tokens": config.longest_episode_tokens},
    )


def _actor(config: RunConfig, service: Service) -> Callable[[], Awaitable[None]]:
    from horizonrl.actors.main import run_actor
    from horizonrl.ops.models.models import model_identity, trainable_model

    model_dir = trainable_model(config.model)

    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    shadow = f"{config.run.name}-{xxhash.xxh3_64_hexdigest(str(config.broker.url).encode())}"

    async def actor() -> None:
        # One for all actors of this host, by the broker too: a run of the same name on another one has other weights.
        # It also removes what killed actors left there: weights in shared memory are memory that nobody frees.
        with shared_scratch(shadow, parent) as folder:
            await run_actor(config, model_dir, model_identity(model_dir), folder, service)

    return actor


def _service(role: Role, config: RunConfig) -> Service:
    metrics = Metrics(role, [env.id for env in config.envs])
    return Service(metrics, stop_within_s=stop_within_s(role, config))


def _require_url(config: RunConfig) -> None:
    if config.broker.url is None:
        raise ConfigError(
            "broker.url is not set: a role alone needs a running broker. Start one with `horizonrl broker RECIPE` and "
            "give its address as --broker.url nats://HOST:PORT, or run everything here with `horizonrl train`"
        )


ROLES: dict[str, Callable[[RunConfig, Service], Callable[[], Awaitable[None]]]] = {
    "controller": _controller,
    "learner": _learner,
    "actor": _actor,
}
