"""How a config is read from recipes, environment variables and overrides, and how mistakes in them are explained.

Knows the sections by their pydantic models alone, so that `schema.py` can import it.
"""

import codecs
import functools
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsError,
)

from horizonrl.common.config.section import Own, as_kind, by_kind, list_sections
from horizonrl.common.errors import ConfigError, did_you_mean
from horizonrl.common.run_dir import CONFIG

ENV_PREFIX = "HORIZONRL_"
"""Of the environment variables that set keys: HORIZONRL_RL__LR sets rl.lr."""
PASSWORD = f"{ENV_PREFIX}BROKER__NATS__PASSWORD"
"""The variable with the broker's password, which no recipe may contain."""


def load_sections(
    config: type[BaseSettings],
    recipes: Sequence[Path],
    overrides: Sequence[str],
    *,
    recorded: bool = False,
) -> dict[str, Any]:
    """Return the validated sections of a config by name, from recipes, environment variables and overrides.

    Later sources win. Of the variables, a `recorded` config takes the password alone, which was not recorded.
    Raises ConfigError with one line per mistake.
    """
    texts = [_read_toml(recipe) for recipe in recipes]
    # By hand and not by pydantic-settings: an override then gives the same message as a recipe.
    values = parse_overrides(overrides)
    for source, tables in (("the command line", values), *(("a recipe", text) for text in texts)):
        _refuse_secrets(tables, source)
        _refuse_capitals(tables, source, config)
    if not recorded:
        _refuse_unknown_variables(config)

    class Loaded(config):  # type: ignore[valid-type, misc]  # sources can only be chosen by a subclass
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], **_: PydanticBaseSettingsSource
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            variables = _Password(settings_cls) if recorded else EnvSettingsSource(settings_cls)
            # By hand and not by pydantic-settings, which knows no kinds.
            merged = functools.reduce(
                functools.partial(_overlay, config), [*texts, variables(), values]
            )
            return (InitSettingsSource(settings_cls, init_kwargs=merged),)

    try:
        loaded = Loaded()
    except ValidationError as error:
        problems = _innermost([_without_kind(problem, config) for problem in error.errors()])
        variables = {} if recorded else os.environ
        said = [
            _origin(problem, values, variables, recipes) + _explain(problem, config)
            for problem in problems
        ]
        raise ConfigError("\n".join(said)) from None
    except SettingsError as error:
        # The message names the field, in quotes.
        section = f"{ENV_PREFIX}{str(error).split(chr(34))[1]}".upper()
        names = " or ".join(name for name in os.environ if name.upper().startswith(section))
        raise ConfigError(
            f"the environment variable {names} is not JSON: {error.__cause__}"
        ) from None
    return dict(loaded)


def _overlay(
    config: type[BaseModel], lower: dict[str, Any], upper: dict[str, Any]
) -> dict[str, Any]:
    """Return what two sources give together; the upper one wins.

    If it changes a section's kind, what the lower one says of the other kind's own keys is left out.
    """
    remaining = dict(lower)
    for name, section in upper.items():
        if (
            name in config.model_fields
            and isinstance(section, dict)
            and isinstance(lower.get(name), dict)
        ):
            dropped = _keys_of_former_kind(
                config.model_fields[name].annotation, lower[name], section
            )
            remaining[name] = {
                key: value for key, value in lower[name].items() if key not in dropped
            }
    return _merge(remaining, upper)


def _merge(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Join tables at any depth."""
    merged = dict(lower)
    for key, value in upper.items():
        under = lower.get(key)
        merged[key] = (
            _merge(under, value) if isinstance(value, dict) and isinstance(under, dict) else value
        )
    return merged


def _keys_of_former_kind(annotation: Any, lower: dict[str, Any], upper: dict[str, Any]) -> set[str]:
    """Return the keys of the lower source's kind that mean nothing, or something else, under that of the upper one."""
    kinds = by_kind(annotation)
    kind = lower.get("kind", next(iter(kinds), ""))
    upper_kind = upper.get("kind", kind)
    before, after = kinds.get(as_kind(kind)), kinds.get(as_kind(upper_kind))
    if before is None or after is None:
        return set()
    # The same key of two kinds, such as `cap`, may bound another quantity in each; the common base has one meaning.
    base = next(
        base for base in before.__mro__ if issubclass(after, base) and issubclass(base, BaseModel)
    )
    if kind != upper_kind and issubclass(before, Own):
        return set(lower) - set(base.model_fields)
    return set(before.model_fields) - set(base.model_fields)


class _Password(EnvSettingsSource):
    """The password alone, of all environment variables."""

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {
            name: value
            for name, value in super()._load_env_vars().items()
            if name.upper() == PASSWORD
        }


def _read_toml(recipe: Path) -> dict[str, Any]:
    """Return a recipe's tables. Raises ConfigError if it cannot be read."""
    if recipe.is_dir() and (recipe / CONFIG).is_file():
        raise ConfigError(
            f"{recipe} is a run directory, not a recipe: give {recipe / CONFIG}, or a TOML file"
        )
    if not recipe.exists():
        raise ConfigError(f"no recipe at {recipe}: give the path of a TOML file")
    if not recipe.is_file():  # a pipe could be read only once
        raise ConfigError(f"{recipe} is not a regular file: save the recipe as a TOML file")
    try:
        return tomllib.loads(recipe.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{recipe} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{recipe} is not UTF-8, in line {line}: save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        begins = recipe.read_bytes()[:3] == codecs.BOM_UTF8
        why = "it begins with a byte order mark: save it without one" if begins else error
        raise ConfigError(f"{recipe} is not TOML: {why}") from None
    except RecursionError:
        raise ConfigError(
            f"{recipe} nests tables or lists too deeply to be read: flatten it"
        ) from None


def _refuse_capitals(values: Mapping[str, Any], path: str, config: type[BaseModel]) -> None:
    """Raise ConfigError for the section RL, which pydantic-settings would take for rl, or lose beside it."""
    for name in values:
        if name not in config.model_fields and name.lower() in config.model_fields:
            raise ConfigError(f"{name}: no such section, in {path}; did you mean {name.lower()}?")


def _refuse_unknown_variables(model: type[BaseModel]) -> None:
    """Raise ConfigError for HORIZONRL_RL_STEPS and HORIZONRL_LEARN__RANKS, which pydantic would ignore.

    Other names with the prefix are not ours: Kubernetes sets some for the services of a namespace.
    """
    for name in (name for name in os.environ if name.startswith(ENV_PREFIX)):
        words = name.removeprefix(ENV_PREFIX).lower()
        section, nested, _ = words.partition("__")
        meant, _, key = words.partition("_")
        field = model.model_fields.get(meant)
        slip = field is not None and key in _keys(field.annotation)
        if section not in model.model_fields if nested else slip:
            raise ConfigError(
                f"the environment variable {name} names no key of the config: write it as HORIZONRL_SECTION__KEY, with "
                "two underscores, or unset it"
            )


def _refuse_secrets(values: Any, path: str) -> None:
    """Raise ConfigError for a secret where others can read it."""
    broker = values.get("broker")
    broker = broker if isinstance(broker, dict) else {}
    nats = broker.get("nats")
    for name, section in {"broker.password": broker, "broker.nats.password": nats}.items():
        if isinstance(section, dict) and section.get("password", "none") != "none":
            raise ConfigError(
                f"{name} stands in {path}, where others can read it: set the environment variable "
                f"{PASSWORD}, or use broker.nats.nkey_seed"
            )


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Turn `--section.key value` and `--section.key=value` into a nested dict; a value is JSON or a plain string."""
    tokens = list(overrides)
    parsed: dict[str, Any] = {}
    while tokens:
        flag, equals, value = tokens.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(
                f"unexpected argument {flag!r}: overrides are written --section.key value"
            )
        if not equals:
            if not tokens:
                raise ConfigError(f"{flag} has no value: overrides are written --section.key value")
            value = tokens.pop(0)
        *sections, key = flag[2:].split(".")
        path = parsed
        for section in sections:
            path = path.setdefault(section, {})
            if not isinstance(path, dict):
                raise ConfigError(
                    f"{flag} sets part of a value that another flag has set as a whole: give only one of them"
                )
        path[key] = _join(flag, path.get(key), _parse_value(value))
    return parsed


def _join(flag: str, before: Any, values: Any) -> Any:
    """Return what a flag leaves of a value that other flags have set: tables are joined at any depth."""
    if not isinstance(before, dict):
        return values
    if not isinstance(values, dict):
        raise ConfigError(
            f"{flag} sets as a whole what another flag has set a part of: give only one of them"
        )
    return before | {key: _join(flag, before.get(key), value) for key, value in values.items()}


def _parse_value(text: str) -> Any:
    try:
        # Numbers, lists and booleans as in JSON; everything else is text, so that paths and names need no quotes.
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _innermost(problems: Sequence[Any]) -> list[Any]:
    """Leave out problems that only repeat a problem inside the same value."""
    places = [problem["loc"] for problem in problems]
    return [
        problem
        for problem in problems
        if not any(
            len(path) > len(problem["loc"]) and path[: len(problem["loc"])] == problem["loc"]
            for path in places
        )
    ]


def _origin(
    problem: Any, values: Mapping[str, Any], variables: Mapping[str, str], recipes: Sequence[Path]
) -> str:
    """Return the recipe or the variable that a mistaken key or value comes from, and a colon.

    Nothing for one of the command line, which is in sight, and for keys that only contradict each other.
    """
    path = problem["loc"]
    if problem["type"] == "value_error" or _holds(values, path):
        return ""
    keys = {ENV_PREFIX + "__".join(map(str, path[: n + 1])).upper() for n in range(len(path))}
    if names := [name for name in variables if name.upper() in keys]:
        return f"{max(names, key=len)}: "
    files = [
        recipe
        for recipe in recipes
        if _holds(tomllib.loads(recipe.read_text(encoding="utf-8")), path)
    ]
    return f"{files[-1]}: " if files else ""


def _holds(values: Any, path: Sequence[str | int]) -> bool:
    """Return whether nested tables and lists have something at a place."""
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


PLAINLY = {
    "tuple_type": "expected a list: [1, 2] in a recipe, '[1, 2]' in quotes on the command line ([[envs]] for envs)",
    "too_short": "the list is empty: give at least one element",
    "string_type": "expected text: write it in quotes in a recipe, and as '\"123\"' on the command line",
    "string_pattern_mismatch": "a name may only contain letters, digits, _ and -",
    "model_type": "this is a section with keys of its own: [section] in a recipe, --section.key on the command line",
    "dict_type": "expected a table: { key = 1 } in a recipe, '{\"key\": 1}' on the command line",
}
"""Replacements for messages of pydantic that name Python's types, which a recipe's author need not know."""


def _without_kind(problem: Any, config: type[BaseModel]) -> Any:
    """Return a problem without the kind that pydantic puts into its location."""
    section, *inner = problem["loc"] or ("",)
    field = config.model_fields.get(section)
    if not inner or field is None or not by_kind(field.annotation):
        return problem
    return problem | {"loc": (section, *inner[1:]), "kind": inner[0]}


def _explain(problem: Any, model: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        keys = _known_keys(problem, model)
        return f"{path}: no such key{_meant(problem, keys, model)} Known keys: {', '.join(keys)}"
    if problem["type"] == "union_tag_invalid":
        kinds = [kind.strip("'") for kind in problem["ctx"]["expected_tags"].split(", ")]
        return (
            f"{path}.kind is {problem['ctx']['tag']!r}: choose {', '.join(kinds)}"
            f"{did_you_mean(problem['ctx']['tag'], kinds)}"
        )
    message = PLAINLY.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    # A wrong value in this section may be a password, which must not reach a log.
    secret = problem["loc"][:1] == ("broker",)
    values = (
        ""
        if problem["type"] == "value_error" or not path or secret
        else f" (got {problem['input']!r})"
    )
    return f"{path + ': ' if path else ''}{message}{values}"


def _meant(problem: Any, keys: Sequence[str], model: type[BaseModel]) -> str:
    """Return the suggestion for an unknown section or key. A key may belong to another kind, or to another section."""
    values = ".".join(map(str, problem["loc"]))
    if values == "env":
        return ': environments are a list, for example --envs \'[{"id": "maze"}]\'.'
    if len(problem["loc"]) == 1:
        return did_you_mean(values, keys)
    section, _, key = values.rpartition(".")
    if kinds := _kinds_with(section, key, model):
        return f" of {section}.kind {problem['kind']}: it belongs to {', '.join(kinds)}."
    beside = [f"{section}.{other}" for other in keys]
    others = [
        f"{name}.{other}"
        for name, field in model.model_fields.items()
        if not (name == problem["loc"][0] and isinstance(problem["loc"][1], int))
        for other in _keys(field.annotation)
    ]
    return did_you_mean(values, [*beside, *others])


def _kinds_with(section: str, key: str, model: type[BaseModel]) -> list[str]:
    """Return the kinds of a section that have a key; none if the section has no kinds."""
    kinds = by_kind(model.model_fields[section].annotation) if section in model.model_fields else {}
    return [kind for kind, choice in kinds.items() if key in choice.model_fields]


def _keys(annotation: Any) -> list[str]:
    """Return the keys of a section, of all its kinds."""
    return list(
        dict.fromkeys(key for section in list_sections(annotation) for key in section.model_fields)
    )


def _known_keys(problem: Any, model: type[BaseModel]) -> list[str]:
    """Return the keys of the section that an unknown key was given in."""
    for part in problem["loc"][:-1]:
        if part in model.model_fields:
            annotation = model.model_fields[part].annotation
            model = by_kind(annotation).get(problem.get("kind", ""), *list_sections(annotation)[:1])
    return sorted(model.model_fields)
