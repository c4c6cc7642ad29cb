"""`horizonrl history counterfactual`: other objectives, trained on the groups that a run has recorded.

Nothing is played. A variant is a replay (`replay.py`) whose steps train the groups that they trained, by another
objective. Those groups are samples of the run's policies. The further a variant's own policy is from those, the less
its steps say about a run that would have played with it. The importance ratios of each step's tokens tell how far.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from horizonrl.common.config.schema import own_rate
from horizonrl.common.errors import ConfigError
from horizonrl.common.scratch import scratch
from horizonrl.learner.engine.checkpoint.model_directory import write_model_dir
from horizonrl.learner.engine.checkpoint.weights_file import WEIGHTS_FILE
from horizonrl.ops.history.replay import ReplayRequest, format_number, retrain
from horizonrl.ops.models.models import resolve_model
from horizonrl.ops.rundir.directory import read_config
from horizonrl.ops.terminal.console import plain_console

LEAST_ESS = 0.5
"""Effective sample size, as a share of a step's tokens, from which on the step is trusted. Below a half, particle
filters draw new samples (Doucet and Johansen, A tutorial on particle filtering and smoothing, 2009, section 3.5)."""
SECTIONS = ("advantage", "correction", "loss", "reference", "reward")
RATES = ("imitation", "rl")
KEYS = ("learner.betas", "learner.max_grad_norm", "learner.weight_decay")
COLUMNS = ("step", "trained", "same weights", "loss", "ESS", "KL", "clipped")


@dataclass(frozen=True, kw_only=True)
class CounterfactualRequest(ReplayRequest):
    """Which steps to train by which objectives."""

    variants: Sequence[Sequence[str]]
    """The `KEY=VALUE` of each."""
    out: Path | None
    """A directory for the last weights of each variant."""


@dataclass(frozen=True)
class Variant:
    words: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    """Of `retrain`, one per step."""

    @property
    def name(self) -> str:
        return " ".join(self.words)

    @property
    def trusted_to(self) -> int:
        """The last step before the first one whose data are too far off-policy."""
        distrusted = (row["step"] for row in self.rows if (row["ess"] or 1.0) < LEAST_ESS)
        return int(next(distrusted, self.rows[-1]["step"] + 1)) - 1


def train_variants(request: CounterfactualRequest) -> int:
    """Train each variant and print its steps, then the variants. Raises ConfigError for a key that changes the data."""
    if request.out is not None and request.out.exists():
        raise ConfigError(f"{request.out} is there already: choose another --out")
    for words in request.variants:
        for word in words:
            refuse_other_data(word)
        read_config(request.run_dir, [*request.overrides, *_flags(words)])
    variants = []
    for number, words in enumerate(request.variants, 1):
        with scratch() as folder:
            code, rows = retrain(replace(request, changes=_flags(words)), folder / WEIGHTS_FILE)
            if code:
                return code
            if rows and request.out is not None:
                _export(request.run_dir, words, rows, folder, request.out / str(number))
        if rows:  # only rank 0 has rows
            variants.append(Variant(words, rows))
            plain_console().print(_steps(variants[-1]))
    if variants:
        plain_console().print(_summary(variants))
    if variants and request.json_file is not None:
        report = [
            {"set": variant.words, "trusted_to": variant.trusted_to, "steps": variant.rows}
            for variant in variants
        ]
        request.json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def refuse_other_data(word: str) -> None:
    """Raise ConfigError unless a `KEY=VALUE` is of what the learner alone reads."""
    key, equals, _ = word.partition("=")
    section, _, name = key.partition(".")
    if not equals:
        raise ConfigError(f"--set {word} has no value: write it as KEY=VALUE")
    if section not in SECTIONS and key not in KEYS and not (section in RATES and own_rate(name)):
        raise ConfigError(
            f"--set {word}: with another {key} the run would have played or trained other groups, and a "
            f"counterfactual has those of the run alone. Set keys of {', '.join(SECTIONS)}, the learning rates of "
            f"{' and '.join(RATES)}, or {', '.join(KEYS)}; for all others, `horizonrl history fork` plays new groups"
        )


def _flags(words: Sequence[str]) -> list[str]:
    return [f"--{word}" for word in words]


def _export(
    run_dir: Path, words: Sequence[str], rows: Sequence[Mapping[str, Any]], weights: Path, out: Path
) -> None:
    config, step = read_config(run_dir), rows[-1]["step"]
    facts = {"run": config.run.name, "step": step, "counterfactual": list(words)}
    text = f"Step {step} of run {config.run.name}, trained again with {' '.join(words)}.\n"
    write_model_dir(resolve_model(config.model.name), weights, out, facts, lambda _: text)


def _steps(variant: Variant) -> Table:
    table = Table(*COLUMNS, title=variant.name, title_justify="left")
    for row in variant.rows:
        numbers = [format_number(row[name]) for name in ("loss", "ess", "kl", "clip_share")]
        trained, same = str(row["trained_tokens"]), "yes" if row["weights_equal"] else "no"
        table.add_row(str(row["step"]), trained, same, *numbers)
    return table


def _summary(variants: Sequence[Variant]) -> Table:
    table = Table("variant", "trusted up to step", "least ESS", "last KL")
    for variant in variants:
        last = variant.rows[-1]
        least = min((row["ess"] for row in variant.rows if row["ess"] is not None), default=None)
        trusted = "-" if least is None else f"{variant.trusted_to} of {last['step']}"
        table.add_row(variant.name, trusted, format_number(least), format_number(last["kl"]))
    return table
