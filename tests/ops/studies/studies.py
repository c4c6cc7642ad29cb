"""A study of two variants, and a recipe that it varies."""

from pathlib import Path

from horizonrl.ops.studies.study import Study, read_study

BASE = """
[rl]
steps = 10
"""
STUDY = """
name = "rates"
recipe = "base.toml"
seeds = [0, 1]
primary = ["high", "low"]

[overrides]
"rl.groups_per_step" = 2

[variants]
low = { "rl.lr" = 1e-5 }

[variants.high]
rl.lr = 1e-4
envs = [{ id = "parity" }]
"""


def study_of(place: Path, text: str) -> Study:
    """Write a study's text where `base.toml` is, and read it."""
    (place / "study.toml").write_text(text)
    return read_study(place / "study.toml")
