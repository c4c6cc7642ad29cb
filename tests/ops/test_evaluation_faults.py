"""Evaluations that cannot be played as asked."""

import asyncio
import errno
from pathlib import Path

import pytest
from rich.console import Console

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.ops.evaluation.journal import EvaluationJournal
from horizonrl.ops.evaluation.plan import Choice, make_plan
from horizonrl.ops.evaluation.run import play_missing
from tests.ops.test_evaluation import CONFIG, scripted


def test_an_environment_that_is_named_twice_is_played_once() -> None:
    once, twice = (
        make_plan(CONFIG, Choice(env_ids=ids), own_envs=False)
        for ids in (["parity"], ["parity"] * 2)
    )
    assert once == twice


def test_envs_without_one_for_evaluations_are_refused_with_the_cure() -> None:
    config = RunConfig.load([], ['--envs=[{"id": "parity", "kinds": ["train"]}]'])
    with pytest.raises(
        ConfigError, match="none of the envs has 'eval' among its kinds: give --env ID"
    ):
        make_plan(config, Choice(), own_envs=True)


def test_a_disk_that_is_full_is_one_error_and_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    subject = scripted({}, "even")
    plan = make_plan(CONFIG, Choice(env_ids=("parity",)), own_envs=False)
    monkeypatch.setattr(EvaluationJournal, "add", full)
    with (
        EvaluationJournal.open(tmp_path, {}) as journal,
        pytest.raises(OSError, match="No space left"),
    ):
        asyncio.run(play_missing(plan, subject, journal, Console(stderr=True)))
