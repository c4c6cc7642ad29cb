"""The parser of a command: its help lists the config's keys, and a misspelled option is met with a suggestion."""

import argparse
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from horizonrl.common.errors import ConfigError, did_you_mean

WIDTH = 80
"""Columns of what argparse does not wrap: it fits any terminal."""
SETTING = (
    "Set any key of the config with --section.key VALUE. Write lists and tables as JSON. Defaults:"
)
SETTING_OF_ROLE = (
    "Set a key of the config with --section.key VALUE. Give all roles the same recipes; this one reads these keys "
    "(defaults):"
)
SHOWING = "`horizonrl config [RECIPE...]` prints all values; `horizonrl config --explain KEY` explains a key."

T = TypeVar("T")
Execute = Callable[[argparse.Namespace, list[str]], int]
"""Runs a command with its arguments and the overrides of the config; returns the exit code."""


class CommandParser(argparse.ArgumentParser):
    """A parser that can list the config's keys, which are read only when somebody asks for help."""

    sections: Sequence[str] | None = ()
    """The sections of the config that the help lists; None lists all."""
    verbs: "Commands | None" = None
    """The commands in this one."""

    def format_help(self) -> str:
        if self.verbs is not None:
            self.formatter_class = argparse.RawDescriptionHelpFormatter
            self.epilog = f"those are:\n{self.verbs.list_summaries()}"
        if self.sections is None or self.sections:
            self.formatter_class = argparse.RawDescriptionHelpFormatter
            self.description = textwrap.fill(self.description or "", WIDTH)
            setting = textwrap.wrap(SETTING if self.sections is None else SETTING_OF_ROLE, WIDTH)
            self.epilog = "\n".join(
                [*setting, *_key_lines(self.sections), "", *textwrap.wrap(SHOWING, WIDTH)]
            )
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ConfigError for a word that an argument does not take; argparse would suggest nothing."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        raise ConfigError(
            f"`{self.prog}` has no {value!r}{did_you_mean(str(value), choices)} "
            f"Choose {', '.join(choices)}"
        )

    def refuse_unknown(self, unknown: Sequence[str]) -> None:
        """Raise ConfigError for words that the parser did not understand, with what they may mean."""
        if not unknown:
            return
        flag, see = unknown[0].partition("=")[0], f"see {self.prog} --help"
        if not flag.startswith("--"):
            raise ConfigError(f"{unknown[0]!r} is one word too many for `{self.prog}`; {see}")
        keys = [f"--{section}.{key}" for section, values in _sections().items() for key in values]
        meant = did_you_mean(flag, [*self._option_string_actions, *keys])
        raise ConfigError(f"{flag}: no such option of `{self.prog}`{meant} {see.capitalize()}")


class Commands:
    """The commands of a group, as it declares them."""

    def __init__(self, subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
        self._subparsers = subparsers
        self.summaries: dict[str, str] = {}
        """The first sentence of each command's description."""

    def add(
        self,
        name: str,
        description: str,
        execute: Execute,
        *,
        keys: bool = False,
        sections: Sequence[str] = (),
        overrides: bool = True,
    ) -> CommandParser:
        """Declare a command. `keys`: its help lists the config's keys, or those of `sections` alone.

        `overrides`: it accepts `--section.key`.
        """
        command = self._subparsers.add_parser(name, description=description)
        command.set_defaults(execute=execute, takes_overrides=overrides, parser=command)
        command.sections = None if keys else sections
        self._summarise(name, description)
        return command

    def add_group(self, name: str, description: str, metavar: str) -> "Commands":
        """Declare a command that consists of others; return where those are declared."""
        command = self._subparsers.add_parser(name, description=description)
        verbs = command.add_subparsers(
            dest=name, required=True, metavar=metavar, help="one of those below"
        )
        command.verbs = Commands(verbs)
        self._summarise(name, description)
        return command.verbs

    def _summarise(self, name: str, description: str) -> None:
        self.summaries[name] = description.partition(". ")[0].removesuffix(".")

    def list_summaries(self) -> str:
        """Return a line for each command, or more where its summary is long."""
        return "\n".join(
            textwrap.fill(
                summary, WIDTH, initial_indent=f"  {name:11}  ", subsequent_indent=" " * 15
            )
            for name, summary in self.summaries.items()
        )


def option(
    command: "argparse._ActionsContainer", name: str, metavar: str, text: str, **rest: Any
) -> None:
    """Declare an option that takes a value, or a word without dashes; `text` is its help."""
    command.add_argument(name, metavar=metavar, help=text, **rest)


def switch(command: "argparse._ActionsContainer", name: str, text: str, **rest: Any) -> None:
    """Declare an option without a value."""
    command.add_argument(name, action="store_true", help=text, **rest)


def add_recipes(command: CommandParser) -> None:
    text = (
        "a TOML file, or a name that `horizonrl recipes` lists; later recipes override earlier ones"
    )
    option(command, "recipes", "RECIPE", text, nargs="*", type=Path)


def add_run_dir(command: CommandParser, text: str | None = None) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=text)


def add_json(command: CommandParser, what: str) -> None:
    option(
        command, "--json", "FILE", f"write the {what} to a file", dest="json_file", type=new_file
    )


def make_request(kind: type[T], arguments: argparse.Namespace, **rest: Any) -> T:
    """Return what a command was asked for: the fields of `kind` that the command line has, and the rest."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(arguments).items() if name in names}, **rest)


def number_within(least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return a reader of numbers within bounds; of integers if `least` is one."""

    def number(text: str) -> float:
        # The bound's own type reads the text: `bounded(1)` refuses 1.5 and `bounded(0.1)` takes it.
        value = type(least)(text)
        if not least <= value <= most:
            at_most = f", {most:g} at most" if most < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text}: give {least:g} or more{at_most}")
        return value

    return number


def integers(text: str) -> tuple[int, ...]:
    """Read `0,1,2`."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give integers separated by commas, such as 0,1,2"
        )
    return tuple(int(part) for part in text.split(","))


def new_file(text: str) -> Path:
    """Read the path of a file to write. What cannot be written is refused before the work, not after it."""
    file = Path(text)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"no directory {file.parent}: name a file in an existing directory"
        )
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a directory: name a file in it")
    return file


def host_name(text: str) -> str:
    """Read a name or an address of a server, as certificates hold it."""
    if not text.isascii() or not text.isprintable() or not text or " " in text:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a name or an address, such as broker.example.org"
        )
    return text


def refuse_overrides(command: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError for a key of the config, or an environment's option, that the command would ignore."""
    if overrides:
        flag = overrides[0].partition("=")[0]
        what = "options of environments" if flag.startswith("--options.") else "keys of the config"
        raise ConfigError(f"{flag}: `horizonrl {command}` takes no {what}")


def _sections() -> Mapping[str, Mapping[str, Any]]:
    """Return every section's keys and their defaults; a section in a section comes right after it."""
    from horizonrl.common.config.schema import RunConfig

    shown: dict[str, Any] = RunConfig.model_construct().model_dump(mode="json")
    sections: dict[str, dict[str, Any]] = {}
    for name, values in shown.items():
        if isinstance(values, dict):
            # An empty table is a key with free contents.
            inner = {
                key: value for key, value in values.items() if isinstance(value, dict) and value
            }
            sections[name] = {key: value for key, value in values.items() if key not in inner}
            sections |= {f"{name}.{key}": value for key, value in inner.items()}
    return sections


def _key_lines(sections: Sequence[str] | None) -> Iterator[str]:
    for section, values in _sections().items():
        if sections is not None and section.partition(".")[0] not in sections:
            continue
        keys = " ".join(f"{key}={_default(value)}" for key, value in values.items())
        yield from textwrap.wrap(
            keys, WIDTH, initial_indent=f"  {f'--{section}.':15}", subsequent_indent=" " * 17
        )
    if sections is None or "envs" in sections:
        yield '  --envs         \'[{"id": "textcraft"}]\'  all of them; in recipes [[envs]]'


def _default(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
