"""The installed environments, found by their entry points (group `horizonrl.envs`).

Listing them reads package metadata and imports nothing. `load` imports one environment. If a user's package is broken,
it raises ConfigError with the file and line, so that one broken package never hides the other environments.
"""

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeVar, get_args

from pydantic import ValidationError

from horizonrl.common.errors import ConfigError, HorizonError, MissingDependency, did_you_mean
from horizonrl.common.imports import uncollected
from horizonrl.common.plugins import definition, describe, raised_at
from horizonrl.envs.api import Environment, Split, TaskSpec, tool_user

GROUP = "horizonrl.envs"
SPLITS = get_args(Split)

T = TypeVar("T")


def names() -> tuple[str, ...]:
    """Return the ids of the environments, sorted."""
    return tuple(sorted(_entry_points()))


def require_known(*env_ids: str) -> None:
    """Raise ConfigError if an id belongs to no environment."""
    installed = names()
    for env_id in env_ids:
        if env_id not in installed:
            raise ConfigError(
                f"no environment {env_id!r}{did_you_mean(env_id, installed)} `horizonrl envs list` lists all"
            )


def load(env_id: str) -> type[Environment]:
    """Import an environment.

    Raises ConfigError for an unknown id or a broken package, MissingDependency if a built-in one needs another package.
    """
    require_known(env_id)
    entry, *others = _entry_points()[env_id]
    if rivals := [other for other in others if other.value != entry.value]:
        owners = " and ".join(
            f"{candidate.value} (package {candidate.dist.name})"
            for candidate in (entry, *rivals)
            if candidate.dist
        )
        raise ConfigError(
            f"environment {env_id!r} is installed twice, as {owners}: rename or uninstall one of them"
        )
    # A full collection over what gymnasium brings holds up the event loop for 25 to 70 ms, again and again.
    with attributed(env_id, "cannot be imported"), uncollected(entry.module):
        environment: type[Environment] = entry.load()
    methods = (
        "tasks",
        *(("drive", "grade") if hasattr(environment, "drive") else ("reset", "step")),
        "close",
    )
    lacking = [
        f"method {name}" for name in methods if not callable(getattr(environment, name, None))
    ]
    if not isinstance(getattr(environment, "version", None), str):
        lacking.append("text `version`")
    if lacking:
        raise ConfigError(
            f"environment {env_id!r} is incomplete: {entry.value} has no {', no '.join(lacking)} "
            f"({definition(environment)})"
        )
    return environment


@contextmanager
def attributed(env_id: str, trouble: str) -> Iterator[None]:
    """Raise ConfigError, with the file and line of the package's code, for whatever that code raises in the body.

    Errors of HorizonRL's tree pass, and so do the defects of the environments that HorizonRL brings.
    """
    try:
        yield
    except HorizonError:
        raise
    except (Exception, SystemExit) as error:  # the boundary: the package may be anybody's
        entry = _entry_points()[env_id][0]
        module = entry.value.partition(":")[0]
        package = module.partition(".")[0]
        missing = (
            (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        )
        if package == "horizonrl":
            if missing in ("", "horizonrl"):
                raise  # a missing module of our own is a defect, not something to install
            raise MissingDependency(
                f"environment {env_id!r} needs {missing!r}, which is not installed: pip install 'horizonrl[envs]'"
            ) from error
        cure = (
            ""
            if missing in ("", "horizonrl", package)
            else f": fix the import, or `pip install {missing}`"
        )
        file = getattr(sys.modules.get(module), "__file__", None)
        point = f"entry point {entry.name} = {entry.value}"
        position = raised_at(error, module, ", ".join(filter(None, (file, point))))
        said = describe(error, f"environment {env_id!r}", trouble, position)
        raise ConfigError(said + cure) from error


def tasks(env_id: str, options: Mapping[str, Any] | None = None) -> Sequence[TaskSpec]:
    """Return every task of the environment under these options. Options that do not choose tasks are ignored.

    Raises ConfigError for anything but a sequence of tasks, each of one of the three splits.
    """
    listing = load(env_id).tasks
    with attributed(env_id, "cannot list its tasks"):
        # A recipe has one list of options; the listing takes those that choose tasks, and `make` checks all of them.
        listed = _call(env_id, listing, _pick_options(listing, options))
        if not isinstance(listed, Sequence):
            raise ConfigError(
                f"environment {env_id!r} cannot list its tasks: {listing.__qualname__} returned a "
                f"{type(listed).__name__}, not a list or tuple ({definition(listing)})"
            )
        for task in listed:
            if not isinstance(task, TaskSpec) or task.split not in SPLITS:
                raise ConfigError(
                    f"environment {env_id!r} lists {task!r:.200}: a task is a TaskSpec whose "
                    f"split is one of {', '.join(map(repr, SPLITS))} ({definition(listing)})"
                )
    return listed


def select(
    env_id: str,
    split: Split | Literal["all"] = "all",
    categories: Collection[str] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[TaskSpec, ...]:
    """Return the tasks of a split and of the given categories, in the environment's order. No category means all."""
    listed = tasks(env_id, options)
    known_categories = dict.fromkeys(task.category for task in listed)
    if unknown := [category for category in categories if category not in known_categories]:
        raise ConfigError(
            f"environment {env_id!r} has no category {unknown[0]!r}{did_you_mean(unknown[0], known_categories)} Known: "
            f"{', '.join(sorted(known_categories))}"
        )
    selected = tuple(
        task
        for task in listed
        if split in ("all", task.split) and (not categories or task.category in categories)
    )
    if not selected:
        raise ConfigError(
            f"environment {env_id!r} has no task of split {split!r} in {', '.join(categories) or 'any category'}"
        )
    return selected


def make(env_id: str, options: Mapping[str, Any] | None = None) -> Environment:
    """Return a new instance. Raises ConfigError for an unknown option or an invalid value."""
    require_options(env_id, options)
    return _call(env_id, load(env_id), options or {})


def require_options(env_id: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError for an unknown id or option, MissingDependency as `load` does."""
    parameters = inspect.signature(load(env_id)).parameters
    if unknown := [option for option in options or {} if option not in parameters]:
        raise ConfigError(
            f"environment {env_id!r} has no option {unknown[0]!r}{did_you_mean(unknown[0], parameters)} Known: "
            f"{', '.join(sorted(parameters)) or 'none'}"
        )


def preparation(env_id: str, options: Mapping[str, Any] | None = None) -> Callable[[], bool]:
    """Return the environment's `prepare` (api.Prepares) for these options, or a function that does nothing."""
    env_id, options = _player(env_id, options)
    prepare = getattr(load(env_id), "prepare", None)
    if prepare is None:
        return lambda: False
    return partial(prepare, **_pick_options(prepare, options))


async def versioned_id(env_id: str, options: Mapping[str, Any] | None = None) -> str:
    """Return an environment's id and version, for provenance.

    It is made for that: one that cannot take its options raises ConfigError here, before any ticket asks for it.
    """
    with attributed(env_id, "cannot be created and closed"):
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
            f"environment {env_id!r} drives itself, so there are no steps to serve or to play by hand: play it with "
            "`horizonrl eval`, or in a run (docs/bring-your-own-agent.md)"
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
    inner: tuple[str, Mapping[str, Any]] = wrapped(**_pick_options(wrapped, options))
    return inner


def _pick_options(
    function: Callable[..., Any], options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the options that a function takes."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in (options or {}).items() if name in parameters}


def _call(env_id: str, function: Callable[..., T], options: Mapping[str, Any]) -> T:
    try:
        return function(**options)
    except ValidationError as error:
        wrong = (
            f"option {'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})"
            for e in error.errors()
        )
        raise ConfigError(f"environment {env_id!r}: {'; '.join(wrong)}") from None


@cache
def _entry_points() -> Mapping[str, Sequence[EntryPoint]]:
    """Return the entry points, read once per process: reading takes 5 to 20 ms, and every episode makes an instance."""
    entries = defaultdict(list)
    for entry in entry_points(group=GROUP):
        entries[entry.name].append(entry)
    return dict(entries)
