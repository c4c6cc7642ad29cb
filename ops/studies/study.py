"""A study: variants of one recipe, each trained under the same seeds.

Place in the flow: **study file → runs** → `run.py` → `outcome.py` → `comparison.py`. An override is a quoted key
(`"rl.lr" = 1e-5`) or a table, as in a recipe. The variants are listed in `[variants]`, or they are the cross product of
the axes of `[grid]`.
"""

import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError, did_you_mean
from horizonrl.common.types import MAX_GROUP_SIZE, Name

RECIPES = Path(__file__).parents[1] / "recipes"
STUDIES = RECIPES / "studies"
OWN_KEYS = ("run.name", "run.root", "run.seed")
"""Keys that the study sets itself in every run."""

KEPT_OF_LEARNER = {"checkpoint_every", "keep_checkpoints"}
"""Settings of what a run leaves behind, which its training does not depend on."""

Overrides = dict[str, Any]
SMALL = "small"
"""The phase that every study has: the machinery alone in seconds, on two variants and with no model in training."""
SMALL_OVERRIDES: Overrides = {
    "model.name": "smollm2-135m-instruct",  # for its tokenizer
    "model.max_context_tokens": 512,
    "learner.backend": "hash",
    "actor.engine": "scripted",
    "actor.slots": 32,
    "imitation.steps": 0,
    "rl.steps": 2,
    "rl.groups_per_step": 2,
    "eval.every": 1,
    "eval.samples": 1,
    "eval.tasks": 4,
    # Random tokens solve nothing: only their number tells a group's episodes apart.
    "reward.overlong": [1, 1000, 1.0],
}


def _refuse_twice(seeds: list[int]) -> list[int]:
    if len(set(seeds)) != len(seeds):
        raise PydanticCustomError("twice", "names one twice")
    return seeds


Seeds = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(min_length=1), AfterValidator(_refuse_twice)
]


class TomlTable(BaseModel):
    """A table of the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class PhaseFile(TomlTable):
    """A part of a study that is run for itself: a screen, a confirmation, a small variant for CI."""

    seeds: Seeds
    only: list[str] = []
    """Names or shell patterns of its variants; empty means all."""
    overrides: Overrides = {}
    """Overrides of all its variants, which win over the study's and the variants' own."""


class TableFile(TomlTable):
    """The paper's 27 tasks, played by each run with its weights before and after RL."""

    tasks: Annotated[int, Field(ge=1)]
    """Of each category."""
    samples: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)]
    """Episodes of each task."""


SMALL_TABLE = TableFile(tasks=1, samples=1)


class StudyFile(TomlTable):
    """The TOML file."""

    name: Name
    recipe: str | list[str] | None = None
    """Paths relative to this file, or names in ops/recipes. Later recipes override earlier ones. A variant that gives a
    `recipe` among its overrides has that one instead."""
    seeds: Seeds
    primary: tuple[str, str] | None = None
    """The contrast that the study is about, written like one of `contrasts` and tested alone."""
    primary_axis: (
        Literal["end", "environment_steps", "generated_tokens", "processed_tokens", "seconds"]
        | None
    ) = None
    """Where it is compared: at the end, or at an equal cost. Elsewhere it is one of `contrasts`. None: everywhere."""
    contrasts: list[tuple[str, str]] = []
    """Variants to compare seed by seed: the first minus the second. In a grid, two values of one axis, compared under
    each value of the others. `*` as the first means every other one. Their p are corrected together."""
    overrides: Overrides = {}
    """Overrides of all variants."""
    variants: dict[Name, Overrides] = {}
    """The overrides of each variant."""
    grid: dict[Name, dict[Name, Overrides]] = {}
    """Axes. Each is a table from the name of a value to its overrides."""
    table: TableFile | None = None
    """Played at the end of each run; None plays no table."""
    phases: dict[Name, PhaseFile] = {}
    """Parts of the study that `--phase` selects. Every study has the phase `small` besides."""


@dataclass(frozen=True, slots=True)
class Variant:
    names: tuple[str, ...]
    """The variant's name, or one name per axis of a grid."""
    overrides: Mapping[str, Any]
    recipes: Sequence[Path]

    @property
    def name(self) -> str:
        return "-".join(self.names)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two variants that are compared seed by seed."""

    variant: str
    against: str
    primary: bool


@dataclass(frozen=True, slots=True)
class Study:
    name: str
    seeds: Sequence[int]
    variants: Sequence[Variant]
    pairs: Sequence[Pair]
    axes: Sequence[str]
    """The axes of the grid; empty without a grid."""
    phases: Mapping[str, PhaseFile] = field(default_factory=dict)
    primary_axis: str | None = None
    table: TableFile | None = None

    @property
    def table_split(self) -> str:
        """The split of the tables: what variants are chosen by is no result."""
        return "test" if len(self.variants) == 1 else "validation"

    def phase(self, name: str) -> tuple["Study", Sequence[str]]:
        """Return the study with the seeds and variants of a phase, and the phase's overrides.

        Raises ConfigError if the study has no such phase.
        """
        if name not in self.phases:
            names = ", ".join(self.phases) or "none"
            raise ConfigError(f"study {self.name} has no phase {name!r}; its phases: {names}")
        phase = self.phases[name]
        overrides = [f"--{key}={json.dumps(value)}" for key, value in flatten(phase.overrides)]
        table = SMALL_TABLE if name == SMALL and self.table is not None else self.table
        _, variants = select(self, (), phase.only)
        return replace(self, seeds=phase.seeds, variants=variants, table=table), overrides


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One seed of one variant."""

    variant: Variant
    seed: int
    config: RunConfig

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def directory(self) -> Path:
        return self.config.run_dir


def read_study(path_or_name: Path) -> Study:
    """Read a study from a file, or by its name from ops/recipes/studies. Raises ConfigError if it is invalid."""
    path = _find(str(path_or_name), (Path(), STUDIES), "study")
    try:
        file = StudyFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(
            f"{path} nests tables or lists too deeply to be read: flatten it"
        ) from None
    except ValidationError as error:
        raise ConfigError(
            "\n".join(f"{path}: {_explain(problem)}" for problem in error.errors())
        ) from None
    if bool(file.variants) == bool(file.grid):
        raise ConfigError(f"{path}: give either [variants] or [grid], and at least one variant")
    variants = list(_variants(file, path))
    names = [variant.name for variant in variants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"{path}: {', '.join(twice)} would name two variants: rename a value on an axis of [grid]"
        )
    pairs = _pairs(file, variants, path)
    phases = {SMALL: _small(file, pairs, names), **file.phases}
    return Study(
        file.name,
        file.seeds,
        variants,
        pairs,
        list(file.grid),
        phases,
        file.primary_axis,
        file.table,
    )


def plan(study: Study, directory: Path, overrides: Sequence[str] = ()) -> list[StudyRun]:
    """Return every run, ordered by seed, so that a study that is stopped early has the same seeds of all variants.

    Raises ConfigError if a config is invalid, if two variants have the same config, or if one of
    several would be chosen by test tasks.
    """
    runs = [
        StudyRun(variant, seed, _config(study, variant, seed, directory, overrides))
        for seed, variant in itertools.product(study.seeds, study.variants)
    ]
    # One seed is enough: seeds differ in [run] alone, which `training_config` leaves out.
    first = runs[: len(study.variants)]
    by_test = [one.variant.name for one in first if one.config.eval.split == "test"]
    if by_test and len(first) > 1:
        raise ConfigError(
            f"study {study.name}: eval.split is test in variant {by_test[0]}, one of {len(first)} to "
            "choose from: set it to validation, and play test with what is chosen (`horizonrl eval`)"
        )
    for one, other in itertools.combinations(first, 2):
        if training_config(one.config) == training_config(other.config):
            raise ConfigError(
                f"study {study.name}: variants {one.variant.name} and {other.variant.name} resolve to the same config; "
                "an override, in the study or on the command line, sets what should tell them apart"
            )
    return runs


def select(
    study: Study, seeds: Sequence[int], patterns: Sequence[str]
) -> tuple[list[int], list[Variant]]:
    """Return the selected seeds and variants, by default all.

    A pattern is a variant's name, a value of one axis of a grid, or a shell pattern of either, such as `ppo-*`. Raises
    ConfigError for a seed or a pattern that selects nothing in the study.
    """
    if foreign := [seed for seed in seeds if seed not in study.seeds]:
        raise ConfigError(f"--seeds names {foreign}; study {study.name} has {list(study.seeds)}")
    for pattern in patterns:
        if not any(_matches(variant, pattern) for variant in study.variants):
            names = ", ".join(variant.name for variant in study.variants)
            raise ConfigError(
                f"--only {pattern} matches no variant; study {study.name} has {names}"
            )
    chosen = [
        variant
        for variant in study.variants
        if not patterns or any(_matches(variant, pattern) for pattern in patterns)
    ]
    return [seed for seed in study.seeds if not seeds or seed in seeds], chosen


def _matches(variant: Variant, pattern: str) -> bool:
    return any(fnmatch(name, pattern) for name in (variant.name, *variant.names))


def _pairs(file: StudyFile, variants: Sequence[Variant], path: Path) -> list[Pair]:
    """Return what is compared with what. Raises ConfigError for a contrast that no axis has."""
    by_names = {variant.names: variant.name for variant in variants}
    pairs: dict[tuple[str, str], Pair] = {}
    named = [(file.primary, True)] if file.primary is not None else []
    for contrast, primary in [*named, *((name, False) for name in file.contrasts)]:
        one, other = contrast
        matched = False
        for names, against in by_names.items():
            for axis in [folder for folder, value in enumerate(names) if value == other]:
                for ours, variant in by_names.items():
                    same = ours[:axis] + ours[axis + 1 :] == names[:axis] + names[axis + 1 :]
                    if same and variant != against and one in ("*", ours[axis]):
                        matched = True
                        pairs.setdefault((variant, against), Pair(variant, against, primary))
        if not matched:
            values = ", ".join(dict.fromkeys(value for names in by_names for value in names))
            raise ConfigError(
                f"{path}: no two variants differ in {one!r} and {other!r} alone; there are {values}"
            )
    return list(pairs.values())


def _small(file: StudyFile, pairs: Sequence[Pair], names: Sequence[str]) -> PhaseFile:
    """Return the phase `small`: one seed of the first two variants that are compared."""
    only = [pairs[0].variant, pairs[0].against] if pairs else list(names[:2])
    return PhaseFile(seeds=file.seeds[:1], only=only, overrides=SMALL_OVERRIDES)


def _find(name: str, folders: Sequence[Path], what: str) -> Path:
    for folder in folders:
        for path in (folder / name, folder / f"{name}.toml"):
            if path.is_file():
                return path
    names = sorted(path.stem for path in folders[-1].glob("*.toml"))
    key = folders[-1].relative_to(RECIPES.parents[1])
    meant = f"{did_you_mean(name, names)} Known: {', '.join(names)}"
    raise ConfigError(f"no {what} {name!r}: neither a file nor in {key}{meant}")


def _variants(file: StudyFile, path: Path) -> Iterator[Variant]:
    axes = list(file.grid.values()) or [file.variants]
    for values in itertools.product(*(axis.items() for axis in axes)):
        names = tuple(name for name, _ in values)
        settings: Overrides = {}
        for _, overrides in values:
            keys = dict(flatten(overrides))
            if shared := sorted(settings.keys() & keys.keys()):
                raise ConfigError(
                    f"{path}: two axes of [grid] set {', '.join(shared)}: let one axis set it"
                )
            settings |= keys
        recipe = settings.pop("recipe", file.recipe)
        options = [recipe] if isinstance(recipe, str) else recipe
        if not isinstance(options, list) or not all(
            isinstance(contrast, str) for contrast in options
        ):
            named = f"variant {'-'.join(names)} has recipe {recipe!r}"
            raise ConfigError(
                f"{path}: {named}: give it, or the study, the name of a recipe or a list of names"
            )
        recipes = [_find(contrast, (path.parent, RECIPES), "recipe") for contrast in options]
        merged = dict(flatten(file.overrides)) | settings
        if mine := sorted(merged.keys() & set(OWN_KEYS)):
            raise ConfigError(
                f"{path}: {', '.join(mine)} cannot be overridden: the study names and seeds its runs"
            )
        yield Variant(names, merged, recipes)


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (`section.key`, value) for every value that is not a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _config(
    study: Study, variant: Variant, seed: int, directory: Path, overrides: Sequence[str]
) -> RunConfig:
    settings = {
        "run.name": f"{variant.name}-seed{seed}",
        "run.root": str(directory.resolve()),
        "run.seed": seed,
    }
    options = [f"--{key}={json.dumps(value)}" for key, value in variant.overrides.items()]
    named = [f"--{key}={json.dumps(value)}" for key, value in settings.items()]
    try:
        config = RunConfig.load(variant.recipes, [*options, *overrides, *named])
    except ConfigError as error:
        raise ConfigError(f"study {study.name}, variant {variant.name}: {error}") from None
    if config.rl.steps == 0:
        raise ConfigError(
            f"study {study.name}, variant {variant.name}: rl.steps is 0: a study measures RL"
        )
    return config


def training_config(config: RunConfig) -> dict[str, Any]:
    """Return what a run trains with, as JSON has it: its config without its name, place, seed and checkpoints."""
    return config.model_dump(mode="json", exclude={"run": True, "learner": KEPT_OF_LEARNER})


def _explain(problem: Any) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{path}: no such key; known keys: {', '.join(sorted(StudyFile.model_fields))}"
    return f"{path}: {problem['msg']} (got {problem['input']!r})"
