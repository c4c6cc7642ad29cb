"""Every command of the documentation is one that the programs understand.

Here a command is parsed, its files are looked for, and its keys and values are checked by the config or by the
environment; nothing is started. What the main commands do is tried elsewhere, by starting them:

| command | test |
|---|---|
| `train`, `export` | `tests/process/test_train.py` |
| `history` | `tests/process/test_history.py` |
| `broker`, `controller`, `learner`, `actor` | `tests/process/test_roles.py`, with keys `test_secured.py` |
| `python -m tests.faults chaos` | `tests/process/test_chaos.py` |
| the commands of `examples/*/README.md` | `tests/examples` |
| metrics of a run in a real Prometheus | `tests/process/test_observed.py` |
| `envs list`, `envs check` | `tests/envs/test_your_own.py` |
| `status`, `report`, `dataset`, `track`, `eval`, `demos`, `doctor`, `config` | `tests/ops` |
"""

import inspect
import re
import shlex
import tomllib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from horizonrl.common.config.loading import parse_overrides
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.envs import registry
from horizonrl.ops.cli.overrides import split_options
from horizonrl.ops.cli.parser import make_parser, parse
from horizonrl.ops.cli.recipe_names import find_recipe

ROOT = Path(__file__).parents[1]
PLACES = ("*.md", "docs/**/*.md", "examples/*.md", "examples/*/*.md", "broker/*.md")
PAGES = [page for places in PLACES for page in ROOT.glob(places)]
SHELL = re.compile(r"^( *)```(?:bash|sh|shell|console)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^( *)```\w*\n.*?^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^(?: {4}|\t).*$", re.MULTILINE)
LINE = re.compile(r"^\s*(?:\$ )?(?:\.venv/bin/)?((?:horizonrl|make) .*)$", re.MULTILINE)
SPAN = re.compile(r"(?<!`)`((?:horizonrl|make) [^`]+)`(?!`)")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|(?:path/to/|runs/|\.\.\.|recipe\.toml).*")
"""What a reader puts something else for, or has once there is a run."""
NEW_ENVIRONMENTS = {"guess"}
"""Those that a page brings itself (docs/environments/your-own.md)."""


def found(page: Path) -> Iterator[tuple[str, bool]]:
    """Yield the commands of a page, and whether each stands on a line of its own, to be typed."""
    text = re.sub(r" \\\n\s*", " ", page.read_text())
    prose = FENCED.sub("", text)
    for block in (*(block for _, block in SHELL.findall(text)), *INDENTED.findall(prose)):
        yield from ((line, True) for line in LINE.findall(block))
    yield from ((" ".join(span.split()), False) for span in SPAN.findall(prose))


FOUND = {(page.relative_to(ROOT).as_posix(), *each) for page in PAGES for each in found(page)}
TYPED = sorted(
    (page, text) for page, text, typed in FOUND if typed and text.startswith("horizonrl")
)
TOLD = sorted(
    (page, text) for page, text, typed in FOUND if not typed and text.startswith("horizonrl")
)
MAKE = sorted((page, text) for page, text, _ in FOUND if text.startswith("make"))


def test_the_commands_are_found() -> None:
    typed = {words(command)[0] for _, command in TYPED}
    assert typed >= {command.partition(" ")[0] for command in make_parser()[1]}, (
        "a command that no page shows"
    )
    assert {"make train", "make test"} <= {command.partition("  ")[0] for _, command in MAKE}


@pytest.mark.parametrize(("page", "command"), TYPED)
def test_a_command_is_understood(page: str, command: str) -> None:
    try:
        arguments, overrides = parse(words(command))
    except SystemExit:
        pytest.fail(f"{page}: the parser refuses `{command}`")
    check_files(arguments)
    try:
        check_keys(arguments, overrides)
    except ConfigError as error:
        pytest.fail(f"{page}: `{command}`: {error}")


@pytest.mark.parametrize(("page", "command"), TOLD)
def test_a_command_that_prose_mentions_has_these_options(
    page: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = words(command)
    if name.startswith("-"):
        return
    deeper = (
        rest[:1] if name in ("history", "study") or [name, *rest[:1]] == ["broker", "keys"] else []
    )
    deeper = [word for word in deeper if not stands_for_another(word)]
    with pytest.raises(SystemExit) as ended:
        parse([name, *deeper, "--help"])
    assert ended.value.code == 0, page
    text = capsys.readouterr().out
    for option in (
        word.strip("[]") for word in rest if word.strip("[").startswith("--") and "." not in word
    ):
        assert re.search(rf"{option}\b", text), f"{page}: {name} has no {option}"


def test_a_target_of_make_is_there() -> None:
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page, command in MAKE:
        asked = [word for word in shlex.split(command, comments=True)[1:] if "=" not in word]
        assert set(asked) <= targets, f"{page}: the Makefile has {', '.join(sorted(targets))}"


def test_an_extra_that_is_named_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for page in PAGES:
        for named in re.findall(r"horizonrl\[([\w,]+)\]", page.read_text()):
            assert set(named.split(",")) <= {*extras, "KIND"}, page


def words(command: str) -> list[str]:
    """Return a command's words without the program, a comment, and what sends it to the background."""
    return [word for word in shlex.split(command, comments=True) if word != "&"][1:]


def check_files(arguments: Namespace) -> None:
    """Recipes and studies that a command names are in the repository."""
    for recipe in [*getattr(arguments, "recipes", ()), *getattr(arguments, "recipe", ())]:
        assert stands_for_another(recipe) or (ROOT / find_recipe(recipe)).is_file(), recipe
    if study := getattr(arguments, "file", None):
        assert (
            stands_for_another(study)
            or (ROOT / "ops/recipes/studies" / study).with_suffix(".toml").is_file()
        ), study


def check_keys(arguments: Namespace, overrides: Sequence[str]) -> None:
    """Keys are known to the config, options to the environments. Raises ConfigError."""
    recipes = [*getattr(arguments, "recipes", ()), *getattr(arguments, "recipe", ())]
    there = [ROOT / find_recipe(recipe) for recipe in recipes if not stands_for_another(recipe)]
    if arguments.command == "envs":
        given = parse_overrides(overrides)
        for env_id in arguments.env_ids:
            check_options(env_id, given.get("options", {}) | given.get(env_id, {}))
        return
    own, options = (
        split_options(overrides) if arguments.command == "eval" else (list(overrides), {})
    )
    config = RunConfig.load(
        there, [token for token in own if not stands_for_another(token.partition(".")[2])]
    )
    for env_id in getattr(arguments, "env", None) or [env.id for env in config.envs]:
        check_options(env_id, options)


def check_options(env_id: str, options: dict[str, object]) -> None:
    if stands_for_another(env_id) or env_id in NEW_ENVIRONMENTS:
        return
    known = inspect.signature(registry.load(env_id)).parameters
    assert {*options} - {"KEY"} <= set(known), f"{env_id} takes {', '.join(known)}"


def stands_for_another(word: str | Path) -> bool:
    return PLACEHOLDER.fullmatch(str(word)) is not None
