"""The installed environments, found by their entry points (group `horizonrl.envs`).

Listing them reads package metadata and imports nothing. `load` imports one environment.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from horizonrl.common.errors import ConfigError, MissingDependency, did_you_mean
from horizonrl.common.imports import uncollected
from horizonrl.envs.api import Environment, Split, TaskSpec, tool_user

GROUP = "horizonrl.envs"

T = TypeVar("T")


def names() -> tuple[str, ...]:
    """Return the ids of the environments, sorted."""
    return tuple(sorted(_registered()))


def require_known(*env_ids: str) -> None:
    """Raise ConfigError if an id belongs to no environment."""
    known = names()
    for env_id in env_ids:
        if env_id not in known:
            raise ConfigError(f"no environment {env_id!r}{did_you_mean(env_id, known)} Known: {', '.join(known)}")


def load(env_id: str) -> type[Environment]:
    """Import an environment. Raises ConfigError for an unknown id, MissingDependency if a package is missing."""
    require_known(env_id)
    entry = _registered()[env_id]
    try:
        # A full collection over what gymnasium brings holds up the event loop for 25 to 70 ms, again and again.
        with uncollected(entry.module):
            environment: type[Environment] = entry.load()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "horizonrl":
            raise  # a missing module of our own is a defect, not something to install
        raise MissingDependency(
            f"environment {env_id!r} needs {error.name!r}, which is not installed: pip install 'horizonrl[envs]'"
        ) from error
    return environment


def tasks(env_id: str, options: Mapping[str, Any] | None = None) -> Sequence[TaskSpec]:
    """Return every task of the environment under these options. Options that do not choose tasks are ignored."""
    listing = load(env_id).tasks
    # A recipe has one list of options; the listing takes those that choose tasks, and `make` checks all of them.
    known = inspect.signature(listing).parameters
    return _call(env_id, listing, {name: value for name, value in (options or {}).items() if name in known})


def select(
    env_id: str,
    split: Split | Literal["all"] = "all",
    categories: Collection[str] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[TaskSpec, ...]:
    """Return the tasks of a split and of the given categories, in the environment's order. No category means all."""
    listed = tasks(env_id, options)
    known = dict.fromkeys(task.category for task in listed)
    if unknown := [category for category in categories if category not in known]:
        raise ConfigError(
            f"environment {env_id!r} has no category {unknown[0]!r}{did_you_mean(unknown[0], known)} Known: "
            f"{', '.join(sorted(known))}"
        )
    selected = tuple(
        task for task in listed if split in ("all", task.split) and (not categories or task.category in categories)
    )
    if not selected:
        raise ConfigError(
            f"environment {env_id!r} has no task of split {split!r} in {', '.join(categories) or 'any category'}"
        )
    return selected


def make(env_id: str, options: Mapping[str, Any] | None = None) -> Environment:
    """Return a new instance. Raises ConfigError for an unknown option or an invalid value."""
    environment = load(env_id)
    options = options or {}
    known = inspect.signature(environment).parameters
    if unknown := [option for option in options if option not in known]:
        raise ConfigError(
            f"environment {env_id!r} has no option {unknown[0]!r}{did_you_mean(unknown[0], known)} Known: "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    return _call(env_id, environment, options)


def preparation(env_id: str, options: Mapping[str, Any] | None = None) -> Callable[[], bool]:
    """Return the environment's `prepare` (api.Prepares) for these options, or a function that does nothing."""
    env_id, options = _player(env_id, options)
    prepare = getattr(load(env_id), "prepare", None)
    if prepare is None:
        return lambda: False
    known = inspect.signature(prepare).parameters
    return partial(prepare, **{name: value for name, value in options.items() if name in known})


async def versioned_id(env_id: str, options: Mapping[str, Any] | None = None) -> str:
    """Return an environment's id and version, for provenance.

    It is made for that: one that cannot take its options raises ConfigError here, before any ticket asks for it.
    """
    environment = make(env_id, options)
    await environment.close()
    return f"{env_id} {environment.version}"


def demonstrations_only(env_id: str, options: Mapping[str, Any] | None = None) -> bool:
    """Return whether the environment only replays recorded episodes."""
    return bool(getattr(_player_class(env_id, options), "demonstrations_only", False))


def drives_itself(env_id: str) -> bool:
    """Return whether the environment is a program that calls the policy (api.Program)."""
    return callable(getattr(load(env_id), "drive", None))


def require_steps(env_id: str) -> None:
    """Raise ConfigError for an environment that drives itself: nobody else can step it."""
    if drives_itself(env_id):
        raise ConfigError(
            f"environment {env_id!r} drives itself, so there are no steps to check, to serve or to play by "
            "hand: play it with `horizonrl eval`, or in a run (docs/bring-your-own-agent.md)"
        )


def has_expert(env_id: str, options: Mapping[str, Any] | None = None) -> bool:
    """Return whether the environment can demonstrate its tasks."""
    return callable(getattr(_player_class(env_id, options), "expert", None))


async def offers_tools(env_id: str, options: Mapping[str, Any] | None = None) -> bool:
    """Return whether agents play the environment by calling tools, under these options."""
    environment = make(env_id, options)
    await environment.close()
    return tool_user(environment) is not None


def names_state(env_id: str, options: Mapping[str, Any] | None = None) -> bool:
    """Return whether the environment names its states, so that turns can be compared within them."""
    return callable(getattr(_player_class(env_id, options), "state", None))


def _player_class(env_id: str, options: Mapping[str, Any] | None) -> type[Environment]:
    return load(_player(env_id, options)[0])


def _player(env_id: str, options: Mapping[str, Any] | None) -> tuple[str, Mapping[str, Any]]:
    """Return the id and the options of the environment that plays: of one that wraps another (api.Wraps), the other's.

    Raises ConfigError if the options name none.
    """
    wrapped = getattr(load(env_id), "wrapped", None)
    if wrapped is None:
        return env_id, options or {}
    known = inspect.signature(wrapped).parameters
    found: tuple[str, Mapping[str, Any]] = wrapped(**{k: v for k, v in (options or {}).items() if k in known})
    return found


def _call(env_id: str, function: Callable[..., T], options: Mapping[str, Any]) -> T:
    try:
        return function(**options)
    except ValidationError as error:
        wrong = (f"option {_place(e['loc'])}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise ConfigError(f"environment {env_id!r}: {'; '.join(wrong)}") from None


@cache
def _registered() -> dict[str, EntryPoint]:
    """Return the entry points, read once per process: reading takes 5 to 20 ms, and every episode makes an instance."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))
