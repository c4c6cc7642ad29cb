"""Who is evaluated: a model's directory, a run or one of its checkpoints, a model known by name, or an endpoint."""

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import EnvSection
from horizonrl.common.errors import ConfigError
from horizonrl.common.metrics import Metrics
from horizonrl.common.model_dir import weight_files
from horizonrl.common.run_dir import BEST, CONFIG
from horizonrl.common.scratch import scratch
from horizonrl.envs import registry
from horizonrl.ops.models.models import model_identity, resolve_model
from horizonrl.ops.terminal.console import plain_console
from horizonrl.ops.terminal.waiting import waiting

MakeRollout = Callable[[EnvSection], Rollout]
"""Called for each episode."""
OptionsById = Mapping[str, Mapping[str, Any]]
"""The options of the environments that are played."""

TURN_TOKENS = 512
"""The paper's, where no recipe says otherwise."""
CONTEXT_TOKENS = 8_192
"""Longest context where no recipe says otherwise: what the longest episodes of small models fill."""


@dataclass(frozen=True, slots=True)
class SubjectRequest:
    """The model as the command line names it."""

    model: str | None
    endpoint: str | None = None
    model_name: str | None = None
    key_variable: str | None = None
    """The variable that must hold the key; None: OPENAI_API_KEY, if it is set."""
    recipes: tuple[Path, ...] = ()
    overrides: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is ready to be started."""

    name: str
    facts: dict[str, Any]
    """What it is, as far as episodes depend on it; never a key."""
    config: RunConfig
    own_envs: bool
    """The config comes from a recipe or a run, and names environments."""
    start: Callable[[RunConfig, OptionsById], Any]
    """A context manager of a MakeRollout."""
    version: "RunVersion | None" = None
    """If it is a run's."""


@dataclass(frozen=True, slots=True)
class RunVersion:
    """A version that a run directory holds."""

    run_dir: Path
    version: int


@contextmanager
def ticket_subject(request: SubjectRequest) -> Iterator[Subject]:
    """Find the model; what has to be exported for it is there until the end of the body."""
    if request.endpoint is not None:
        yield _remote(request)
    elif request.model is None:
        raise ConfigError(
            "which model? A Hugging Face directory, a run directory, a checkpoint, a known name, or --endpoint URL"
        )
    elif (run_dir := _run_dir(path := Path(request.model).expanduser())) is not None:
        # Gone after the evaluation; if it is killed, the next process that makes such a directory removes it.
        with scratch() as folder:
            model_dir = folder / "model"
            with waiting(plain_console(stderr=True), f"exporting {path.name}"):
                version = _export(run_dir, path, model_dir)
            subject = _local(request, model_dir, run_dir / CONFIG)
            yield replace(subject, version=RunVersion(run_dir, version))
    else:
        with waiting(plain_console(stderr=True), "preparing the model") as tell:
            model_dir = resolve_model(request.model, tell=tell)
        yield _local(request, model_dir, None)


def _run_dir(path: Path) -> Path | None:
    """Return the run directory that a path is, or that it is a checkpoint of."""
    if path.parent.name == "checkpoints" and path.name.startswith("step-"):
        path = path.parents[1]
    return path if (path / CONFIG).is_file() else None


def _export(run_dir: Path, path: Path, out: Path) -> int:
    """Write a checkpoint, or a run's best or newest version, as a Hugging Face directory.

    Returns the version.
    """
    from horizonrl.learner.engine.checkpoint.model_directory import write_model_dir
    from horizonrl.learner.records.best import Best
    from horizonrl.ops.publish.export import export_run
    from horizonrl.ops.rundir.directory import read_config

    if path == run_dir:
        return export_run(run_dir, out, best=Best(run_dir / BEST).read() is not None)
    model_dir = resolve_model(read_config(run_dir).model.name)
    write_model_dir(model_dir, path, out, {"checkpoint": path.name}, card=json.dumps)
    return int(path.name.removeprefix("step-"))


def _local(request: SubjectRequest, model_dir: Path, run_recipe: Path | None) -> Subject:
    recipes = request.recipes if run_recipe is None else (run_recipe, *request.recipes)
    longest = json.loads((model_dir / "config.json").read_text(encoding="utf-8")).get(
        "max_position_embeddings", CONTEXT_TOKENS
    )

    @asynccontextmanager
    async def start(config: RunConfig, environments: OptionsById) -> AsyncIterator[MakeRollout]:
        from horizonrl.actors.chat.template import ChatTemplate
        from horizonrl.actors.engines.registry import start_policy
        from horizonrl.actors.gateway.server import gateway_for
        from horizonrl.actors.rollout.replies import parser_if_needed

        policy = await start_policy(
            config.actor, config.model, model_dir, seed=config.run.seed, renewed=False
        )
        try:
            chat = ChatTemplate.load(model_dir)
            # A template that refuses it would break every episode.
            chat.open(config.rollout.system_prompt, "...")
            parser = await parser_if_needed(chat, environments)
            system = config.rollout.system_prompt
            context = config.rollout.context
            async with gateway_for(
                [*environments], policy, chat, Metrics(), config.actor.gateway_host
            ) as gateway:
                yield lambda env: Rollout(
                    policy, chat, system, env.step_timeout_s, context, parser, gateway
                )
        finally:
            await policy.close()

    config = _config(recipes, request.overrides, min(longest, CONTEXT_TOKENS))
    facts = {
        **model_identity(model_dir),
        # By content: a directory of the same name may hold other weights tomorrow, whose episodes must not mix with
        # these.
        "weights": {file.name: digest_file(file) for file in weight_files(model_dir)},
        "max_context_tokens": config.model.max_context_tokens,
        "engine": config.actor.engine,
    }
    return Subject(str(request.model), facts, config, bool(recipes), start)


def _remote(request: SubjectRequest) -> Subject:
    from horizonrl.actors.engines.client import Endpoint, EndpointSettings
    from horizonrl.actors.engines.conversation import Conversation

    if request.endpoint is None or request.model_name is None:
        raise ConfigError("--endpoint wants --model-name NAME: the model as the endpoint calls it")
    if request.model is not None:
        raise ConfigError(
            f"the model {request.model} and --endpoint were both given: evaluate one of them"
        )
    # The address goes into the file of episodes and into results.json, which people share.
    if "@" in request.endpoint:
        raise ConfigError(
            "--endpoint holds a password, which would be written down: put it into the variable of --key-variable"
        )
    variable = request.key_variable or "OPENAI_API_KEY"
    key = os.environ.get(variable, "").strip()
    if request.key_variable is not None and not key:
        raise ConfigError(
            f"--key-variable is {variable}, an environment variable that is not set: export it"
        )
    settings = EndpointSettings(
        request.endpoint, request.model_name, SecretStr(key) if key else None
    )

    @asynccontextmanager
    async def start(config: RunConfig, environments: OptionsById) -> AsyncIterator[MakeRollout]:
        def conversation(env: EnvSection) -> Rollout:
            both = Conversation(endpoint)
            return Rollout(both, both, config.rollout.system_prompt, env.step_timeout_s)

        for env_id, options in environments.items():
            if await registry.offers_tools(env_id, options):
                raise ConfigError(
                    f"{env_id} is played by calling tools, which --endpoint does not pass on"
                )
        async with Endpoint(settings) as endpoint:
            await endpoint.reach()
            yield conversation

    config = _config(request.recipes, request.overrides, CONTEXT_TOKENS)
    return Subject(
        request.model_name,
        {"endpoint": request.endpoint, "model_name": request.model_name},
        config,
        bool(request.recipes),
        start,
    )


def _config(recipes: Sequence[Path], overrides: Sequence[str], context_tokens: int) -> RunConfig:
    """Return the recipes' config; without any, one that leaves a model its whole context."""
    defaults = [
        f"--model.max_context_tokens={context_tokens}",
        f"--rollout.max_turn_tokens={TURN_TOKENS}",
    ]
    # Nobody here reads these, but a config of a long context, or of few slots, must have them.
    unread = ["--learner.micro_batch_tokens=1000000000", "--rollout.group_size=2"]
    return RunConfig.load(recipes, [*([] if recipes else defaults), *unread, *overrides])
