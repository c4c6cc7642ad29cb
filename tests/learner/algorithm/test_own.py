"""Functions of other packages, which a recipe names: what they get, what they give, and how they fail."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from horizonrl.common.config.objective import Objective, OwnLoss
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.learner.algorithm.advantage import estimates
from horizonrl.learner.algorithm.loss import policy_loss
from horizonrl.learner.algorithm.own import number_names, require_functions
from horizonrl.learner.algorithm.reward import shaped
from horizonrl.learner.engine.model.model import ScorerOutput
from horizonrl.learner.engine.objective import LossStats, loss_stats, step_stats, two_tokens
from tests.learner.algorithm.test_advantage import trace
from tests.records import make_episode, make_turn

Package = Callable[[str], str]
HALVED = "def f(logprobs_N, inputs, *, by): return logprobs_N * by, {'seen': -logprobs_N}"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Write a module of the test, and return its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        # The folder is of this test alone: a module is imported once, and so is each function.
        name = f"own_{tmp_path.name}_{len(list(tmp_path.iterdir()))}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_a_loss_gets_its_options_and_its_numbers_are_means_over_sampled_tokens(
    package: Package,
) -> None:
    keys = [f"--loss.kind={package(HALVED)}:f", "--loss.by=0.5", "--loss.epochs=2"]
    objective = RunConfig.load([], keys).objective
    assert isinstance(objective.loss, OwnLoss) and objective.loss.options == {"by": 0.5}
    logprobs_N, inputs = two_tokens()
    assert policy_loss(logprobs_N, inputs, objective).tolist() == [-0.5, -0.5]
    zeros_N = torch.zeros(2)
    experts = replace(inputs, demo_N=torch.tensor([True, False]))

    def row(values: list[float], inputs: object) -> Tensor:
        return loss_stats(
            zeros_N, ScorerOutput(torch.tensor(values), *[zeros_N] * 3), inputs, objective
        )  # type: ignore[arg-type]

    stats = LossStats.total([row([-1.0, -2.0], inputs), row([-100.0, -3.0], experts)])
    names = number_names(objective, two_tokens)
    assert step_stats(stats, 1, 0.0, 0.0, 1.0, False, names).numbers == {"seen": 2.0}


def test_an_advantage_compares_the_returns_of_a_group(package: Package) -> None:
    name = package("def f(returns_M, less): return returns_M - less")
    objective = RunConfig.load([], [f"--advantage.kind={name}:f", "--advantage.less=1"]).objective
    made = estimates([trace([(2, reward)]) for reward in (3.0, 5.0)], None, objective)
    assert [estimate.advantages_N.tolist() for estimate in made] == [[2.0, 2.0], [4.0, 4.0]]


def test_a_correction_weighs_and_a_reward_replaces(package: Package) -> None:
    weights = package("def f(log_ratio_N, episodes_N): return log_ratio_N * 0 + 3")
    rewards = package("def f(episode, each): return [each] * len(episode.turns)")
    objective = RunConfig.load(
        [],
        [
            "--loss.kind=reinforce",
            f"--correction.kind={weights}:f",
            f"--reward.kind={rewards}:f",
            "--reward.each=2",
            "--reward.overlong=[1,2,0.5]",
        ],
    ).objective
    logprobs_N, inputs = two_tokens()
    assert policy_loss(logprobs_N, inputs, objective).tolist() == [3.0, -3.0]
    assert shaped(make_episode(0, make_turn(), make_turn()), objective.reward) == [2.0, 1.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def g(a, b, c): return a", r"py has no function 'f'"),
        ("import nowhere_at_all", r"cannot be imported: ModuleNotFoundError: .*\(.*\.py:1\)"),
        ("\n1 / 0", r"cannot be imported: ZeroDivisionError: division by zero \(.*\.py:2\)"),
        (
            "def f(a): return a",
            r"called as f\(logprobs_N, inputs\): too many .* \(.*\.py:1\)",
        ),
        (
            "\ndef f(a, b): return a / 0 * 0",
            r"returned a tensor that is not finite: .* 2 tokens \(.*\.py:2\)",
        ),
        (
            "def f(a, b): return a[:1]",
            r"returned tensor.*: return a finite tensor .*\(.*\.py:1\)",
        ),
        ("def f(a, b): return a, {'x': a.mean()}", r"number 'x', returned .*\(.*\.py:1\)"),
        (
            "def f(a, b):\n    return {}['epsilon']",
            r"fails: KeyError: 'epsilon' \(.*\.py:2\)",
        ),
    ],
)
def test_an_error_names_the_file_and_the_line(package: Package, text: str, message: str) -> None:
    objective = RunConfig.load([], [f"--loss.kind={package(text)}:f"]).objective
    with pytest.raises(ConfigError, match=message):
        _ = require_functions(objective) or number_names(objective, two_tokens)


TAKES = "def f(logprobs_N, inputs, *, epsilon, beta=1): return logprobs_N"


@pytest.mark.parametrize(
    ("text", "option", "message"),
    [
        (TAKES, "betaa", r"loss\.betaa: neither .*; did you mean beta\? .* \(.*\.py:1\)"),
        (TAKES, "kin", r"loss\.kin: neither a key of loss nor an option of .*did you mean kind\?"),
        (TAKES, "inputs", r"loss\.inputs: neither a key .* It takes epsilon, beta \(.*\.py:1\)"),
        (TAKES, "beta", r"called as f\(logprobs_N, inputs\): missing .* 'epsilon' \(.*\.py:1\)"),
        ("def f(a, b, **more): return a", "kin", None),
    ],
)
def test_an_option_that_the_function_does_not_take_is_refused(
    package: Package, text: str, option: str, message: str | None
) -> None:
    keys = [f"--loss.kind={package(text)}:f", f"--loss.{option}=1"]
    objective = RunConfig.load([], keys).objective
    if message is None:
        require_functions(objective)
        return
    with pytest.raises(ConfigError, match=message):
        require_functions(objective)


def test_a_module_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match="no module 'nowhere_at_all': pip install the package"):
        require_functions(RunConfig.load([], ["--loss.kind=nowhere_at_all:f"]).objective)


def test_what_is_not_finite_in_training_ends_the_run(package: Package) -> None:
    name = package("def f(returns_M): return returns_M * float('nan')")
    objective = RunConfig.load([], [f"--advantage.kind={name}:f"]).objective
    with pytest.raises(ConfigError, match=r"return a finite number for each of them \(.*\.py:1\)"):
        estimates([trace([(1, float(reward))]) for reward in np.arange(2)], None, objective)


FAILS = "def f(*args):\n    return args[0].nothing_at_all"


@pytest.mark.parametrize(
    ("key", "call"),
    [
        ("reward", lambda objective: shaped(make_episode(0, make_turn()), objective.reward)),
        ("advantage", lambda objective: estimates([trace([(1, 0.5)])] * 2, None, objective)),
        ("correction", lambda objective: policy_loss(*two_tokens(), objective)),
    ],
)
def test_what_fails_in_training_is_named_with_its_line(
    key: str, call: Callable[[Objective], Any], package: Package
) -> None:
    settings = [f"--{key}.kind={package(FAILS)}:f", "--loss.kind=reinforce"]
    objective = RunConfig.load([], settings).objective
    with pytest.raises(ConfigError, match=rf"{key}\.kind = .* fails: AttributeError: .*py:2\)"):
        call(objective)


def test_the_options_of_another_package_end_with_its_kind(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[loss]\nkind = "own:f"\nepsilon = 1\nepochs = 2\n')
    assert RunConfig.load([recipe], ["--loss.kind=gspo"]).loss.epochs == 2
    assert RunConfig.load([recipe], ["--loss.kind=own:g"]).loss.model_extra == {}
    assert RunConfig.load([recipe], ["--loss.epsilon=3"]).loss.model_extra == {"epsilon": 3}
