"""`python -m horizonrl.ops.pages.configuration`: write docs/configuration.md from the sections of `common/config/`."""

import json
from pathlib import Path
from typing import Any

from horizonrl.common.config.schema import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = """\
# Configuration

Generated from the sections in `common/config/` by `python -m horizonrl.ops.pages.configuration`; do not edit.

Recipes describe a run: TOML files with the sections below. Later sources win:

1. the defaults of this page,
2. recipes, from left to right, by path or by the names that `horizonrl recipes` lists: `horizonrl train laptop lora`,
3. environment variables: `HORIZONRL_RL__STEPS=20`,
4. the command line: `--rl.steps 20`, or `--rl.steps=20`; a list or a table as JSON: `--horizon.horizons '[3, 6]'`.

`horizonrl config laptop --rl.steps 20` prints the resulting config without starting anything. A run writes it to
`config.toml` in its directory. The word `"none"` turns an option off, since TOML has no null. A key that does not exist
is rejected with a suggestion. Invalid combinations are rejected at startup, with an explanation.

`train` passes the result on to the processes that it starts, so no variable changes it there. `status`, `report`,
`replay` and the other commands on a run directory read its `config.toml` without variables, other than the broker's
password, `HORIZONRL_BROKER__NATS__PASSWORD`; the command line changes it for them too.
"""


def page() -> str:
    """Return the page's text."""
    schema = RunConfig.model_json_schema()
    defaults = RunConfig.model_construct().model_dump(mode="json")
    sections = [_section(name, place, schema, defaults[name]) for name, place in schema["properties"].items()]
    return "\n".join([HEAD, *sections])


def _section(name: str, place: dict[str, Any], schema: dict[str, Any], defaults: Any) -> str:
    """Return the table of a section, and then those of the sections in it.

    `envs` is a list of sections, whose one element has the defaults.
    """
    several = isinstance(defaults, list)
    properties = _followed(place["items"] if several else place, schema)["properties"]
    given = defaults[0] if several else defaults
    inner = {key: field for key, field in properties.items() if "properties" in _followed(field, schema)}
    rows = [
        f"| `{key}` | {_type(field, schema)} | {_default(given.get(key))} | {_meaning(field)} |"
        for key, field in properties.items()
        if key not in inner
    ]
    title = f"## `[[{name}]]`" if several else f"## `[{name}]`"
    tables = [_section(f"{name}.{key}", field, schema, given[key]) for key, field in inner.items()]
    return "\n".join([title, "", "| key | values | default | meaning |", "|---|---|---|---|", *rows, "", *tables])


def _followed(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in field:
        found: dict[str, Any] = schema["$defs"][field["$ref"].rpartition("/")[2]]
        return found
    return field


def _type(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return what a key takes, in words."""
    field = _followed(field, schema)
    if "anyOf" in field:
        return " or ".join("`none`" if each.get("type") == "null" else _type(each, schema) for each in field["anyOf"])
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    match field["type"]:
        case "array" if "prefixItems" in field:
            return f"[{', '.join(_type(each, schema) for each in field['prefixItems'])}]"
        case "array":
            return f"list of {_type(field['items'], schema)}"
        case "object":
            return "table"
        case "boolean":
            return "`true`, `false`"
        case "string":
            return {"path": "path", "password": "secret"}.get(field.get("format", ""), "text")
        case number:
            return f"{number}{_bounds(field)}"


def _bounds(field: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field]
    return f" {', '.join(bounds)}" if bounds else ""


def _default(value: Any) -> str:
    return "`none`" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`"


def _meaning(field: dict[str, Any]) -> str:
    return " ".join(field.get("description", "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
