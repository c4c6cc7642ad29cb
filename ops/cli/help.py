"""What `--help` says of the config's keys, and what a misspelt option may have meant."""

import argparse
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from horizonrl.common.errors import ConfigError, did_you_mean

WIDTH = 100
SETTING = "Any key of the config can be set over the recipes: --section.key VALUE, a list or a table as JSON."
SHOWING = "`horizonrl config [RECIPE...]` prints all values; docs/configuration.md explains each key."


class CommandParser(argparse.ArgumentParser):
    """A parser whose help lists the keys of the config, where `takes_keys`; they are read when help is asked for."""

    takes_keys = False

    def format_help(self) -> str:
        if self.takes_keys:
            self.formatter_class = argparse.RawDescriptionHelpFormatter
            self.epilog = "\n".join([*textwrap.wrap(SETTING, WIDTH), *_key_lines(), "", *textwrap.wrap(SHOWING, WIDTH)])
        return super().format_help()


def refuse_unknown(command: str, unknown: Sequence[str]) -> None:
    """Raise ConfigError for what the parser has left over, with what it may have meant."""
    if not unknown:
        return
    flag = unknown[0].partition("=")[0]
    if not flag.startswith("--"):
        raise ConfigError(
            f"{unknown[0]!r} is one word too many for `horizonrl {command}`; see horizonrl {command} --help"
        )
    keys = [f"--{section}.{key}" for section, values in _sections().items() for key in values]
    raise ConfigError(
        f"{flag}: no such option of `horizonrl {command}`{did_you_mean(flag, keys)} See horizonrl {command} --help"
    )


def _sections() -> Mapping[str, Mapping[str, Any]]:
    """Return every section's keys and their defaults; a section in a section comes right after it."""
    from horizonrl.common.config.schema import RunConfig

    shown: dict[str, Any] = RunConfig.model_construct().model_dump(mode="json")
    sections: dict[str, dict[str, Any]] = {}
    for name, values in shown.items():
        if isinstance(values, dict):
            sections[name] = {key: value for key, value in values.items() if not isinstance(value, dict)}
            sections |= {f"{name}.{key}": value for key, value in values.items() if isinstance(value, dict)}
    return sections


def _key_lines() -> Iterator[str]:
    for section, values in _sections().items():
        told = " ".join(f"{key}={_default(value)}" for key, value in values.items())
        yield from textwrap.wrap(told, WIDTH, initial_indent=f"  {f'--{section}.':15}", subsequent_indent=" " * 17)
    yield '  --envs         \'[{"id": "textcraft"}]\'  all environments at once; in a recipe an [[envs]] for each'


def _default(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
